"""How a parallelised model may be called: other shapes, other modes, other ways to pass and return tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import meshplan as mp
from meshplan.errors import PlanError
from tests.distributed.models import FAMILIES, world_of
from tests.distributed.training import apart, batch, built, full

FAMILY = FAMILIES["llama"]
S = mp.S


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return {n: full(p.grad) for n, p in model.named_parameters()}


def _lengths(plan: mp.Plan | None, lengths: tuple[int, ...]) -> list[tuple[float, dict[str, Tensor]]]:
    """Loss and gradients at each sequence length in turn, on one device without a plan."""
    model = built(FAMILY.model())
    if plan is not None:
        model = mp.parallelize(model, plan)
    out = []
    for length in lengths:
        model.zero_grad()
        whole = batch(length, seq=length)
        loss = model(**(whole if plan is None else mp.shard_batch(model, whole)))
        loss.backward()
        out.append((loss.item(), _gradients(model)))
    return out


@pytest.mark.parametrize("composition", ["tp2+sp", "dp_shard2 x tp2+sp"])
def test_another_sequence_length_is_lowered_again_and_the_first_is_remembered(pool, composition):
    plan, lengths = FAMILY.plan(composition), (12, 18, 12, 14)
    want = _lengths(None, lengths)
    ranks = pool.run(_lengths, plan, lengths, world=world_of(plan))
    for i, (loss, gradients) in enumerate(want):
        assert sum(r[i][0] for r in ranks) / len(ranks) == pytest.approx(loss, rel=1e-12)
        assert all(apart(r[i][1], gradients) < 1e-12 for r in ranks)
    assert apart(ranks[0][0][1], want[1][1]) > 1e-3  # the lengths do differ


def _other_shape_on_one_rank(plan: mp.Plan) -> str:
    model = mp.parallelize(built(FAMILY.model()), plan)
    seq = 10 if dist.get_rank() == 1 else 12
    try:
        model(**mp.shard_batch(model, batch(0, seq=seq)))
    except PlanError as error:
        return f"{error.code}: {error.message}"
    return "no error"


def test_one_rank_with_other_shapes_makes_every_rank_raise_and_names_it(pool):
    said = pool.run(_other_shape_on_one_rank, FAMILY.plan("ddp4"))
    assert len(set(said)) == 1 and said[0].startswith("inputs-differ") and "1" in said[0]


def _modes(plan: mp.Plan | None) -> list[Tensor]:
    """Logits of evaluation, without gradients and with, before and after a training step with dropout."""
    model = built(FAMILY.model(dropout=0.3))
    if plan is not None:
        model = mp.parallelize(model, plan)
    cut: Callable[[dict[str, Tensor]], dict[str, Tensor]] = (
        (lambda b: b) if plan is None else (lambda b: mp.shard_batch(model, b))
    )
    tokens = cut({"tokens": batch()["tokens"]})
    model.eval()
    with torch.no_grad():
        seen = [model(**tokens)]
    seen.append(model(**tokens).detach())
    if plan is not None:
        model.train()
        model(**cut(batch())).backward()
        model.eval()
        with torch.inference_mode():
            seen.append(model(**tokens))
    return [x.clone() for x in seen]


@pytest.mark.parametrize("composition", ["tp2+sp", "dp_shard2 x tp2+sp"])
def test_evaluation_returns_this_ranks_rows_of_the_logits_whole_on_tp(pool, composition):
    plan = FAMILY.plan(composition)
    want = _modes(None)[0]
    for rank, seen in enumerate(pool.run(_modes, plan, world=world_of(plan))):
        mine = want if composition == "tp2+sp" else want.chunk(2)[rank // 2]
        assert len(seen) == 3
        for logits in seen:
            torch.testing.assert_close(logits, mine, rtol=1e-12, atol=1e-12)


class Nested(nn.Module):
    """Takes a container and a keyword-only tensor; returns a loss, logits and a count in nested containers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(5, 6), nn.Linear(6, 3)

    def forward(self, pair: dict[str, Tensor], scale: float = 1.0, *, shift: Tensor) -> dict[str, Any]:
        h = torch.tanh(self.up(pair["x"] + shift)) * scale
        y = self.down(h)
        return {"loss": (y * pair["w"]).pow(2).mean(), "more": (y, [h, None, 7])}


def _nested_plan() -> mp.Plan:
    shapes = {"pair.x": (4, 5), "pair.w": (4, 3), "shift": (5,)}
    place = {"pair.x": {"dp": S(0)}, "pair.w": {"dp": S(0)}, "shift": {}}
    return mp.Plan(
        mesh={"dp_shard": 2, "tp": 2},
        inputs={n: mp.Input(shape=s, dtype=torch.float64, place=place[n]) for n, s in shapes.items()},
        rules=[mp.Rule("up", use="colwise"), mp.Rule("down", use="rowwise")],
        fsdp=mp.Fsdp(units=["up"]),
    )


def _nested_inputs() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(3)
    make = lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64)  # noqa: E731
    return {"pair": {"x": make(4, 5), "w": make(4, 3)}, "shift": make(5)}


