"""Every dispatch on simulated and gloo ranks, forward and backward, against one device that takes token after token."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from meshplan.errors import PlanError
from meshplan.mesh.spec import MeshSpec
from meshplan.ops.experts.experts import routed_experts
from meshplan.ops.experts.grouped import grouped_linear
from meshplan.runtime.comm import AxisGroup
from meshplan.runtime.simulated import SimulatedGroups, World
from tests.ops.experts.reference import ROUTINGS, Case, check, on_rank, simulated

METHODS: dict[str, dict[str, Any]] = {
    "alltoall": {},
    "dedup": {"dedup": True},
    "allgather": {"dispatch": "allgather"},
}
UNEVEN = {1: (7,), 2: (5, 9), 4: (3, 0, 6, 2)}


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("method", METHODS)
def test_ranks_are_one_device(method, routing):
    for n, k in itertools.product((2, 4), (1, 2)):
        case = Case(UNEVEN[n], k=k, routing=routing)
        check(case, simulated(case, METHODS[method]))


@pytest.mark.parametrize("method", METHODS)
def test_top_1_to_top_8(method):
    for k in range(1, 9):
        case = Case((4, 3), experts=10, k=k, bias=False)
        check(case, simulated(case, METHODS[method]))


@pytest.mark.parametrize("method", METHODS)
def test_one_token_no_token_and_other_degrees(method):
    for tokens, experts in (((1, 0), 6), ((0, 0, 1, 0), 4), ((0, 0), 2), ((2, 5, 1), 9), ((7,), 5), ((0,), 3)):
        case = Case(tokens, experts=experts, k=2)
        check(case, simulated(case, METHODS[method]))


def test_ranks_with_equal_tokens_need_not_ask_for_them():
    case = Case((4, 4), k=3)
    check(case, simulated(case, {"dispatch": "allgather", "equal": True}))


@pytest.mark.parametrize("method", METHODS)
def test_half_precision_comes_back_as_it_went_and_indices_may_be_int32(method):
    def work(group: AxisGroup) -> Tensor:
        x = torch.full((3, 2), 1.0 + group.rank, dtype=torch.bfloat16, requires_grad=True)
        chosen, weights = torch.tensor([[0, 1], [1, 0], [1, 1]], dtype=torch.int32), torch.full((3, 2), 0.5)
        out = routed_experts(x, chosen, weights, lambda x, _: x.float() * 2, experts=2, group=group, **METHODS[method])
        out.sum().backward()
        assert out.dtype == x.grad.dtype == torch.bfloat16 and torch.equal(x.grad, torch.full_like(x, 2.0))
        return out

    for rank, out in enumerate(two(work)):
        assert torch.equal(out, torch.full((3, 2), 2.0 + 2 * rank, dtype=torch.bfloat16))


@pytest.mark.parametrize("method", METHODS)
def test_reruns_are_the_same_bit_by_bit(method):
    first, second = (simulated(Case(UNEVEN[4], k=4), METHODS[method]) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


@settings(max_examples=25, deadline=None, derandomize=True, database=None)
@given(st.data())
def test_drawn_problems_are_one_device(data):
    n = data.draw(st.sampled_from([1, 2, 3, 4]), "ranks")
    experts = n * data.draw(st.integers(1, 3), "experts of a rank")
    tokens = tuple(data.draw(st.lists(st.integers(0, 5), min_size=n, max_size=n), "tokens"))
    k = data.draw(st.integers(1, min(8, experts)), "choices")
    routings = ROUTINGS if experts > 1 else ["random", "same", "holes"]
    case = Case(tokens, experts, k, data.draw(st.sampled_from(routings), "routing"), data.draw(st.booleans(), "bias"))
    check(case, simulated(case, METHODS[data.draw(st.sampled_from(list(METHODS)), "method")]))


GLOO = [
    (Case(UNEVEN[4], k=2), "alltoall"),
    (Case(UNEVEN[4], k=4, routing="one"), "alltoall"),
    (Case((0, 0, 1, 0), experts=4, k=1), "alltoall"),
    (Case(UNEVEN[4], k=2, routing="same"), "dedup"),
    (Case(UNEVEN[4], k=5, routing="holes"), "dedup"),
    (Case((0, 0, 0, 0), experts=4), "dedup"),
    (Case(UNEVEN[4], k=3, routing="idle"), "allgather"),
]


def _on_gloo() -> list[dict[str, Tensor]]:
    group = AxisGroup("ep", 4, dist.get_rank(), dist.group.WORLD.group_name)
    return [on_rank(case, group, METHODS[method]) for case, method in GLOO]


def test_gloo_ranks_are_one_device(pool):
    ranks = pool.run(_on_gloo)
    for i, (case, _) in enumerate(GLOO):
        check(case, [r[i] for r in ranks])


def two(work: Any) -> list[Any]:
    world, spec = World(2), MeshSpec((("ep", 2),))
    return world.run(lambda rank: work(SimulatedGroups(spec, rank, world=world).group("ep")))


@pytest.mark.parametrize("method", METHODS)
def test_gradients_are_sums_over_all_ranks_tokens(method):
    """y = w_e x over two ranks: x = 1 to expert 0 and 2 to expert 1; 3 and 4 to expert 0. A rank's loss is its mean."""

    def work(group: AxisGroup) -> tuple[float, Tensor | None]:
        x = torch.tensor([[1.0], [2.0]] if group.rank == 0 else [[3.0], [4.0]]).double().requires_grad_()
        chosen = torch.tensor([[0], [1]] if group.rank == 0 else [[0], [0]])
        w = torch.full((), 0.5, dtype=torch.float64, requires_grad=True)
        ones = torch.ones(2, 1, dtype=torch.float64)
        routed_experts(x, chosen, ones, lambda x, _: w * x, experts=2, group=group, **METHODS[method]).mean().backward()
        return w.grad.item(), x.grad

    (dw0, dx0), (dw1, dx1) = two(work)
    # Divided by the two data ranks: 2.0 and 0.5, those of one device's mean over four tokens.
    assert (dw0 / 2, dw1 / 2) == (2.0, 0.5)
    assert dx0.tolist() == dx1.tolist() == [[0.25], [0.25]]


