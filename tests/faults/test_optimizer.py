"""Optimizers and clipping: none may hold dead tensors, meet two meshes, or count an element twice."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import meshplan as mp
from tests.faults.check import exact, numbers, plan_of
from tests.faults.test_replicated import HeadNorm
from tests.faults.test_uneven import PAIR, Mlp

pytestmark = pytest.mark.usefixtures("pool")

X = {"x": numbers(4, 8, dp=mp.S(0))}


def built_before() -> str:
    model = Mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        mp.parallelize(model, plan_of(X, *PAIR))
    except mp.PlanError as error:
        return f"{error.code} {len(optimizer.param_groups)}"
    return "none"


def test_an_optimizer_built_before_is_refused(pool):
    # pytorch#109101: it would step tensors that the model no longer uses.
    assert pool.run(built_before, world=2) == ["optimizer-built 1"] * 2


def built_for_another_model() -> str:
    other, model = Mlp(), Mlp()
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    mp.parallelize(model, plan_of(X, *PAIR))
    return type(optimizer).__name__


def test_an_optimizer_of_another_model_is_none_of_its_business(pool):
    assert pool.run(built_for_another_model, world=2) == ["SGD", "SGD"]


def foreach_adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3, eps=1e-6, foreach=True)


def fused_adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-3, eps=1e-6, fused=True)


@pytest.mark.parametrize("make", [foreach_adamw, fused_adamw])
def test_a_partly_planned_model_steps_in_one_list(make):
    # pytorch#134212: all parameters are on one mesh, those outside the plan too.
    exact(
        Mlp, plan_of(X, PAIR[0], mesh={"dp_shard": 2, "tp": 2}, fsdp=mp.Fsdp(units=["up", "down"])), 4, optimizer=make
    )


class Mixed(nn.Module):
    """A replicated 2 x 2 weight and a number for each of 4 heads, split over tp."""

    def __init__(self) -> None:
        super().__init__()
        self.whole, self.sink = nn.Parameter(torch.zeros(2, 2)), nn.Parameter(torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.whole.sum() * x.sum() + (x * self.sink).sum()


def clipped(once: bool) -> tuple[float, float, float]:
    """On a rank: the norm of unit gradients, and the gradients after clipping to 1."""
    plan = plan_of({"x": numbers(1, 4)}, mp.Rule("", params={"sink": {"tp": mp.S(0)}}))
    model = mp.parallelize(Mixed(), plan)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    parameters = iter(list(model.parameters())) if once else list(model.parameters())
    norm = mp.clip_grad_norm_(parameters, 1.0)
    return float(norm), *(float(g.grad.full_tensor().flatten()[0]) for g in model.parameters())


@pytest.mark.parametrize("once", [False, True])
def test_the_norm_counts_each_element_once_and_takes_a_generator(pool, once):
    # TransformerEngine#715, Megatron-LM#7452 (8), AReaL#335: sqrt(4 + 4) with every sink counted and the whole weight once.
    for norm, whole, sink in pool.run(clipped, once, world=2):
        assert norm == pytest.approx(8**0.5, rel=1e-6)
        assert whole == pytest.approx(8**-0.5, rel=1e-4) and sink == pytest.approx(8**-0.5, rel=1e-4)


def test_an_unplanned_head_norm_is_on_the_mesh_of_all_others():
    plan = plan_of({"x": numbers(4, 5, 8)}, mp.Rule("q", use="colwise"), mp.Rule("o", use="rowwise"))
    exact(HeadNorm, plan, optimizer=foreach_adamw)
