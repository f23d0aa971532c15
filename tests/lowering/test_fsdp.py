"""FSDP2 as meshplan applies it: single-device gradients for unequal data, any strategy, mesh and pattern of use."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

from meshplan.errors import PlanError
from meshplan.lowering.fsdp import accumulate, apply_fsdp
from meshplan.runtime.recorder import record_collectives

F64, F32, BF16 = torch.float64, torch.float32, torch.bfloat16


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(5, 7), nn.Linear(7, 5)
        self.rare, self.never = nn.Linear(5, 5, bias=False), nn.Linear(3, 3)

    def forward(self, x: Tensor, rare: bool = False) -> Tensor:
        y = x + self.down(torch.tanh(self.up(x)))
        return y + self.rare(x) if rare else y


class Model(nn.Module):
    def __init__(self, tie: bool = False, recompute: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 5)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.side = Block()
        self.head = nn.Linear(5, 11, bias=False)
        self.recompute = recompute
        if tie:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor, rare: bool = False, side: bool = True, again: bool = False) -> Tensor:
        x = self.embed(tokens)
        for layer in [*self.layers, *([self.layers[0]] if again else [])]:
            x = checkpoint(layer, x, rare, use_reentrant=False) if self.recompute else layer(x, rare)
        return self.head(self.side(x) if side else x)


UNITS = ("layers.0", "layers.1", "side")
Call = dict[str, Any]


def _model(**kwargs: Any) -> Model:
    torch.manual_seed(3)
    return Model(**kwargs).to(F64)


def _tokens(rank: int, microbatch: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * microbatch + rank)
    return torch.randint(0, 11, (1 + (rank + microbatch) % 3, 4), generator=generator)


def _reference(model: nn.Module, calls: list[Call], ranks: int) -> dict[str, Tensor | None]:
    """Gradients of the mean over ranks of the sum over microbatches, on one device."""
    for rank in range(ranks):
        for i, call in enumerate(calls):
            (model(_tokens(rank, i), **call).square().sum() / ranks).backward()
    return {name: p.grad for name, p in model.named_parameters()}


def _mesh(shape: tuple[int, ...]) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=("dp_replicate", "dp_shard")[2 - len(shape) :])


def _run(model: nn.Module, calls: list[Call], rank: int) -> None:
    with accumulate(model, len(calls)):
        for i, call in enumerate(calls):
            model(_tokens(rank, i), **call).square().sum().backward()


def _largest_difference(model: nn.Module, expected: dict[str, Tensor | None]) -> float:
    """Over all parameters, relative to the largest gradient; infinite where one has a gradient and the other none."""
    scale = max(g.abs().max().item() for g in expected.values() if g is not None)
    worst = 0.0
    found = dict(model.named_parameters())
    assert found.keys() == expected.keys()
    for name, p in found.items():
        want = expected[name]
        if (p.grad is None) != (want is None):
            return float("inf")
        if want is not None:
            worst = max(worst, (p.grad.full_tensor() - want).abs().max().item() / scale)
    return worst


def _compare_all(shape: tuple[int, ...], strategy: str) -> dict[str, list[float]]:
    return {name: _compare(shape, calls, {"strategy": strategy}, {}) for name, calls in USES.items()}


def _compare(shape: tuple[int, ...], calls: list[Call], options: dict[str, Any], make: dict[str, Any]) -> list[float]:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    expected = _reference(_model(**make), calls, ranks)
    model = apply_fsdp(_model(**make), UNITS, _mesh(shape), **options)
    worst = []
    for _ in range(2):  # the second step finds whatever the first left behind
        _run(model, calls, rank)
        worst.append(_largest_difference(model, expected))
        model.zero_grad()
    return worst


USES = {
    "one": [{}],
    "three": [{}, {}, {}],
    "rare-last": [{}, {"rare": True}],
    "rare-first": [{"rare": True}, {}],
    "side-first": [{}, {"side": False}],
    "side-last": [{"side": False}, {}],
    "disjoint": [{"rare": True, "side": False}, {"rare": False, "side": True}, {"rare": True, "side": False}],
    "again": [{"again": True}, {"again": True}],
}


@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
@pytest.mark.parametrize("shape", [(2,), (2, 2), (2, 1)], ids=str)
def test_gradients_are_the_single_device_ones_for_any_pattern_of_use(pool, shape, strategy):
    world = shape[0] * (shape[1] if len(shape) == 2 else 1)
    for worst in pool.run(_compare_all, shape, strategy, world=world):
        assert {name: error for name, error in worst.items() if max(error) > 1e-13} == {}


@pytest.mark.parametrize("make", [{"tie": True}, {"recompute": True}], ids=str)
@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
def test_tied_and_recomputed_models_are_exact(pool, strategy, make):
    for worst in pool.run(_compare, (4,), USES["again"], {"strategy": strategy}, make):
        assert max(worst) < 1e-13


def _tied_units() -> list[Any]:
    model = apply_fsdp(_model(tie=True), ("embed", *UNITS), _mesh((2,)))
    expected = _reference(_model(tie=True), [{}], 2)
    _run(model, [{}], dist.get_rank())
    return [_largest_difference(model, expected), model.head.weight is model.embed.weight]


def test_a_weight_tied_between_a_unit_and_the_root_stays_one_parameter(pool):
    for worst, same in pool.run(_tied_units, world=2):
        assert worst < 1e-13 and same


def _two_forwards(recompute: bool) -> float:
    rank = dist.get_rank()
    reference, model = _model(recompute=recompute), apply_fsdp(_model(recompute=recompute), UNITS, _mesh((2,)))
    for r in range(2):
        (((reference(_tokens(r, 0)).mean() - reference(_tokens(r, 1)).mean()).square()) / 2).backward()
    (model(_tokens(rank, 0)).mean() - model(_tokens(rank, 1)).mean()).square().backward()
    return _largest_difference(model, {name: p.grad for name, p in reference.named_parameters()})


@pytest.mark.parametrize("recompute", [False, True])
def test_two_forwards_before_one_backward_are_exact(pool, recompute):
    assert max(pool.run(_two_forwards, recompute, world=2)) < 1e-13


def _low_precision(strategy: str, shape: tuple[int, ...], uses: str) -> tuple[float, set[torch.dtype]]:
    calls = USES[uses]
    reference = _model().to(F32)
    expected = _reference(reference, calls, 2)
    options = {"strategy": strategy, "param_dtype": BF16, "reduce_dtype": F32}
    model = apply_fsdp(_model().to(F32), UNITS, _mesh(shape), **options)
    _run(model, calls, dist.get_rank())
    return _largest_difference(model, expected), {p.grad.dtype for p in model.parameters() if p.grad is not None}


@pytest.mark.parametrize("uses", ["rare-last", "side-last"])
@pytest.mark.parametrize("shape", [(2,), (2, 1)], ids=str)
@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
def test_what_is_first_used_at_the_last_microbatch_under_bf16(pool, strategy, shape, uses):
    for worst, dtypes in pool.run(_low_precision, strategy, shape, uses, world=2):
        assert worst < 0.03 and dtypes == {F32}


@pytest.mark.parametrize("shape", [(2,), (2, 2), (2, 1)], ids=str)
@pytest.mark.parametrize("dtype", [F32, F64])
def test_a_divide_factor_replaces_the_number_of_ranks(pool, shape, dtype):
    world = shape[0] * (shape[1] if len(shape) == 2 else 1)
    for worst in pool.run(_divided, shape, dtype, world=world):
        assert worst < (1e-13 if dtype == F64 else 1e-5)


def _divided(shape: tuple[int, ...], dtype: torch.dtype) -> float:
    ranks = dist.get_world_size()
    expected = {
        name: g if g is None else g * ranks / 7 for name, g in _reference(_model().to(dtype), [{}, {}], ranks).items()
    }
    model = apply_fsdp(_model().to(dtype), UNITS, _mesh(shape), gradient_divide_factor=7.0)
    _run(model, [{}, {}], dist.get_rank())
    return _largest_difference(model, expected)


def _counts(strategy: str) -> dict[str, int]:
    model = apply_fsdp(_model(), UNITS, _mesh((2, 2)), strategy=strategy)
    with record_collectives() as log:
        _run(model, [{}] * 4, dist.get_rank())
    return {op: sum(c.op == op for c in log) for op in ("all_gather", "reduce_scatter", "all_reduce")}


@pytest.mark.parametrize(
    ("strategy", "gathers", "scatters"),
    [("zero1", 4, 4), ("zero2", 4, 16), ("zero3", 4 * (4 + 3), 16)],
)
def test_four_microbatches_meet_the_replicas_once_a_unit(pool, strategy, gathers, scatters):
    expected = {"all_gather": gathers, "reduce_scatter": scatters, "all_reduce": 4}
    assert pool.run(_counts, strategy) == [expected] * 4


def _interrupted(strategy: str, shape: tuple[int, ...], precision: dict[str, torch.dtype]) -> float:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = apply_fsdp(_model(), UNITS, _mesh(shape), strategy=strategy, **precision)
    with pytest.raises(KeyError), accumulate(model, 3):
        model(_tokens(rank, 5), rare=True).square().sum().backward()
        model(_tokens(rank, 6))
        raise KeyError
    model.zero_grad()
    assert all(isinstance(p, DTensor) for p in model.parameters())
    model(_tokens(rank, 0)).square().sum().backward()
    return _largest_difference(model, _reference(_model(), [{}], ranks))


@pytest.mark.parametrize("shape", [(2,), (2, 2)], ids=str)
@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
def test_an_exception_inside_accumulate_leaves_nothing_behind(pool, strategy, shape):
    world = shape[0] * (shape[1] if len(shape) == 2 else 1)
    assert max(pool.run(_interrupted, strategy, shape, {}, world=world)) < 1e-13


def test_an_exception_discards_gradients_kept_in_the_reduce_dtype(pool):
    precision = {"param_dtype": BF16, "reduce_dtype": F32}
    assert max(pool.run(_interrupted, "zero1", (2,), precision, world=2)) < 0.03


def _step_after_eval(strategy: str) -> float:
    """backward, evaluation, optimizer step, forward: the last one must see the step."""
    rank = dist.get_rank()
    reference, model = _model(), apply_fsdp(_model(), UNITS, _mesh((2,)), strategy=strategy)
    _reference(reference, [{}], 2)
    torch.optim.SGD(reference.parameters(), 0.1).step()
    model(_tokens(rank, 0)).square().sum().backward()
    with torch.no_grad():
        model(_tokens(rank, 1))
    torch.optim.SGD(model.parameters(), 0.1).step()
    return (model(_tokens(rank, 2)) - reference(_tokens(rank, 2))).abs().max().item()


@pytest.mark.parametrize("strategy", ["zero1", "zero3"])
def test_an_optimizer_step_after_an_evaluation_reaches_the_next_forward(pool, strategy):
    assert max(pool.run(_step_after_eval, strategy, world=2)) < 1e-12


def _with_tensor_parallel(strategy: str) -> tuple[float, set[str], list[tuple[int, ...]]]:
    """dp_shard 2 x tp 2: `up` split by rows of 6 and `down` by columns, as DTensors on the tp axis."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))

    class Mlp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(5, 6, bias=False), nn.Linear(6, 3, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(self.up(x))

    torch.manual_seed(1)
    reference = nn.Sequential(Mlp(), nn.Tanh()).to(F64)
    model = copy.deepcopy(reference)
    for linear, dim in ((model[0].up, 0), (model[0].down, 1)):
        linear.weight = nn.Parameter(distribute_tensor(linear.weight.detach(), mesh["tp"], [Shard(dim)]))
    apply_fsdp(model, ("0",), mesh["dp_shard"], strategy=strategy)
    data = [torch.randn(2 + r, 5, dtype=F64) for r in range(2)]
    for x in data:
        (reference(x).square().sum() / 2).backward()
    for _ in range(2):
        with accumulate(model, 1):
            x = DTensor.from_local(data[mesh.get_local_rank("dp_shard")], mesh["tp"], [Replicate()])
            out = model[0](x).redistribute(placements=[Replicate()])
            model[1](out).square().sum().backward()
        difference = _largest_difference(model, {name: p.grad for name, p in reference.named_parameters()})
        model.zero_grad()
    names = {str(p.device_mesh.mesh_dim_names) for p in model.parameters()}
    return difference, names, [tuple(p.to_local().shape) for p in model.parameters()]


def test_parameters_that_are_dtensors_on_tp(pool):
    for rank, (difference, names, shapes) in enumerate(pool.run(_with_tensor_parallel, "zero3")):
        assert difference < 1e-13 and names == {"('dp_shard', 'tp')"}
        # A tp rank holds (3, 5) of up and (3, 3) of down: nothing divides by 2, so rows are cut, padded to 4.
        rows = 2 if rank < 2 else 1
        assert shapes == [(rows, 5), (rows, 3)]


def _placements(shapes: dict[str, tuple[int, ...]], options: dict[str, Any]) -> dict[str, tuple[str, tuple[int, ...]]]:
    model = nn.ParameterDict({name: nn.Parameter(torch.ones(shape)) for name, shape in shapes.items()})
    apply_fsdp(model, (), _mesh((4,)), **options)
    return {name: (str(p.placements[0]), tuple(p.to_local().shape)) for name, p in model.items()}


def test_the_cut_dim_wastes_least(pool):
    shapes = {"rows": (8, 6), "one_row": (1, 8), "two_rows": (2, 64), "last": (3, 5, 12), "none": (5, 3)}
    found = pool.run(_placements, shapes, {})[0]
    assert found == {
        "rows": ("S(0)", (2, 6)),
        "one_row": ("S(1)", (1, 2)),
        "two_rows": ("S(1)", (2, 16)),
        "last": ("S(2)", (3, 5, 3)),
        "none": ("S(0)", (2, 3)),
    }
    assert pool.run(_placements, {"w": (8, 4)}, {"shard_dim_of": _last_dim})[0] == {"w": ("S(1)", (8, 1))}


def _last_dim(param: nn.Parameter) -> int:
    return param.ndim - 1


def _frozen_flags() -> tuple[list[bool], list[bool], int]:
    model = _model()
    for name, p in model.named_parameters():
        p.requires_grad_("down" in name)
    apply_fsdp(model, UNITS, _mesh((2,)))
    with record_collectives() as log:
        _run(model, [{}], dist.get_rank())
    flags = [p.requires_grad == ("down" in name) for name, p in model.named_parameters()]
    grads = [(p.grad is not None) == ("down" in name) for name, p in model.named_parameters()]
    return flags, grads, sum(c.elements for c in log if c.op == "reduce_scatter")


def test_frozen_parameters_stay_frozen_and_send_no_gradient(pool):
    for flags, grads, elements in pool.run(_frozen_flags, world=2):
        # three blocks of down.weight (5, 7) and down.bias (5), dim 0 padded to 6
        assert all(flags) and all(grads) and elements == 3 * (6 * 7 + 6)


def _refused(build: Callable[[], nn.Module], units: tuple[str, ...], options: dict[str, Any]) -> tuple[str, str | None]:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
    if "axes" in options:
        mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=options.pop("axes"))
    with pytest.raises(PlanError) as error:
        apply_fsdp(build(), units, mesh, **options)
    return error.value.code, str(error.value.legal)