@pytest.mark.parametrize("method", METHODS)
def test_a_body_that_forgets_its_input_where_there_is_none_keeps_nobody_waiting(method):
    """All tokens go to rank 0's expert; rank 1's experts return new memory that depends on nothing."""

    def work(group: AxisGroup) -> Tensor | None:
        x = torch.full((1 + group.rank, 3), 2.0, requires_grad=True)
        weights = torch.ones(x.shape[0], 1, requires_grad=True)
        out = routed_experts(
            x, torch.zeros(x.shape[0], 1, dtype=torch.int64), weights,
            lambda x, _: 3 * x if len(x) else torch.empty(0, 3), experts=2, group=group, **METHODS[method],
        )  # fmt: skip
        out.sum().backward()
        assert weights.grad.tolist() == [[18.0]] * x.shape[0]
        return x.grad

    for rank, grad in enumerate(two(work)):
        assert torch.equal(grad, torch.full((1 + rank, 3), 3.0))


@pytest.mark.parametrize("method", METHODS)
def test_an_idle_expert_has_a_gradient_of_zeros_and_not_none(method):
    def work(group: AxisGroup) -> Tensor | None:
        w = torch.full((1, 2, 2), 2.0, dtype=torch.float64, requires_grad=True)
        x, chosen = torch.ones(3, 2, dtype=torch.float64), torch.zeros(3, 1, dtype=torch.int64)
        weights = torch.ones(3, 1, dtype=torch.float64)
        out = routed_experts(
            x, chosen, weights, lambda x, c: grouped_linear(x, c, w), experts=2, group=group, **METHODS[method]
        )
        out.sum().backward()
        return w.grad

    busy, idle = two(work)
    assert torch.equal(busy, torch.full((1, 2, 2), 6.0).double()) and torch.equal(idle, torch.zeros(1, 2, 2).double())


