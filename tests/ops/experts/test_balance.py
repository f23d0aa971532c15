"""Routers' losses and counts: any split of a batch has the value and the gradients of one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from meshplan.errors import PlanError
from meshplan.mesh.spec import MeshSpec
from meshplan.ops.calls import Call
from meshplan.ops.experts.balance import (
    add_choices,
    collectives,
    count_choices,
    load_balance_loss,
    sequence_loss,
    step_bias,
    z_loss,
)
from meshplan.runtime.comm import AxisGroup
from meshplan.runtime.recorder import record_collectives
from meshplan.runtime.simulated import SimulatedGroups, World

E, K = 5, 2
SPLITS = [(11,), (4, 7), (3, 0, 6, 2)]
EXACT = {"rtol": 1e-12, "atol": 1e-12}


def batch(masked: bool) -> tuple[Tensor, Tensor, Tensor | None]:
    draw = torch.Generator().manual_seed(1)
    logits = torch.randn(11, E, generator=draw, dtype=torch.float64)
    mask = torch.rand(11, generator=draw) < 0.7 if masked else None
    return logits, logits.topk(K, 1).indices, mask


def switch(logits: Tensor, chosen: Tensor, mask: Tensor | None) -> Tensor:
    """As transformers' Mixtral writes it, token masks and all."""
    weight = torch.ones(len(logits), dtype=torch.float64) if mask is None else mask.double()
    hot = F.one_hot(chosen, E).double()
    share = (hot * weight[:, None, None]).sum(0) / weight.sum()
    mean = (logits.softmax(-1) * weight[:, None]).sum(0) / weight.sum()
    return (share * mean[None]).sum() * E


def z(logits: Tensor, chosen: Tensor, mask: Tensor | None) -> Tensor:
    squares = logits.logsumexp(-1) ** 2
    return squares.mean() if mask is None else squares[mask].mean()


def shares(
    name: str, logits: Tensor, chosen: Tensor, mask: Tensor | None, groups: list[AxisGroup], **options: Any
) -> Tensor:
    if name == "z":
        return z_loss(logits, mask=mask, groups=groups, **options)
    return load_balance_loss(logits.softmax(-1), chosen, mask=mask, groups=groups, **options)


def on_ranks(axes: dict[str, int], work: Any) -> list[Any]:
    spec = MeshSpec(tuple(axes.items()))
    world = World(spec.world_size)
    return world.run(lambda rank: work(rank, SimulatedGroups(spec, rank, world=world)))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", ["load_balance", "z"])
def test_any_split_has_the_value_and_gradients_of_one_device(name, masked):
    logits, chosen, mask = batch(masked)
    whole = logits.clone().requires_grad_()
    expected = {"z": z, "load_balance": switch}[name](whole, chosen, mask)
    (grad,) = torch.autograd.grad(expected, whole)
    for split in SPLITS:
        parts = [x.split(split) if x is not None else [None] * len(split) for x in (logits, chosen, mask)]

        def work(rank: int, groups: Any, parts=parts) -> tuple[Tensor, Tensor]:
            mine = parts[0][rank].clone().requires_grad_()
            value = shares(name, mine, parts[1][rank], parts[2][rank], [groups.group("dp_shard")])
            value.backward()
            return value.detach(), mine.grad

        ranks = on_ranks({"dp_shard": len(split)}, work)
        torch.testing.assert_close(sum(v for v, _ in ranks) / len(split), expected.detach(), **EXACT)
        torch.testing.assert_close(torch.cat([g for _, g in ranks]) / len(split), grad, **EXACT)


@pytest.mark.parametrize("name", ["load_balance", "z"])
def test_ranks_whose_gradients_are_summed_are_not_averaged(name):
    """tp splits tokens and its gradients are summed; dp_shard's are averaged."""
    logits, chosen, mask = batch(False)
    split = (4, 3, 1, 3)
    for scope in ("global", "per_rank"):
        whole = logits.clone().requires_grad_()
        one = {"z": z, "load_balance": switch}[name]
        if scope == "global":
            expected = one(whole, chosen, mask)
        else:
            expected = sum(one(x, c, None) for x, c in zip(whole.split(split), chosen.split(split), strict=True)) / 4
        (grad,) = torch.autograd.grad(expected, whole)

        def work(rank: int, groups: Any, scope=scope) -> Tensor:
            mine = logits.split(split)[rank].clone().requires_grad_()
            both = [groups.group("dp_shard"), groups.group("tp")]
            shares(name, mine, chosen.split(split)[rank], None, both, scope=scope, data_ranks=2).backward()
            return mine.grad

        found = torch.cat(on_ranks({"dp_shard": 2, "tp": 2}, work)) / 2
        torch.testing.assert_close(found, grad, **EXACT)


@pytest.mark.parametrize("name", ["load_balance", "z"])
def test_per_rank_is_the_mean_of_each_ones_own(name):
    logits, chosen, _ = batch(False)
    one = {"z": z, "load_balance": switch}[name]

    def work(rank: int, groups: Any) -> Tensor:
        rows = slice(0, 4) if rank == 0 else slice(4, 11)
        return shares(name, logits[rows], chosen[rows], None, [groups.group("dp_shard")], scope="per_rank")

    for found, rows in zip(on_ranks({"dp_shard": 2}, work), (slice(0, 4), slice(4, 11)), strict=True):
        torch.testing.assert_close(found, one(logits[rows], chosen[rows], None), **EXACT)


def test_the_example_of_the_docstring():
    p = [torch.tensor([[0.8, 0.2]]), torch.tensor([[0.4, 0.6]] * 3)]
    chosen = [torch.tensor([[0]]), torch.tensor([[0], [1], [1]])]
    values = on_ranks(
        {"dp_shard": 2}, lambda r, g: load_balance_loss(p[r], chosen[r], groups=[g.group("dp_shard")]).item()
    )
    assert values == pytest.approx([0.5, 1.5])


