"""The record that one composition was verified: what, where, versions, errors, and what was not checked."""

from __future__ import annotations

import json
import textwrap
from dataclasses import asdict, dataclass
from typing import Any

from meshplan.errors import PlanError

WIDTH = 100


@dataclass(frozen=True)
class Check:
    """One thing that was compared.

    Attributes:
        name: loss, gradients, parameters, replicas, inputs, collectives, initialisation or calls.
        passed: whether it held.
        detail: the worst parameter, or the first difference, or what was counted.
        error: largest relative error, or None where equality was asked for.
        tolerance: largest error that passes, or None likewise.
    """

    name: str
    passed: bool
    detail: str = ""
    error: float | None = None
    tolerance: float | None = None


@dataclass(frozen=True)
class Receipt:
    """The outcome of `verify`. `str(receipt)` is a page of text, `to_json` and `from_json` are inverses.

    Attributes:
        model: name of the model or its factory.
        composition: degrees and sections in words, such as `dp_shard 2 x tp 2 + sp`.
        mesh: degree by axis.
        world_size: number of ranks.
        dtype: torch's bare name.
        seed, steps: as given to `verify`.
        inputs: the global batch, such as `{"tokens": "int64[4, 32]"}`.
        device: where and over what the ranks ran, such as `cpu, gloo`.
        versions: of python, torch and meshplan.
        checks: what was compared.
        not_checked: what this receipt says nothing about.
    """

    model: str
    composition: str
    mesh: dict[str, int]
    world_size: int
    dtype: str
    seed: int
    steps: int
    inputs: dict[str, str]
    device: str
    versions: dict[str, str]
    checks: tuple[Check, ...]
    not_checked: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """True when every check held."""
        return all(check.passed for check in self.checks)

    def __bool__(self) -> bool:
        return self.passed

    def check(self, name: str) -> Check:
        """The check of that name. Raises KeyError if it was not made."""
        for check in self.checks:
            if check.name == name:
                return check
        raise KeyError(name)

    def raise_if_failed(self) -> Receipt:
        """This receipt if it passed. Raises PlanError `verify-failed`, with the failed checks, if not."""
        failed = [f"{check.name}: {_numbers(check)}{check.detail}" for check in self.checks if not check.passed]
        if failed:
            raise PlanError(
                f"{self.model}, {self.composition}: ranks and one device differ\n    " + "\n    ".join(failed),
                code="verify-failed",
            )
        return self

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values; an infinite or undefined error, for which JSON has no number, is `"inf"` or `"nan"`."""
        out = asdict(self)
        out["passed"] = self.passed
        out["checks"] = [{**asdict(c), "error": _finite(c.error)} for c in self.checks]
        out["not_checked"] = list(self.not_checked)
        return out

    @classmethod
    def from_json(cls, value: dict[str, Any] | str) -> Receipt:
        """The receipt that `to_json` made, from the dict or its text."""
        data = dict(json.loads(value) if isinstance(value, str) else value)
        data.pop("passed", None)
        data["checks"] = tuple(
            Check(**{**c, "error": None if c["error"] is None else float(c["error"])}) for c in data["checks"]
        )
        data["not_checked"] = tuple(data["not_checked"])
        return cls(**data)

    def __str__(self) -> str:
        verdict = "verified" if self.passed else "FAILED"
        inputs = ", ".join(f"{name} {shape}" for name, shape in self.inputs.items())
        head = [
            f"{verdict}: {self.model}   {self.composition}",
            f"{self.world_size} ranks ({self.device}) against one device   {self.dtype}   "
            f"{self.steps} step{'s' * (self.steps != 1)}   seed {self.seed}",
            f"inputs {inputs}",
            "",
            f"{'check':<15}{'result':<9}{'error':<10}{'tolerance':<11}worst, or first difference",
        ]
        lines = [line for text in head for line in _wrap(text, "  ")]
        for c in self.checks:
            numbers = f"{c.name:<15}{'ok' if c.passed else 'WRONG':<9}{_short(c.error):<10}{_short(c.tolerance):<11}"
            lines += _wrap(numbers + (c.detail or "-"), " " * 45)
        lines.append("")
        lines += _wrap("not checked: " + "; ".join(self.not_checked), "  ")
        lines += _wrap("versions: " + ", ".join(f"{name} {version}" for name, version in self.versions.items()), "  ")
        return "\n".join(lines)


def _numbers(check: Check) -> str:
    if check.error is None or check.tolerance is None:
        return ""
    return f"error {_short(check.error)} above {_short(check.tolerance)}, "


def _short(x: float | None) -> str:
    return "equal" if x is None else f"{x:.1e}" if x else "0"


def _finite(x: float | None) -> float | str | None:
    return x if x is None or x - x == 0 else str(x)


def _wrap(text: str, indent: str) -> list[str]:
    # Runs of spaces are columns here and must survive.
    options: dict[str, Any] = {"width": WIDTH, "subsequent_indent": indent, "drop_whitespace": True}
    return textwrap.wrap(text, **options, replace_whitespace=False, break_on_hyphens=False) or [""]
