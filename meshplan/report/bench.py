"""What `meshplan bench` prints: a row a program, a row an axis, and what every number is."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from meshplan.report.units import bytes_text
from meshplan.verify.measure import ONE_DEVICE, PEER, Measured, Steps


@dataclass(frozen=True)
class BenchReport:
    """One run of `meshplan bench`."""

    model: str
    steps: int
    found: Measured

    @property
    def programs(self) -> dict[str, Steps | None]:
        """meshplan and what it is compared with; None for what was not measured."""
        return {
            "meshplan": self.found.ours,
            ONE_DEVICE: self.found.single,
            PEER: self.found.peer,
        }

    @property
    def notes(self) -> list[str]:
        """How to read the numbers."""
        cuda = "nccl" in self.found.device
        host = "until its last kernel is queued" if cuda else "CPU time of the step's thread, computation included"
        memory = "allocated on the GPU" if cuda else "resident memory of the process (RSS)"
        lines = [
            f"measured: medians of {self.steps} steps, forward + backward + AdamW, on the slowest rank",
            f"host: {host}; memory: peak {memory}",
            "bytes and collectives: counted, of one rank and step; their time: measured, each alone, no overlap",
        ]
        lines += [] if cuda else ["GPU: not measured; ranks and the one device share this machine's cores"]
        return lines + [f"{program}: {why}" for program, why in self.found.why_not.items()]

    def to_dict(self) -> dict[str, Any]:
        """All numbers, in seconds and bytes."""
        found = self.found
        return {
            "model": self.model,
            "mesh": found.mesh,
            "device": found.device,
            "steps": self.steps,
            "tokens_per_step": found.tokens,
            "programs": {
                name: None if s is None else {**asdict(s), "tokens_per_s": found.tokens / s.step_s}
                for name, s in self.programs.items()
            },
            "axes": [asdict(a) for a in found.axes],
            "notes": self.notes,
        }

    def __rich__(self) -> Group:
        mesh = " x ".join(f"{axis} {n}" for axis, n in self.found.mesh.items())
        title = f"{self.model}   {mesh}   {self.found.tokens:,} tokens a step\n{self.found.device}\n"
        table = Table(title=title, title_justify="left", box=None, header_style="bold")
        for name in ("program", "step ms", "tokens/s", "host ms", "peak memory"):
            table.add_column(name, justify="left" if name == "program" else "right")
        for name, s in self.programs.items():
            if s is None:
                table.add_row(name, *["not measured"] * 4)
                continue
            peak = "not measured" if s.peak_bytes is None else bytes_text(s.peak_bytes)
            rate = f"{self.found.tokens / s.step_s:,.0f}"
            table.add_row(name, f"{s.step_s * 1e3:,.1f}", rate, f"{s.host_s * 1e3:,.1f}", peak)
        axes = Table(box=None, header_style="bold")
        for name in ("axis", "collectives", "bytes", "alone ms"):
            axes.add_column(name, justify="left" if name == "axis" else "right")
        for a in self.found.axes:
            alone = "not measured" if a.seconds is None else f"{a.seconds * 1e3:,.1f}"
            axes.add_row(f"{a.axis}", f"{a.collectives:,}", bytes_text(a.bytes), alone)
        return Group(table, Text(""), axes, Text(""), *(Text(note, style="dim") for note in self.notes))
