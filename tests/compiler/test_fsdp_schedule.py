"""The FSDP2 collectives predicted from hook points are the ones gloo ranks send: same order, group, dtype and sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from meshplan.compiler.fsdp_points import UnitRun, backward_points, eval_points, forward_points, step_points
from meshplan.compiler.fsdp_schedule import (
    FsdpParam,
    FsdpPolicy,
    FsdpUnit,
    Point,
    all_gather_call,
    fsdp_events,
    gradient_division,
    microbatch_flags,
    reduce_calls,
)
from meshplan.compiler.fsdp_units import fsdp_units
from meshplan.errors import PlanError
from meshplan.lowering.fsdp import accumulate, apply_fsdp
from meshplan.runtime.recorder import record_collectives

F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16


class Block(nn.Module):
    def __init__(self, extra: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(5, 7), nn.Linear(7, 5, bias=False)
        self.spare = nn.Linear(3, 5) if extra else None

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Pair(nn.Module):
    """A block around a block: nested units."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.scale = Block(), Block(), nn.Parameter(torch.ones(3, 5))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)) * self.scale.sum(0)


class Decoder(nn.Module):
    def __init__(self, wrap: str = "", tie: bool = False, head: bool = True, make: Callable[[], nn.Module] = Block):
        super().__init__()
        self.embed = nn.Embedding(11, 5)
        self.layers = nn.ModuleList(make() for _ in range(3))
        self.head = nn.Linear(5, 11, bias=False) if head else None
        self.wrap = wrap
        self.depth: int | None = None  # how many layers run
        if tie and self.head is not None:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) if tokens.dtype == torch.int64 else tokens
        layers: Any = self.layers
        if self.wrap == "each":
            layers = [lambda x, f=f: checkpoint(f, x, use_reentrant=False) for f in self.layers]
        elif self.wrap == "two":
            first, second, third = self.layers
            layers = [lambda x: checkpoint(lambda y: second(first(y)), x, use_reentrant=False), third]
        elif self.wrap == "shared":
            layers = [self.layers[0], self.layers[1], self.layers[0], self.layers[2]]
        for layer in layers[: self.depth]:
            x = layer(x)
        return x if self.head is None else self.head(x)


