"""A pattern's blocks and what each mesh axis means to them, as a table and as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from meshplan.cost.pattern import BlockStress, PatternStress
from meshplan.models.hybrid import LETTERS
from meshplan.report.units import bytes_text, count_text

AXES = ("tp", "cp", "ep", "dp_shard", "pp")
"""Columns, of those axes that have more than one rank."""


@dataclass(frozen=True)
class PatternReport:
    """`meshplan pattern`: a `PatternStress` to print."""

    stress: PatternStress

    def to_dict(self) -> dict[str, Any]:
        """Plain data: parameters and FLOPs counted, bytes that a rank sends for one block modelled."""
        run = self.stress.run
        return {
            "pattern": run.config.pattern,
            "mesh": dict(run.view.spec.axes),
            "ep": run.view.degree("ep"),
            "batch": run.batch,
            "seq": run.seq,
            "dtype": str(run.dtype).removeprefix("torch."),
            "blocks": [
                {
                    "letter": block.letter,
                    "block": LETTERS[block.letter],
                    "blocks": block.blocks,
                    "counted": {"parameters": block.parameters, "active": block.active, "flops": block.flops},
                    "modelled": {
                        axis: {"forward": s.forward, "backward": s.backward, "passing": s.passing, "note": s.note}
                        for axis, s in block.sent.items()
                    },
                    "most": block.most,
                }
                for block in self.stress.blocks
            ],
            "stages": list(self.stress.stages),
            "imbalance": self.stress.imbalance,
        }

    def __rich__(self) -> RenderableType:
        run, blocks = self.stress.run, self.stress.blocks
        axes = [axis for axis in AXES if axis in blocks[0].sent]
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        table.add_column("block", no_wrap=True)
        for name in ("parameters", "active", "FLOPs", *axes):
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("most", no_wrap=True)
        for block in blocks:
            cells = [count_text(block.parameters), count_text(block.active), count_text(round(block.flops))]
            cells += [bytes_text(block.sent[axis].total) if block.sent[axis].total else "-" for axis in axes]
            table.add_row(f"{block.blocks} {block.letter} {LETTERS[block.letter]}", *cells, block.most or "-")
        head = (
            f"{run.config.pattern}   {run.batch} x {run.seq} tokens a data rank\n{run.view.spec}   {run.view}\n"
            f"of one block: parameters, those of a token, its FLOPs forward (counted); in {str(run.dtype)[6:]}, bytes that a\n"
            "rank sends forward and backward on each axis, at a cut for pp (modelled)"
        )
        lines: list[RenderableType] = [Text(head), table, *(Text(line) for line in _notes(blocks, axes))]
        if len(self.stress.stages) > 1:
            stages = " | ".join(self.stress.stages)
            lines.append(Text(f"pp {stages}: the busiest stage has {self.stress.imbalance:.2f} x the mean FLOPs"))
        return Group(*lines)


def _notes(blocks: tuple[BlockStress, ...], axes: list[str]) -> list[str]:
    """What is special about an axis, once for all blocks that it is true of."""
    said: dict[tuple[str, str], list[str]] = {}
    for axis in axes:
        for block in blocks:
            sent, more = block.sent[axis], ""
            if sent.passing is not None:
                more = (
                    f" (handing the state from rank to rank would send {bytes_text(2 * sent.passing)}: not there yet)"
                )
            if sent.note:
                said.setdefault((axis, sent.note + more), []).append(block.letter)
    return [f"{axis} {' '.join(letters)}: {note}" for (axis, note), letters in said.items()]
