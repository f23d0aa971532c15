"""A case as data: blocks of lines of torch code, and a plan; as a module, as a batch, and as a script that reproduces it."""

from __future__ import annotations

import json
import linecache
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from meshplan.plan.plan import Plan

HEADER = "import torch\nimport torch.nn.functional as F\nfrom torch import nn\n"


@dataclass(frozen=True)
class Step:
    """One statement of a forward: `code` defines the names in `outs`."""

    outs: tuple[str, ...]
    code: str


@dataclass(frozen=True)
class Block:
    """One module class: its arguments, its members (attribute, constructor), its statements, and what it returns."""

    name: str
    args: tuple[str, ...]
    members: tuple[tuple[str, str], ...]
    steps: tuple[Step, ...]
    returns: str
    setup: tuple[str, ...] = ()

    def source(self) -> str:
        """The class as Python text."""
        lines = [f"class {self.name}(nn.Module):", "    def __init__(self):", "        super().__init__()"]
        lines += [f"        self.{attribute} = {made}" for attribute, made in self.members]
        lines += [f"        {line}" for line in self.setup]
        lines += ["", f"    def forward(self, {', '.join(self.args)}):"]
        lines += [f"        {step.code}" for step in self.steps]
        return "\n".join([*lines, f"        return {self.returns}"])


@dataclass(frozen=True)
class Input:
    """A global input: `kind` is float, ids, labels or mask; ids and labels stay below `limit`. `place` is the plan's."""

    shape: tuple[int, ...]
    kind: str
    limit: int = 0
    place: Mapping[str, str] = field(default_factory=dict)

    @property
    def dtype(self) -> str:
        return {"float": "float64", "mask": "bool"}.get(self.kind, "int64")


@dataclass(frozen=True)
class Case:
    """A program and a plan for it.

    Attributes:
        blocks: innermost first; the last is the model.
        plan: mesh, rules and sections, in the words of a plan file.
        valid: whether the plan has a meaning, so that refusing it is too strict. Spoilt plans say how in `spoilt`.
        seed: of parameters, batch and dropout.
    """

    blocks: tuple[Block, ...]
    inputs: dict[str, Input]
    plan: dict[str, Any]
    valid: bool = True
    spoilt: str = ""
    seed: int = 0

    @property
    def world(self) -> int:
        ranks = 1
        for n in self.plan["mesh"].values():
            ranks *= n
        return ranks

    def source(self) -> str:
        """The model's classes as Python text."""
        return HEADER + "\n\n" + "\n\n\n".join(block.source() for block in self.blocks) + "\n"

    def built(self) -> nn.Module:
        """A fresh model in float64."""
        return build(self.source(), self.blocks[-1].name)

    def plan_data(self) -> dict[str, Any]:
        """The plan as the mapping of a plan file."""
        inputs = {
            name: {"dtype": i.dtype, "shape": list(i.shape), **({"place": dict(i.place)} if i.place else {})}
            for name, i in self.inputs.items()
        }
        return {"mesh": self.plan["mesh"], "inputs": inputs, **{k: v for k, v in self.plan.items() if k != "mesh"}}

    def made_plan(self) -> Plan:
        """The plan. Raises PlanError."""
        return Plan.from_yaml(json.dumps(self.plan_data()), "plan.yaml")

    def batch(self) -> dict[str, Tensor]:
        """The global batch: normal floats, ids, labels of which later rows ignore more, masks with true first columns."""
        return {name: make(i, self.seed + k) for k, (name, i) in enumerate(self.inputs.items())}

    def script(self) -> str:
        """A script that judges this case alone."""
        given = {name: (list(i.shape), i.kind, i.limit) for name, i in self.inputs.items()}
        return (
            f"{self.source()}\n\n"
            "import meshplan as mp\n"
            "from benchmarks.fuzz.case import Input, make\n"
            "from meshplan.verify.aligned import align\n\n"
            f'PLAN = """{json.dumps(self.plan_data())}"""\n'
            f"batch = {{name: make(Input(*given), {self.seed} + k) for k, (name, given) in enumerate({given}.items())}}\n"
            f"model = {self.blocks[-1].name}().double()\n"
            f"print(align(model, mp.Plan.from_yaml(PLAN), {self.world}, batch, {self.seed}))\n"
        )

    def with_plan(self, **changes: Any) -> Case:
        """The case with some keys of its plan replaced, or dropped where the value is None."""
        plan = {**self.plan, **changes}
        return replace(self, plan={k: v for k, v in plan.items() if v is not None})


def make(item: Input, seed: int) -> Tensor:
    """One global input."""
    generator = torch.Generator().manual_seed(seed)
    shape = tuple(item.shape)
    if item.kind == "float":
        return torch.randn(shape, generator=generator, dtype=torch.float64)
    if item.kind == "mask":
        drawn = torch.rand(shape, generator=generator) < 0.7
        drawn[..., 0] = True
        return drawn
    ids = torch.randint(item.limit, shape, generator=generator)
    if item.kind == "labels" and ids.numel() > 2:
        flat = ids.view(-1)
        later = torch.arange(flat.numel()) > flat.numel() // 2
        flat[(torch.rand(flat.shape, generator=generator) < 0.5) & later] = -100
    return ids


def build(source: str, name: str) -> nn.Module:
    """The model whose classes are `source`, in float64; its lines are known to tracebacks and error messages."""
    file = f"<fuzz {abs(hash(source)):x}>"
    linecache.cache[file] = (len(source), None, source.splitlines(True), file)
    space: dict[str, Any] = {"__name__": "fuzzed"}
    exec(compile(source, file, "exec"), space)
    model: nn.Module = space[name]().double()
    return model