class CheckpointInside(nn.Module):
    """The unit's own forward checkpoints a nested unit."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = Block(), nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(checkpoint(self.inner, x, use_reentrant=False))


def _freeze(model: nn.Module, *prefixes: str) -> nn.Module:
    for name, p in model.named_parameters():
        p.requires_grad_(not name.startswith(prefixes))
    return model


def _half_frozen() -> nn.Module:
    """One frozen bfloat16 matrix beside trained parameters in each block: gathered as bytes, reduced without it."""
    model = _freeze(Decoder(), "layers.0.up", "layers.1.up", "layers.2.up")
    for layer in model.layers:
        layer.up.to(BF16)
        layer.up.forward = lambda x, up=layer.up: nn.functional.linear(x, up.weight.to(x.dtype), up.bias.to(x.dtype))
    return model


def _one_row() -> nn.Module:
    model = Decoder()
    model.layers[1].up.weight.data = torch.randn(7, 5)
    model.row = nn.Parameter(torch.ones(1, 8))
    model.register_forward_hook(lambda m, args, out: out * m.row.sum())
    return model


def _empty_unit() -> nn.Module:
    model = Decoder()
    model.layers[1] = nn.Tanh()
    return model


LAYERS = ("layers.0", "layers.1", "layers.2")


def _runs(*layers: UnitRun, head: bool = True, **root: Any) -> UnitRun:
    return UnitRun("", layers, **({"input_grad": False, "returns_inner": not head} | root))


PLAIN = _runs(*(UnitRun(path) for path in LAYERS))
TOKENS = torch.tensor([[1, 5, 2, 9], [3, 3, 0, 10]])


def _train(model: nn.Module, microbatches: int, x: Tensor = TOKENS) -> None:
    with accumulate(model, microbatches):
        for _ in range(microbatches):
            model(x).float().square().mean().backward()


def _train_twice(model: nn.Module, microbatches: int) -> None:
    _train(model, microbatches)
    _train(model, microbatches)


def _train_on_activations(model: nn.Module, microbatches: int) -> None:
    _train(model, microbatches, torch.ones(2, 5, requires_grad=True))


def _skip_last_layers(model: nn.Module, microbatches: int) -> None:
    """The last microbatch goes through one layer only."""
    with accumulate(model, microbatches):
        for i in range(microbatches):
            model.depth = 1 if i == microbatches - 1 else None
            model(TOKENS).square().mean().backward()


def _two_forwards(model: nn.Module, microbatches: int) -> None:
    (model(TOKENS).square().mean() + model(TOKENS[:1]).square().mean()).backward()


def _eval_then_train(model: nn.Module, microbatches: int) -> None:
    with torch.no_grad():
        model(TOKENS)
    _train(model, microbatches)


@dataclass(frozen=True)
class Case:
    build: Callable[[], nn.Module] = Decoder
    units: tuple[str, ...] = LAYERS
    run: UnitRun = PLAIN
    policy: dict[str, Any] = field(default_factory=dict)
    reshard: Any = None
    microbatches: int = 1
    drive: Callable[[nn.Module, int], None] = _train
    points: tuple[Point, ...] | None = None
    unused: frozenset[str] = frozenset()


_FROZEN_START = _runs(
    UnitRun("layers.0", input_grad=False, output_grad=False),
    UnitRun("layers.1", input_grad=False, output_grad=False),
    UnitRun("layers.2", input_grad=False),
)
SKIPPED = step_points(PLAIN) + step_points(_runs(UnitRun("layers.0")))
BARE = _runs(
    UnitRun("embed", input_grad=False), *(UnitRun(path) for path in LAYERS), UnitRun("head"), returns_inner=True
)
CASES = {
    "skipped-at-the-last-microbatch": Case(microbatches=2, drive=_skip_last_layers, points=SKIPPED),
    "skipped-at-the-last-microbatch-zero1": Case(
        policy={"strategy": "zero1"}, microbatches=2, drive=_skip_last_layers, points=SKIPPED
    ),
    "plain": Case(drive=_train_twice, points=step_points(PLAIN, 2)),
    "bf16": Case(policy={"param_dtype": BF16, "reduce_dtype": F32}),
    "zero2": Case(policy={"strategy": "zero2"}, microbatches=3),
    "zero1": Case(policy={"strategy": "zero1", "param_dtype": BF16, "reduce_dtype": F32}, microbatches=3),
    "zero3-accumulated": Case(microbatches=2, drive=_train_twice, points=step_points(PLAIN, 4)),
    "last-unit-kept": Case(reshard={"layers.2": False}),
    "zero2-resharded": Case(policy={"strategy": "zero2"}, reshard=True),
    "first-block-after-frozen-embedding": Case(
        build=lambda: _freeze(Decoder(), "embed"),
        run=_runs(UnitRun("layers.0", input_grad=False), UnitRun("layers.1"), UnitRun("layers.2")),
    ),
    # layers.1 is prefetched by layers.2's backward and never used there.
    "frozen-start": Case(build=lambda: _freeze(Decoder(), "embed", "layers.0", "layers.1"), run=_FROZEN_START),
    "all-frozen-but-one-matrix": Case(
        build=lambda: _freeze(Decoder(), "embed", "head", "layers.0", "layers.1", "layers.2.up"), run=_FROZEN_START
    ),
    "mixed-dtypes": Case(build=_half_frozen),
    "mixed-dtypes-cast": Case(build=_half_frozen, policy={"param_dtype": BF16}),
    "sequential": Case(build=lambda: Decoder(head=False), run=_runs(*(UnitRun(path) for path in LAYERS), head=False)),
    "embedding-unit": Case(
        units=("embed", *LAYERS),
        run=_runs(UnitRun("embed", input_grad=False), *(UnitRun(path) for path in LAYERS)),
    ),
    "tied-with-the-root": Case(
        build=lambda: Decoder(tie=True),
        units=("embed", *LAYERS),
        run=_runs(UnitRun("embed", input_grad=False), *(UnitRun(path) for path in LAYERS)),
    ),
    "nested": Case(
        build=lambda: Decoder(make=Pair),
        units=(*LAYERS, "layers.0.second", "layers.1.first", "layers.1.second"),
        run=_runs(
            UnitRun("layers.0", (UnitRun("layers.0.second"),)),
            UnitRun("layers.1", (UnitRun("layers.1.first"), UnitRun("layers.1.second"))),
            UnitRun("layers.2"),
        ),
    ),
    "one-row": Case(build=_one_row),
    "empty-unit": Case(build=_empty_unit),
    "unused": Case(
        build=lambda: Decoder(make=lambda: Block(extra=True)),
        unused=frozenset(f"layers.{i}.spare.{p}" for i in range(3) for p in ("weight", "bias")),
    ),
    "stage": Case(
        run=_runs(*(UnitRun(p) for p in LAYERS), input_grad=True),
        drive=_train_on_activations,
        unused=frozenset({"embed.weight"}),
    ),
    "unit-called-twice": Case(
        build=lambda: Decoder(wrap="shared"),
        run=_runs(*(UnitRun(path) for path in ("layers.0", "layers.1", "layers.0", "layers.2"))),
    ),
    "unit-called-twice-accumulated": Case(
        build=lambda: Decoder(wrap="shared"),
        run=_runs(*(UnitRun(path) for path in ("layers.0", "layers.1", "layers.0", "layers.2"))),
        policy={"strategy": "zero1"},
        microbatches=2,
    ),
    "two-forwards": Case(drive=_two_forwards, points=forward_points(PLAIN) * 2 + backward_points(PLAIN, PLAIN)),
    "eval-then-train": Case(drive=_eval_then_train, points=eval_points(PLAIN) + step_points(PLAIN)),
    "eval-then-train-zero2": Case(
        policy={"strategy": "zero2"}, drive=_eval_then_train, points=eval_points(PLAIN) + step_points(PLAIN)
    ),
    # No parameter is left to the root: without care the training backward would gather the evaluation's last unit.
    "eval-then-train-bare-root": Case(
        units=("embed", *LAYERS, "head"),
        drive=_eval_then_train,
        points=eval_points(BARE) + step_points(BARE),
    ),
    "recompute-each": Case(
        build=lambda: Decoder(wrap="each"), run=_runs(*(UnitRun(path, recompute=True) for path in LAYERS))
    ),
    "recompute-two": Case(
        build=lambda: Decoder(wrap="two"),
        run=_runs(
            UnitRun(None, (UnitRun("layers.0"), UnitRun("layers.1")), returns_inner=True, recompute=True),
            UnitRun("layers.2"),
        ),
    ),
    "recompute-inside": Case(
        build=lambda: Decoder(make=CheckpointInside),
        units=(*LAYERS, *(f"{path}.inner" for path in LAYERS)),
        run=_runs(*(UnitRun(path, (UnitRun(f"{path}.inner", recompute=True),)) for path in LAYERS)),
    ),
    "recompute-two-forwards": Case(
        build=lambda: Decoder(wrap="each"),
        drive=_two_forwards,
        points=forward_points(PLAIN) * 2
        + backward_points(*[_runs(*(UnitRun(path, recompute=True) for path in LAYERS))] * 2),
    ),
}
AXES = {1: ("dp_shard",), 2: ("dp_replicate", "dp_shard")}


def _recorded(name: str, shape: tuple[int, ...]) -> list[tuple[Any, ...]]:
    case = CASES[name]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=AXES[len(shape)])
    names = {_ranks(mesh, axis): axis for axis in AXES[len(shape)]}
    model = apply_fsdp(case.build(), case.units, mesh, reshard_after_forward=case.reshard, **case.policy)
    with record_collectives(names.get) as log:
        case.drive(model, case.microbatches)
    return [(c.phase, c.op, c.axis, len(c.ranks), c.elements, c.dtype) for c in log]


def _ranks(mesh: Any, axis: str) -> tuple[int, ...]:
    return tuple(torch.distributed.get_process_group_ranks(mesh.get_group(axis)))


def _predicted(name: str, shape: tuple[int, ...]) -> list[tuple[Any, ...]]:
    case = CASES[name]
    policy = FsdpPolicy(
        shard=shape[-1],
        replicate=shape[0] if len(shape) == 2 else None,
        microbatches=case.microbatches,
        **case.policy,
    )
    units = fsdp_units(
        case.build(),
        case.units,
        shard=policy.shard,
        strategy=policy.strategy,
        reshard_after_forward=case.reshard,
        unused=case.unused,
    )
    points = step_points(case.run, case.microbatches) if case.points is None else case.points
    out = []
    for event in fsdp_events(units, policy, points):
        backward = event.point.recompute or event.point.hook.endswith("backward")
        for c in event.calls:
            dtype = str(c.dtype).removeprefix("torch.")
            phase = "backward" if backward else "forward"
            out.append((phase, c.op, c.axis, c.ranks_per_group, c.elements, dtype))
    return out


@pytest.mark.parametrize("name", CASES)
def test_predicted_is_recorded_on_two_shards(pool, name):
    recorded = pool.run(_recorded, name, (2,), world=2)
    assert _predicted(name, (2,)) == recorded[0] == recorded[1] != []


@pytest.mark.parametrize("name", ["plain", "one-row", "zero1", "nested", "mixed-dtypes", "frozen-start"])
def test_predicted_is_recorded_on_four_shards(pool, name):
    recorded = pool.run(_recorded, name, (4,))
    assert recorded == [_predicted(name, (4,))] * 4


HYBRID = [
    "plain",
    "bf16",
    "zero1",
    "zero2",
    "zero3-accumulated",
    "unit-called-twice-accumulated",
    "skipped-at-the-last-microbatch",
    "skipped-at-the-last-microbatch-zero1",
]


@pytest.mark.parametrize("name", HYBRID)
@pytest.mark.parametrize("shape", [(2, 2), (2, 1), (4, 1)], ids=str)
def test_predicted_is_recorded_on_hybrid_meshes(pool, name, shape):
    world = shape[0] * shape[1]
    recorded = pool.run(_recorded, name, shape, world=world)
    assert recorded == [_predicted(name, shape)] * world


def test_one_rank_sends_nothing(pool):
    assert pool.run(_recorded, "plain", (1,), world=1) == [[]] == [_predicted("plain", (1,))]


def test_gathers_count_padding_and_bytes():
    params = (
        FsdpParam("w", (1, 6), F32),  # one row on four ranks: four rows
        FsdpParam("v", (6, 8), F32, shard_dim=1),
        FsdpParam("b", (5,), F32, requires_grad=False),
    )
    unit, policy = FsdpUnit("u", params), FsdpPolicy(shard=4)
    assert all_gather_call(unit, policy).elements == 24 + 48 + 8
    assert [c.elements for c in reduce_calls(unit, policy)] == [24 + 48]
    mixed = FsdpUnit("u", (*params, FsdpParam("q", (3,), torch.int8, requires_grad=False)))
    call = all_gather_call(mixed, policy)
    assert (call.elements, call.dtype) == (4 * 80 + 4, torch.uint8)
    call = all_gather_call(mixed, FsdpPolicy(shard=4, param_dtype=BF16))
    assert (call.elements, call.dtype) == (2 * 80 + 4, torch.uint8)


def test_trained_parameters_of_two_dtypes_in_a_unit_are_refused():
    unit = FsdpUnit("u", (FsdpParam("w", (4,), F32), FsdpParam("v", (4,), BF16)))
    with pytest.raises(PlanError) as error:
        reduce_calls(unit, FsdpPolicy(shard=2))
    assert error.value.code == "fsdp-mixed-dtypes" and "bfloat16" in str(error.value)


@pytest.mark.parametrize(
    ("strategy", "flags"),
    [
        # (reduce, all_reduce, reshard) of the first and the last of two microbatches
        ("zero1", [(False, False, False), (True, True, True)]),
        ("zero2", [(True, False, False), (True, True, True)]),
        ("zero3", [(True, False, True), (True, True, True)]),
    ],
)
def test_microbatch_flags(strategy, flags):
    found = [microbatch_flags(strategy, i, 2) for i in range(2)]
    assert [(f.reduce, f.all_reduce, f.reshard) for f in found] == flags


def test_division_makes_a_mean_in_every_dtype():
    assert gradient_division(F32, 4, 2) == (None, None, "avg")
    assert gradient_division(F32, 1) == (None, None, "sum")
    for shard, replicate in [(2, None), (8, None), (6, 2), (1, 3), (7, 5)]:
        before, after, op = gradient_division(torch.float16, shard, replicate)
        assert before * after == shard * (replicate or 1) and op == "sum"
    assert gradient_division(torch.float16, 8)[:2] == (4.0, 2.0)
