"""Inputs and outputs of any form: keywords, nested containers, dataclasses, tuples with what is not a tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import meshplan as mp
from tests.faults.check import exact, ids, numbers, plan_of, refused

pytestmark = pytest.mark.usefixtures("pool")


class Keywords(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place, self.out = nn.Embedding(7, 6), nn.Embedding(5, 6), nn.Linear(6, 4)

    def forward(self, tokens: Tensor, *, positions: Tensor | None = None, scale: float = 1.0) -> Tensor:
        x = self.embed(tokens)
        if positions is not None:
            x = x + scale * self.place(positions)
        return self.out(torch.tanh(x)).square().mean()


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(8, 5)

    def forward(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        y = self.out(batch["x"]) * self.out(batch["y"][0])
        return {"loss": y.mean(), "y": y}


@dataclass
class Routed:
    logits: Tensor
    bias: Tensor | None
    count: int


class Router(nn.Module):
    """Returns (tensor, None, int), or a dataclass of these."""

    def __init__(self, packed: bool = False) -> None:
        super().__init__()
        self.gate, self.packed = nn.Linear(6, 4), packed

    def forward(self, x: Tensor) -> Any:
        logits = self.gate(x)
        return Routed(logits, None, 3) if self.packed else (logits, None, 3)


class UsesRouter(nn.Module):
    def __init__(self, packed: bool = False) -> None:
        super().__init__()
        self.router, self.out = Router(packed), nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        routed = self.router(x)
        logits, bias, count = (routed.logits, routed.bias, routed.count) if isinstance(routed, Routed) else routed
        assert bias is None
        return (self.out(torch.tanh(logits)) * count).square().sum()


def packed_router() -> nn.Module:
    return UsesRouter(packed=True)


class Two(nn.Module):
    """A module with two tensor inputs inside a model."""

    class Join(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(6, 4), nn.Linear(6, 4)

        def forward(self, left: Tensor, right: Tensor) -> Tensor:
            return self.a(left) * self.b(right)

    def __init__(self) -> None:
        super().__init__()
        self.join = Two.Join()

    def forward(self, x: Tensor) -> Tensor:
        return self.join(x, right=torch.tanh(x)).square().sum()


class Twice(nn.Module):
    """A module that is handed one tensor under two names."""

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(5))

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            assert a is b
            return a.cumsum(0).cumsum(-1) * self.weight + b

    def __init__(self) -> None:
        super().__init__()
        self.up, self.pair = nn.Linear(6, 5), Twice.Pair()

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.up(x))
        return self.pair(h, h).square().sum()


DP = {"dp_shard": 2}
SPLIT = mp.S(0)


def nested_batch() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(5)
    x, y = (torch.randn(4, 8, dtype=torch.float64, generator=generator) for _ in range(2))
    return {"batch": {"x": x, "y": [y]}}


def nested_on_a_rank() -> tuple[float, tuple[int, ...], float]:
    """On a rank: the loss, the shape of this rank's part of the output, and the distance of the gradient."""
    torch.manual_seed(0)
    model = Nested().double()
    reference = model(**nested_batch())["loss"]
    (want,) = torch.autograd.grad(reference, [model.out.weight])
    plan = mp.Plan(mesh=DP, inputs={"batch": mp.Input(place={"dp": SPLIT})})
    mp.parallelize(model, plan, inputs=nested_batch())
    out = model(**mp.shard_batch(model, nested_batch()))
    out["loss"].backward()
    return (
        out["loss"].item() - reference.item(),
        tuple(out["y"].shape),
        (model.out.weight.grad - want).abs().max().item(),
    )


def test_nested_inputs_are_sharded_and_each_rank_gets_its_part(pool):
    # autoparallel#423. The loss of each rank is its own; their mean is one device's.
    (a, shape, grad_a), (b, _, grad_b) = pool.run(nested_on_a_rank, world=2)
    assert abs(a + b) < 1e-14 and a != 0 and shape == (2, 5)
    assert max(grad_a, grad_b) < 1e-14


@pytest.mark.parametrize("mesh", [DP, {"tp": 2}])
def test_keyword_only_inputs_in_any_order(mesh):
    # autoparallel#486.
    inputs = {"positions": ids(4, 5, dp=SPLIT), "tokens": ids(4, 5, dp=SPLIT)}
    rules = [mp.Rule("embed", use="embedding"), mp.Rule("out", use="colwise")] if "tp" in mesh else []
    exact(Keywords, plan_of(inputs, *rules, mesh=mesh))


def test_an_optional_input_left_out_is_left_out_on_every_rank():
    exact(Keywords, plan_of({"tokens": ids(4, 5, dp=SPLIT)}, mesh=DP))


def test_a_missing_input_is_refused():
    error = refused(Keywords, plan_of({"positions": ids(4, 5)}), "missing-input")
    assert "'tokens'" in error.message and error.where.line


def test_an_input_that_forward_does_not_take_is_refused():
    error = refused(Keywords, plan_of({"tokens": ids(4, 5), "mask": ids(4, 5)}), "no-such-argument")
    assert "'mask'" in error.message and error.where.line


@pytest.mark.parametrize("model", [UsesRouter, packed_router])
@pytest.mark.parametrize("output", [{}, {"0": {"tp": mp.R}}])
def test_a_module_that_returns_what_is_not_a_tensor(model, output):
    # torchtitan#3374.
    if model is packed_router and output:
        output = {"logits": {"tp": mp.R}}
    rule = mp.Rule("router", output=output) if output else mp.Rule("router.gate", use="colwise")
    exact(model, plan_of({"x": numbers(3, 6)}, rule, mp.Rule("out", use="rowwise")))