def _tied() -> nn.Module:
    return _model(tie=True)


def _scalar() -> nn.Module:
    model = _model()
    model.scale = nn.Parameter(torch.tensor(1.0))
    return model


def _transposed() -> nn.Module:
    model = _model()
    model.head.weight.data = torch.ones(5, 11, dtype=F64).t()
    return model


def _two_dtypes() -> nn.Module:
    model = _model()
    model.layers[0].up.to(F32)
    return model


@pytest.mark.parametrize(
    ("build", "units", "options", "code", "legal"),
    [
        (_model, ("layers.2",), {}, "no-such-module", "layers"),
        (_model, ("layers",), {}, "unit-without-forward", "layers.0"),
        (_tied, ("embed", "head"), {}, "tied-across-units", "root"),
        (_scalar, (), {}, "scalar-parameter", "(1,)"),
        (_transposed, (), {}, "strided-parameter", "contiguous"),
        (_two_dtypes, ("layers.0",), {}, "fsdp-mixed-dtypes", "cast"),
        (_model, UNITS, {"strategy": "ddp"}, "bad-fsdp-strategy", "zero3"),
        (_model, UNITS, {"reshard_after_forward": 2}, "bad-reshard", "true"),
        (_model, UNITS, {"reshard_after_forward": {"layers.9": True}}, "bad-reshard", "layers.0"),
        (_model, UNITS, {"shard_dim_of": _last_dim}, "bad-shard-dim", "0"),
        (_model, UNITS, {"axes": ("dp_shard", "cp")}, "mesh-not-replicate-by-shard", "_flatten"),
    ],
)
def test_refusals_say_what_would_be_legal(pool, build, units, options, code, legal):
    for found, choices in pool.run(_refused, build, units, options, world=2):
        assert found == code and legal in choices


def _misused() -> list[str]:
    rank, codes = dist.get_rank(), []
    model = _model()
    for misuse in ("plain", "zero", "nested", "few", "many"):
        if misuse == "zero":
            apply_fsdp(model, UNITS, _mesh((2,)), strategy="zero1")
        with pytest.raises(PlanError) as error:
            if misuse == "nested":
                with accumulate(model, 1), accumulate(model, 1):
                    pass
            with accumulate(model, 0 if misuse == "zero" else 2):
                for i in range(3 if misuse == "many" else 1):
                    model(_tokens(rank, i)).square().sum().backward()
        codes.append(error.value.code)
    model.zero_grad()
    _run(model, [{}], rank)
    codes.append(f"{_largest_difference(model, _reference(_model(), [{}], 2)) < 1e-13}")
    return codes


def test_misuse_of_accumulate_is_refused_and_does_no_harm(pool):
    expected = [
        "fsdp-not-applied",
        "bad-accumulate-steps",
        "accumulate-nested",
        "accumulate-count",
        "accumulate-count",
        "True",
    ]
    assert pool.run(_misused, world=2) == [expected] * 2