@pytest.mark.parametrize("frozen", ["tokens", "weights", "both"])
@pytest.mark.parametrize("method", METHODS)
def test_what_needs_no_gradient_travels_no_way_back(method, frozen):
    def work(group: AxisGroup) -> Tensor:
        x = torch.ones(2, 3, requires_grad=frozen == "weights")
        weights = torch.ones(2, 1, requires_grad=frozen == "tokens")
        w = torch.ones((), requires_grad=True)
        chosen = torch.zeros(2, 1, dtype=torch.int64)
        routed_experts(
            x, chosen, weights, lambda x, _: w * x, experts=2, group=group, **METHODS[method]
        ).sum().backward()
        assert (x.grad is None) == (frozen != "weights") and (weights.grad is None) == (frozen != "tokens")
        return w.grad

    assert [g.item() for g in two(work)] == [12.0, 0.0]


@pytest.mark.parametrize("method", METHODS)
def test_recompute_gives_the_same(method):
    from torch.utils.checkpoint import checkpoint

    def work(group: AxisGroup) -> tuple[Tensor, ...]:
        found = []
        for again in (False, True):
            x = torch.arange(6.0).view(2, 3).requires_grad_()
            w = torch.full((), 0.5, requires_grad=True)
            chosen, weights = torch.tensor([[0, 1], [1, 0]]), torch.ones(2, 2)

            def block(x: Tensor, w=w, chosen=chosen, weights=weights) -> Tensor:
                return routed_experts(
                    x, chosen, weights, lambda x, _: (w * x).square(), experts=2, group=group, **METHODS[method]
                )

            (checkpoint(block, x, use_reentrant=False) if again else block(x)).sum().backward()
            found += [x.grad, w.grad]
        return tuple(found)

    for plain_x, plain_w, x, w in two(work):
        assert torch.equal(plain_x, x) and torch.equal(plain_w, w)


@pytest.mark.parametrize("method", METHODS)
def test_an_index_without_an_expert_is_refused_by_all_ranks_together(method):
    def work(group: AxisGroup) -> str:
        with pytest.raises(PlanError) as refusal:
            chosen = torch.tensor([[0], [2 + group.rank]]) - 1
            routed_experts(
                torch.ones(2, 3), chosen, torch.ones(2, 1), lambda x, _: x, experts=2, group=group, **METHODS[method]
            )
        return refusal.value.code

    assert two(work) == ["expert-index"] * 2


@pytest.mark.parametrize("method", METHODS)
def test_second_derivatives_are_refused(method):
    x = torch.ones(2, 3, requires_grad=True)
    weights, chosen = torch.ones(2, 1, requires_grad=True), torch.zeros(2, 1, dtype=torch.int64)
    out = routed_experts(x, chosen, weights, lambda x, _: x, experts=1, group=AxisGroup("ep", 1, 0), **METHODS[method])
    with pytest.raises(PlanError) as refusal:
        torch.autograd.grad(out.square().sum(), x, create_graph=True)
    assert refusal.value.code == "second-derivative"


def test_shapes_and_degrees_that_cannot_be_are_refused():
    good = (torch.ones(2, 3), torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1))
    bad = [
        ("experts-shape", (good[0], good[1][:1], good[2]), {}),
        ("experts-shape", (good[0], good[1].float(), good[2]), {}),
        ("experts-shape", (good[0], good[1], good[2][:, :0]), {}),
        ("experts-split", good, {"experts": 3}),
        ("bad-value", good, {"dispatch": "fast"}),
    ]
    for code, args, options in bad:
        with pytest.raises(PlanError) as refusal:
            routed_experts(*args, lambda x, _: x, **{"experts": 2, "group": AxisGroup("ep", 2, 0), **options})
        assert refusal.value.code == code
    with pytest.raises(PlanError) as refusal:
        routed_experts(*good, lambda x, _: x[:, :1], experts=2, group=AxisGroup("ep", 1, 0))
    assert refusal.value.code == "experts-shape"