def test_each_layout_names_its_argument():
    # pytorch#115957: fewer layouts than inputs dropped the rest without a word.
    rules = (mp.Rule("join.{a,b}", use="colwise"), mp.Rule("join", input={"left": {"tp": mp.R}, "right": {"tp": mp.R}}))
    exact(Two, plan_of({"x": numbers(3, 6)}, *rules))
    error = refused(
        Two, plan_of({"x": numbers(3, 6)}, mp.Rule("join", input={"middle": {"tp": mp.R}})), "no-such-argument"
    )
    assert "left" in str(error.legal) and error.where.line
    error = refused(
        Two, plan_of({"x": numbers(3, 6)}, mp.Rule("join", input={"2": {"tp": mp.R}})), "more-layouts-than-inputs"
    )
    assert error.where.line


def other_batch_on_each_rank() -> dict[str, Tensor]:
    import torch.distributed as dist

    rank = dist.get_rank() if dist.is_initialized() else 0
    return {"tokens": torch.full((4, 5), rank)}


def test_ranks_of_one_tp_group_given_different_batches_are_caught():
    # accelerate#3092.
    with pytest.raises(mp.PlanError) as caught:
        mp.verify(
            Keywords, plan_of({"tokens": ids(4, 5)}, mp.Rule("out", use="colwise")), 2, inputs=other_batch_on_each_rank
        )
    assert caught.value.code == "inputs-differ"


def other_shape_on_one_rank() -> str:
    import torch.distributed as dist

    model = mp.parallelize(Keywords(), plan_of({"tokens": ids(4, 5)}, mp.Rule("out", use="colwise")))
    try:
        model(tokens=torch.zeros(4, 5 + dist.get_rank(), dtype=torch.int64))
    except mp.PlanError as error:
        return error.code
    return "none"


def test_ranks_called_with_different_shapes_all_raise(pool):
    assert pool.run(other_shape_on_one_rank, world=2) == ["inputs-differ"] * 2


def a_batch_of_another_size() -> float:
    torch.manual_seed(1)
    model = Keywords().double()
    tokens = torch.arange(30).view(6, 5) % 7
    want = model(tokens).item()
    mp.parallelize(
        model, plan_of({"tokens": ids(4, 5)}, mp.Rule("embed", use="embedding"), mp.Rule("out", use="colwise"))
    )
    return model(tokens).item() - want


def test_a_batch_of_another_size_is_lowered_again(pool):
    assert max(map(abs, pool.run(a_batch_of_another_size, world=2))) < 1e-14


@pytest.mark.parametrize("mesh", [DP, {"tp": 2}])
def test_a_tensor_handed_over_twice_stays_one_tensor(mesh):
    rules = [mp.Rule("up", use="colwise")] if "tp" in mesh else []
    low = mp.lower(Twice().double(), plan_of({"x": numbers(4, 6, dp=SPLIT)}, *rules, mesh=mesh), 2)
    assert [c.op for c in low.collectives if c.phase == "forward"].count("all_gather") <= 1
    exact(Twice, plan_of({"x": numbers(4, 6, dp=SPLIT)}, *rules, mesh=mesh))


@dataclass
class Batch:
    x: Tensor
    scale: float


class Pair(NamedTuple):
    x: Tensor
    scale: float


class TakesBatch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 4), nn.Linear(4, 6)

    def forward(self, batch: Pair | Batch) -> Tensor:
        return self.down(torch.tanh(self.up(batch.x))).float().square().mean() * batch.scale


def half_precision() -> tuple[float, float]:
    """On a rank: the loss of this rank's rows in bfloat16, and in float32 on one device."""
    torch.manual_seed(0)
    model = TakesBatch()
    x = torch.randn(4, 6)
    want = model(Batch(x, 2.0)).item()
    plan = mp.Plan(
        mesh=DP, inputs={"batch": mp.Input(place={"dp": SPLIT})}, fsdp=mp.Fsdp(units=[""], param_dtype=torch.bfloat16)
    )
    mp.parallelize(model, plan, inputs={"batch": Pair(x, 2.0)})
    loss = model(**mp.shard_batch(model, {"batch": Pair(x, 2.0)}))
    loss.backward()
    return loss.item(), want


def test_tensors_in_a_container_are_cast_and_one_that_nobody_knows_is_refused(pool):
    # pytorch#153077: a dataclass was skipped, and float32 met bfloat16 weights.
    unknown = {"batch": Batch(torch.ones(4, 6), 2.0)}
    refused(TakesBatch, mp.Plan(mesh=DP, inputs={"batch": mp.Input()}), "argument-state", inputs=unknown)
    (a, want), (b, _) = pool.run(half_precision, world=2)
    assert (a + b) / 2 == pytest.approx(want, rel=2e-2) and a != want


@pytest.mark.parametrize(
    ("examples", "code"),
    [
        ({"tokenz": torch.zeros(4, 5, dtype=torch.int64)}, "no-such-argument"),
        ({"positions": torch.zeros(4, 5, dtype=torch.int64)}, "missing-input"),
        ([torch.zeros(4, 5, dtype=torch.int64)] * 2, "more-layouts-than-inputs"),
    ],
)
def test_examples_that_forward_cannot_be_called_with_are_refused(examples, code):
    refused(Keywords, plan_of({}), code, inputs=examples)


def test_a_tensor_alone_is_the_first_input():
    low = mp.lower(Keywords(), plan_of({}), 2, torch.zeros(4, 5, dtype=torch.int64))
    assert "tokens" in low.explain()