def _nested(plan: mp.Plan | None, positional: bool) -> tuple[Any, dict[str, Tensor]]:
    model, inputs = built(Nested), _nested_inputs()
    if plan is not None:
        model = mp.parallelize(model, plan, inputs={**inputs, "scale": 0.5})
        inputs = mp.shard_batch(model, inputs)
    if positional:
        out = model(inputs["pair"], 0.5, shift=inputs["shift"])
    else:
        out = model(shift=inputs["shift"], scale=0.5, pair=inputs["pair"])
    out["loss"].backward()
    (y, (h, none, seven)) = out["more"]
    assert none is None and seven == 7
    return (out["loss"].item(), y.detach(), h.detach()), _gradients(model)


@pytest.mark.parametrize("positional", [True, False])
def test_containers_and_keywords_pass_in_and_out_and_outputs_are_whole_on_tp(pool, positional):
    (loss, y, h), gradients = _nested(None, positional)
    ranks = pool.run(_nested, _nested_plan(), positional)
    assert sum(r[0][0] for r in ranks) / 4 == pytest.approx(loss, rel=1e-12)
    for rank, ((_, mine, hidden), own) in enumerate(ranks):
        torch.testing.assert_close(mine, y.chunk(2)[rank // 2], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(hidden, h.chunk(2)[rank // 2], rtol=1e-12, atol=1e-12)
        assert apart(own, gradients) < 1e-12


def _outside(plan: mp.Plan | None) -> tuple[float, dict[str, Tensor]]:
    """The loss computed by the training script from logits, masked, with unequal counts on each rank."""
    model, whole = built(FAMILY.model()), batch()
    if plan is not None:
        model = mp.parallelize(model, plan, inputs={"tokens": whole["tokens"], "labels": None})
        whole = mp.shard_batch(model, whole)
    logits = model(whole["tokens"])
    each = nn.functional.cross_entropy(logits.flatten(0, 1), whole["labels"].flatten(), reduction="none")
    valid = whole["labels"].flatten() != -100
    loss = mp.token_mean(each, valid, model=model) if plan is not None else each.sum() / valid.sum()
    loss.backward()
    return loss.item(), _gradients(model)


@pytest.mark.parametrize("composition", ["ddp4", "dp_shard2 x tp2+sp"])
def test_a_loss_outside_the_model_counts_tokens_globally(pool, composition):
    loss, gradients = _outside(None)
    ranks = pool.run(_outside, FAMILY.plan(composition))
    assert sum(r[0] for r in ranks) / len(ranks) == pytest.approx(loss, rel=1e-12)
    assert all(apart(r[1], gradients) < 1e-12 for r in ranks)


@pytest.mark.parametrize("composition", ["tp4", "dp_shard2 x tp2+sp"])
def test_key_heads_that_are_copied_stay_so_in_another_program(pool, composition):
    """Two key heads on four ranks: the axis is split in two by the first lowering, and the plan still says `tp`."""
    plan, lengths = FAMILY.plan(composition), (12, 18, 14)
    want = _lengths(None, lengths)
    ranks = pool.run(_lengths, plan, lengths, world=world_of(plan))
    for i, (loss, gradients) in enumerate(want):
        assert sum(r[i][0] for r in ranks) / len(ranks) == pytest.approx(loss, rel=1e-12)
        assert all(apart(r[i][1], gradients) < 1e-12 for r in ranks)


class Optional(nn.Module):
    """A parameter that only some calls use."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.more, self.down = nn.Linear(5, 6), nn.Linear(5, 6), nn.Linear(6, 3)
        self.scale = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor, also: Tensor | None = None) -> Tensor:
        h = self.up(x)
        if also is not None:
            h = (h + self.more(also)) * self.scale
        return self.down(torch.tanh(h)).pow(2).mean()


def _optional_plan(mesh: dict[str, int]) -> mp.Plan:
    return mp.Plan(
        mesh=mesh,
        inputs={n: mp.Input(shape=(4, 5), dtype=torch.float64, place={"dp": S(0)}) for n in ("x", "also")},
        rules=[mp.Rule("{up,more}", use="colwise"), mp.Rule("down", use="rowwise")] if "tp" in mesh else [],
    )


def _optional(plan: mp.Plan | None, together: bool = False) -> dict[str, Tensor] | str:
    """Gradients of a call with `also` after one without, whose program came first."""
    model = built(Optional)
    generator = torch.Generator().manual_seed(3)
    x, also = (torch.randn(4, 5, generator=generator, dtype=torch.float64) for _ in range(2))
    whole = {"x": x, "also": also}
    if plan is not None:
        model = mp.parallelize(model, plan, inputs={"also": None})
        whole = mp.shard_batch(model, whole)
    first = model(whole["x"])
    if not together:
        first.backward()
    model.zero_grad()
    try:
        second = model(**whole)
        (second + first if together else second).backward()
    except PlanError as error:
        return error.code
    return _gradients(model)


@pytest.mark.parametrize("mesh", [{"dp_replicate": 2}, {"tp": 2}, {"dp_replicate": 2, "tp": 2}])
def test_gradients_are_reduced_as_the_program_that_ran_says_not_the_first_one(pool, mesh):
    want = _optional(None)
    plan = _optional_plan(mesh)
    for got in pool.run(_optional, plan, world=world_of(plan)):
        assert apart({n: got[n] for n in want}, want) < 1e-12


def test_one_backward_through_two_programs_that_reduce_differently_is_refused(pool):
    assert pool.run(_optional, _optional_plan({"tp": 2}), True, world=2) == ["programs-mixed"] * 2
