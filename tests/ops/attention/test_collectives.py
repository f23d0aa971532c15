"""What a method is said to send is what it makes every rank send, one by one: told, simulated, and on gloo ranks."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from meshplan import compat
from meshplan.mesh.build import Groups, build_groups
from meshplan.ops.attention.attention import context_attention
from meshplan.ops.attention.cost import Local, bytes_sent, collectives
from meshplan.ops.attention.sequence import Sequence
from meshplan.runtime.comm import AxisGroup, Pending
from meshplan.runtime.recorder import record_collectives
from meshplan.runtime.simulated import SimulatedGroup, SimulatedGroups, World
from tests.ops.attention.reference import spec_of

METHODS = {"ring": None, "allgather": None, "ulysses": None, "hybrid": 2}
B, H, SIZE, D, DV = 2, 4, 24, 5, 3

Line = tuple[str, str, str, int, str]  # phase, op, axis, elements, dtype


@dataclasses.dataclass(frozen=True)
class Setting:
    method: str
    n: int = 4
    kv_heads: int = 2
    balance: str = "zigzag"
    dtype: torch.dtype = torch.bfloat16
    bias: tuple[int, ...] | None = None
    bias_dtype: torch.dtype = torch.bfloat16
    docs: bool = False
    keep: bool = False
    transport: str = "send"


def run(s: Setting, groups: Groups) -> None:
    group = groups.group("cp")
    rows = SIZE // s.n
    shapes = ((B, H, rows, D), (B, s.kv_heads, rows, D), (B, s.kv_heads, rows, DV))
    q, k, v = (torch.ones(shape, dtype=s.dtype, requires_grad=True) for shape in shapes)
    told: dict[str, Any] = {}
    if s.bias is not None:
        bias = torch.ones(s.bias, dtype=s.bias_dtype)
        told["attn_mask"] = bias.requires_grad_() if bias.is_floating_point() else bias
    if s.docs:
        told["docs"] = torch.zeros(rows, dtype=torch.int64)
    if s.method == "hybrid":
        told |= {"inner_group": groups.group("cp_inner"), "outer_group": groups.group("cp_outer")}
    out = context_attention(
        q, k, v, enable_gqa=True, group=group, sequence=Sequence(SIZE, s.n, s.balance), method=s.method,
        keep_gathered=s.keep, transport=s.transport, **told,
    )  # fmt: skip
    out.backward(torch.ones_like(out))


def said(s: Setting, groups: Groups) -> list[Line]:
    bias = None if s.bias is None else ((1,) * (4 - len(s.bias)) + s.bias, s.bias_dtype)
    x = Local(
        B, H, s.kv_heads, SIZE // s.n, D, DV, s.dtype, bias=bias, bias_grad=s.bias_dtype != torch.bool,
        docs=((SIZE // s.n,), torch.int64) if s.docs else None,
    )  # fmt: skip
    split = (groups.group("cp_inner"), groups.group("cp_outer")) if s.method == "hybrid" else ()
    return [
        (phase, call.op, call.axis, call.elements, _bare(call.dtype))
        for phase in ("forward", "backward")
        for call in collectives(
            s.method, x, groups.group("cp"), *split, phase=phase, keep_gathered=s.keep, transport=s.transport
        )
    ]


def _bare(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")


def _phase() -> str:
    return "backward" if compat.in_backward() else "forward"


def told(s: Setting, rank: int) -> list[Line]:
    """What abstract groups are told, on fake tensors: everything works on those."""
    lines: list[Line] = []

    def on_call(op: str, group: AxisGroup, x: Tensor) -> None:
        lines.append((_phase(), op, group.axis, x.numel(), _bare(x.dtype)))

    with compat.fake_tensor_mode():
        run(s, Groups(spec_of(s.n, METHODS[s.method]), rank, on_call))
    return lines


SETTINGS = [
    *(Setting(m, balance=b) for m, b in itertools.product(METHODS, ("zigzag", "contiguous"))),
    *(Setting(m, kv_heads=k) for m, k in itertools.product(("ulysses", "hybrid"), (1, 4))),
    *(Setting(m, dtype=torch.float64, docs=True) for m in METHODS),
    Setting("ring", n=2),
    Setting("ulysses", n=2),
    Setting("ring", transport="peer"),
    Setting("ring", dtype=torch.float64, docs=True, transport="peer"),
    Setting("allgather", keep=True),
    *(Setting(m, bias=(SIZE // 4, SIZE), bias_dtype=d) for m in METHODS for d in (torch.bfloat16, torch.bool)),
    *(Setting(m, bias=(B, H, SIZE // 4, SIZE)) for m in METHODS),
    *(Setting(m, bias=(H, 1, SIZE)) for m in METHODS),
]


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_ranks_make_the_calls_that_are_announced(setting):
    announced = said(setting, Groups(spec_of(setting.n, METHODS[setting.method]), 0))
    for rank in (0, setting.n - 1):
        assert told(setting, rank) == announced


@dataclasses.dataclass(frozen=True)
class Logged(SimulatedGroup):
    """A simulated group that writes down what it is asked for, as a real one's recorder does."""

    log: list[Line] = dataclasses.field(default_factory=list, compare=False)

    def _line(self, op: str, x: Tensor, times: int = 1) -> None:
        if self.size > 1:
            self.log.append((_phase(), op, self.axis, x.numel() * times, _bare(x.dtype)))

    def all_gather(self, x: Tensor, dim: int, size: int | None = None) -> Tensor:
        self._line("all_gather", x, self.size)
        return super().all_gather(x, dim, size)

    def reduce_scatter(self, x: Tensor, dim: int) -> Tensor:
        self._line("reduce_scatter", x)
        return super().reduce_scatter(x, dim)

    def all_to_all(self, x: Tensor, cut: int, join: int) -> Tensor:
        self._line("all_to_all", x)
        return super().all_to_all(x, cut, join)

    def shift(self, x: Tensor, by: int = 1) -> Pending:
        self._line("send", x)
        self._line("recv", x)
        return super().shift(x, by)