def test_shares_per_choice():
    logits, chosen, _ = batch(False)
    plain, per_choice = (load_balance_loss(logits.softmax(-1), chosen, groups=(), per_choice=p) for p in (False, True))
    torch.testing.assert_close(per_choice * K, plain, **EXACT)


@pytest.mark.parametrize("masked", [False, True])
def test_sequences_are_balanced_one_by_one_wherever_they_are_cut(masked):
    draw = torch.Generator().manual_seed(2)
    b, s = 3, 8
    scores = torch.rand(b, s, E, generator=draw, dtype=torch.float64)
    chosen = scores.topk(K, -1).indices
    mask = torch.rand(b, s, generator=draw) < 0.6 if masked else None
    whole = scores.clone().requires_grad_()
    p = whole / whole.sum(-1, keepdim=True)
    expected = torch.zeros((), dtype=torch.float64)
    for i in range(b):
        valid = torch.ones(s, dtype=torch.bool) if mask is None else mask[i]
        n = int(valid.sum())
        f = F.one_hot(chosen[i][valid], E).sum((0, 1)).double() * E / (K * n)
        expected = expected + (f * p[i][valid].sum(0) / n).sum() / b
    (grad,) = torch.autograd.grad(expected, whole)

    def work(rank: int, groups: Any) -> tuple[Tensor, Tensor]:
        dp, cp = groups.group("dp_shard"), groups.group("cp")
        at = (slice(0, 1) if dp.rank == 0 else slice(1, 3), slice(4 * cp.rank, 4 * cp.rank + 4))
        mine = scores[at].clone().requires_grad_()
        value = sequence_loss(
            mine / mine.sum(-1, keepdim=True), chosen[at], batch_groups=[dp], sequence_groups=[cp],
            mask=None if mask is None else mask[at],
        )  # fmt: skip
        value.backward()
        return value.detach(), mine.grad

    ranks = on_ranks({"dp_shard": 2, "cp": 2}, work)
    torch.testing.assert_close(sum(v for v, _ in ranks) / 4, expected.detach(), **EXACT)
    found = [torch.cat([ranks[2 * i][1], ranks[2 * i + 1][1]], 1) for i in range(2)]
    torch.testing.assert_close(torch.cat(found) / 4, grad, **EXACT)


def test_choices_are_counted_once_over_what_splits_tokens():
    _, chosen, mask = batch(True)
    expected = torch.bincount(chosen[mask].flatten(), minlength=E)

    def work(rank: int, groups: Any) -> Tensor:
        # tp ranks hold the same tokens, and are not among the groups.
        dp = groups.group("dp_shard")
        rows = slice(0, 4) if dp.rank == 0 else slice(4, 11)
        return count_choices(chosen[rows], E, groups=[dp], mask=mask[rows])

    for found in on_ranks({"dp_shard": 2, "tp": 2}, work):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("reentrant", [False, True])
def test_recompute_counts_nothing_twice(reentrant):
    _, chosen, _ = batch(False)
    total = torch.zeros(E, dtype=torch.int64)

    def block(x: Tensor) -> Tensor:
        add_choices(total, chosen)
        return x.sin()

    checkpoint(block, torch.ones(3, requires_grad=True), use_reentrant=reentrant).sum().backward()
    assert torch.equal(total, torch.bincount(chosen.flatten(), minlength=E))


def test_the_bias_rises_where_choices_are_few():
    bias = torch.zeros(4)
    step_bias(bias, torch.tensor([7, 1, 4, 4]), 0.5)
    assert bias.tolist() == [-0.5, 0.5, 0.0, 0.0]


def _recorded() -> list[tuple[list[Call], list[Call]]]:
    group = AxisGroup("dp_shard", 4, dist.get_rank(), dist.group.WORLD.group_name)
    logits, chosen, _ = batch(False)
    p = logits.softmax(-1)
    calls = {
        "load_balance": lambda: load_balance_loss(p, chosen, groups=[group]),
        "z": lambda: z_loss(logits, groups=[group]),
        "counts": lambda: count_choices(chosen, E, groups=[group]),
        "sequence": lambda: sequence_loss(p[None], chosen[None], batch_groups=(), sequence_groups=[group]),
    }
    found = []
    for name, call in calls.items():
        with record_collectives() as log:
            call()
        said = collectives(name, E, [group], sequences=1)
        found.append(([Call(c.op, "dp_shard", c.elements, getattr(torch, c.dtype)) for c in log], said))
    return found


def test_gloo_ranks_send_what_is_announced(pool):
    for rank in pool.run(_recorded):
        for made, announced in rank:
            assert made == announced
    assert collectives("z", E, [AxisGroup("dp_shard", 4, 0)], scope="per_rank") == []


def test_what_does_not_fit_is_refused():
    p, chosen = torch.ones(3, E), torch.zeros(3, K, dtype=torch.int64)
    bad = [
        ("experts-shape", lambda: load_balance_loss(p, chosen[:2], groups=())),
        ("experts-shape", lambda: load_balance_loss(p, chosen, mask=torch.ones(3, 1), groups=())),
        ("experts-shape", lambda: z_loss(p[0], groups=())),
        ("experts-shape", lambda: sequence_loss(p, chosen, batch_groups=())),
        ("experts-shape", lambda: sequence_loss(p[None], chosen[None], mask=torch.ones(3), batch_groups=())),
        ("bad-value", lambda: z_loss(p, groups=(), scope="local")),
    ]
    for code, call in bad:
        with pytest.raises(PlanError) as refusal:
            call()
        assert refusal.value.code == code
