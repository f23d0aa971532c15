"""Verdicts in a file of JSON lines: a run of many thousand cases that was stopped goes on, faults are judged anew."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.fuzz.oracle import Verdict


@dataclass(frozen=True)
class Judged:
    """One case's verdict; `valid` says whether its plan has a meaning."""

    seed: int
    case: int
    valid: bool
    verdict: Verdict

    def to_json(self) -> dict[str, Any]:
        v = self.verdict
        return {
            "seed": self.seed, "case": self.case, "valid": self.valid, "kind": v.kind, "code": v.code, "real": v.real,
            "detail": v.detail[:2000] if v.kind == "wrong" else "",
        }  # fmt: skip

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Judged:
        verdict = Verdict(found["kind"], found["code"], found["detail"], found["real"])
        return cls(found["seed"], found["case"], found["valid"], verdict)


class Log:
    """Verdicts by (seed, case); the last line of a case counts. Without a path they are kept in memory."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path
        self.found: dict[tuple[int, int], Judged | None] = {}
        for line in path.read_text().splitlines() if path is not None and path.exists() else ():
            found = json.loads(line)
            self.found[found["seed"], found["case"]] = Judged.from_json(found) if "kind" in found else None

    def add(self, seed: int, case: int, judged: Judged | None) -> None:
        """Keep a verdict, or that no case was drawn."""
        self.found[seed, case] = judged
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a") as file:
                file.write(json.dumps(judged.to_json() if judged else {"seed": seed, "case": case}) + "\n")

    def judged(self) -> list[Judged]:
        """All verdicts, in the order of seeds and cases."""
        return [found for _, found in sorted(self.found.items()) if found is not None]

    def wrong(self) -> list[Judged]:
        return [found for found in self.judged() if found.verdict.kind == "wrong"]