@dataclasses.dataclass(frozen=True)
class LoggedGroups(SimulatedGroups):
    log: list[Line] = dataclasses.field(default_factory=list, compare=False)

    def group(self, *axes: str) -> Logged:
        g = super().group(*axes)
        return Logged(g.axis, g.size, g.rank, world=g.world, key=g.key, log=self.log)


@pytest.mark.parametrize("method", METHODS)
def test_simulated_ranks_make_them_too(method):
    setting, world = Setting(method, docs=True), World(4)
    spec = spec_of(4, METHODS[method])

    def work(rank: int) -> list[Line]:
        groups = LoggedGroups(spec, rank, world=world)
        run(setting, groups)
        return groups.log

    assert world.run(work) == [said(setting, Groups(spec, 0))] * 4


def _recorded() -> list[tuple[list[Line], list[Line]]]:
    found = []
    for method, inner, transport in (*((m, inner, "send") for m, inner in METHODS.items()), ("ring", None, "peer")):
        groups = build_groups(spec_of(4, inner), "cpu", [("cp",)])
        setting = Setting(method, docs=True, transport=transport)
        names = {groups.spec.group_of(groups.rank, axis): axis for axis in ("cp", *groups.spec.names)}
        with record_collectives(names.get) as log:
            run(setting, groups)
        found.append(([(c.phase, c.op, c.axis, c.elements, c.dtype) for c in log], said(setting, groups)))
    return found


def test_gloo_ranks_make_them_too(pool):
    for rank in pool.run(_recorded):
        for made, announced in rank:
            assert made == announced


def test_bytes_are_those_of_the_formulas():
    x = Local(1, 32, 8, 1024, 128, 128, torch.bfloat16)
    kv, q = 2 * 8 * 1024 * 128 * 2, 32 * 1024 * 128 * 2
    cp, inner, outer = (AxisGroup(axis, n, 0) for axis, n in (("cp", 8), ("cp_inner", 4), ("cp_outer", 2)))

    def sent(method: str, phase: str, **options: Any) -> int:
        split = (inner, outer) if method == "hybrid" else ()
        return bytes_sent(collectives(method, x, cp, *split, phase=phase, **options), cp, inner, outer)

    assert (sent("ring", "forward"), sent("ring", "backward")) == (7 * kv, 7 * 3 * kv)
    assert (sent("allgather", "forward"), sent("allgather", "backward")) == (7 * kv, 7 * 3 * kv)
    assert (sent("ring", "forward", transport="peer"), sent("ring", "backward", transport="peer")) == (
        7 * kv,
        7 * 3 * kv,
    )
    assert sent("allgather", "backward", keep_gathered=True) == 7 * 2 * kv
    assert sent("ulysses", "forward") == sent("ulysses", "backward") == 7 * (2 * q + kv) // 8
    assert sent("hybrid", "forward") == 3 * (2 * q + kv) // 4 + kv
    assert sent("hybrid", "backward") == 3 * (2 * q + kv) // 4 + 3 * kv
