"""Tokens that ranks hold copies of, and experts that ranks split, against one device; gradients of either kind of ownership."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from meshplan.errors import PlanError
from meshplan.mesh.spec import MeshSpec
from meshplan.ops.experts.contract import Routing
from meshplan.ops.experts.experts import routed_experts, with_shared
from meshplan.ops.experts.grouped import grouped_mlp
from meshplan.ops.experts.layout import TokenLayout, join_tokens, split_tokens
from meshplan.runtime.comm import AxisGroup
from meshplan.runtime.simulated import SimulatedGroups, World
from tests.ops.experts.reference import PARAMETERS, Case, F, indices, reference, tensors

ETP_F = [slice(0, 2), slice(2, F)]
"""The inner width 3 over two ranks of etp, unequally."""


def summand(grad: Tensor, group: AxisGroup) -> Tensor:
    """This rank's of summands of `grad` that have nothing in common."""
    draw = torch.Generator().manual_seed(7)
    parts = torch.randn(group.size, *grad.shape, generator=draw, dtype=grad.dtype)
    parts[-1] = grad - parts[:-1].sum(0)
    return parts[group.rank]


def parameters(case: Case, ep: AxisGroup, etp: AxisGroup | None) -> dict[str, Tensor]:
    """This rank's experts; under etp its part of their inner width, and the last bias on one rank alone."""
    t = {name: ep.shard(x, 0) for name, x in tensors(case).items() if name in PARAMETERS}
    if etp is not None:
        part = ETP_F[etp.rank]
        wide = {name: t[name].unflatten(1, (2, F))[:, :, part].flatten(1, 2) for name in ("up", "up_bias")}
        t |= {**wide, "down": t["down"][:, :, part], "down_bias": t["down_bias"] if etp.rank == 0 else None}  # type: ignore[dict-item]
    return {name: x.clone().requires_grad_() for name, x in t.items() if x is not None}


def on_rank(
    case: Case, groups: Any, data: tuple[str, ...], ep: tuple[str, ...], same: tuple[str, ...], etp: bool, options: dict
) -> dict[str, Tensor]:
    """`data` axes have tokens of their own, `same` ones copies; with `etp` an axis of that name splits experts."""
    over = {name: groups.group(*axes) for name, axes in {"data": data, "ep": ep, "copies": same}.items()}
    parts = groups.group("tp_etp") if etp else None
    kind, etp_copies = options.get("kind", "I"), "tp_etp" not in data
    t, rank = tensors(case), over["data"].rank
    rows = slice(sum(case.tokens[:rank]), sum(case.tokens[: rank + 1]))
    mine = {name: t[name][rows].clone().requires_grad_() for name in ("tokens", "weights")}
    params = parameters(case, over["ep"], parts)
    copies = over["copies"] if same else None
    layout = TokenLayout(copies=copies, etp=parts, etp_copies=etp_copies, kind=kind)
    out = routed_experts(
        mine["tokens"], indices(case)[rows], mine["weights"], lambda x, c: grouped_mlp(x, c, **params),
        experts=case.experts, group=over["ep"], layout=layout, **options.get("dispatch", {}),
    )  # fmt: skip
    grad = t["grad"][rows]
    holders = groups.group(*same, *(["tp_etp"] if etp and etp_copies else []))
    out.backward(summand(grad, holders) if kind == "R" else grad)
    if kind == "R":
        for x in mine.values():
            x.grad = holders.all_reduce(x.grad)  # type: ignore[arg-type]
    # An expert's gradient is the sum over those that hold it: all ranks but ep's and etp's.
    others = groups.group(*(a for a in groups.spec.names if a not in ep and a != "tp_etp"))
    found = {name: over["ep"].all_gather(others.all_reduce(x.grad), 0) for name, x in params.items()}  # type: ignore[arg-type]
    if parts is not None:
        # The bias that one rank adds has its gradient there.
        missing = torch.zeros(case.experts, out.shape[1], dtype=out.dtype)
        found["down_bias"] = parts.all_reduce(found.get("down_bias", missing))
    return {"out": out.detach(), **{name: x.grad for name, x in mine.items()}, **found}  # type: ignore[dict-item]


def whole_width(ranks: list[dict[str, Tensor]], name: str) -> Tensor:
    """A parameter's gradient of the etp ranks' parts."""
    parts = ranks[:2]
    if name == "down":
        return torch.cat([r[name] for r in parts], 2)
    if name == "down_bias":
        return parts[0][name]
    halves = [r[name].unflatten(1, (2, -1)) for r in parts]
    return torch.cat(halves, 2).flatten(1, 2)


def check(case: Case, spec: MeshSpec, data: tuple[str, ...], ranks: list[dict[str, Tensor]], etp: bool) -> None:
    expected = reference(case)
    for rank, found in enumerate(ranks):
        place = spec.coord(rank, *data)
        rows = slice(sum(case.tokens[:place]), sum(case.tokens[: place + 1]))
        for name in ("out", "tokens", "weights"):
            torch.testing.assert_close(found[name], expected[name][rows], rtol=1e-12, atol=1e-12)
        for name in PARAMETERS:
            mine = whole_width(ranks, name) if etp else found[name]
            torch.testing.assert_close(mine, expected[name], rtol=1e-12, atol=1e-12)


def run(case: Case, spec: MeshSpec, data: tuple, ep: tuple, same: tuple, etp: bool, options: dict) -> None:
    world = World(spec.world_size)
    ranks = world.run(
        lambda rank: on_rank(case, SimulatedGroups(spec, rank, world=world), data, ep, same, etp, options)
    )
    check(case, spec, data, ranks, etp)


METHODS = [{}, {"dedup": True}, {"dispatch": "allgather"}]
TP = MeshSpec((("dp_shard", 2), ("tp", 2)))


@pytest.mark.parametrize("kind", ["I", "R"])
@pytest.mark.parametrize("dispatch", METHODS, ids=str)
@pytest.mark.parametrize("tokens", [(5, 6), (1, 0), (0, 0), (4, 1)], ids=str)
def test_copies_dispatch_a_share_each(tokens, dispatch, kind):
    """tp 2 with equal tokens; experts over both axes, over dp_shard alone (copies of them on tp), and over tp alone."""
    for ep in (("dp_shard", "tp"), ("dp_shard",), ("tp",)):
        case = Case(tokens, k=3)
        run(case, TP, ("dp_shard",), ep, ("tp",), False, {"kind": kind, "dispatch": dispatch})


@pytest.mark.parametrize("kind", ["I", "R"])
def test_fewer_tokens_than_ranks(kind):
    spec = MeshSpec((("tp", 4),))
    for tokens in (0, 1, 3, 5, 6):
        run(Case((tokens,), k=2), spec, (), ("tp",), ("tp",), False, {"kind": kind})


ETP = MeshSpec((("dp_shard", 2), ("tp_ep", 2), ("tp_etp", 2)), parents=(("tp_ep", "tp"), ("tp_etp", "tp")))


@pytest.mark.parametrize("dispatch", METHODS, ids=str)
@pytest.mark.parametrize("routing", ["random", "holes", "same"])
def test_etp_ranks_with_tokens_of_their_own(routing, dispatch):
    case = Case((3, 0, 6, 2, 1, 4, 0, 5), k=3, routing=routing)
    data = ("dp_shard", "tp_ep", "tp_etp")
    run(case, ETP, data, ("dp_shard", "tp_ep"), (), True, {"dispatch": dispatch})
    run(case, ETP, data, ("tp_ep",), (), True, {"dispatch": dispatch})


@pytest.mark.parametrize("kind", ["I", "R"])
@pytest.mark.parametrize("dispatch", METHODS, ids=str)
@pytest.mark.parametrize("tokens", [(5, 6), (1, 0)], ids=str)
def test_etp_ranks_with_copies(tokens, dispatch, kind):
    case = Case(tokens, k=3)
    run(case, ETP, ("dp_shard",), ("dp_shard", "tp_ep"), ("tp_ep",), True, {"kind": kind, "dispatch": dispatch})


def test_a_shared_expert_that_every_rank_has_is_added_once():
    """Ranks of etp compute 1 and 2 of a token, and all have the shared expert's 10: that is 13, and not 23."""

    def work(group: AxisGroup) -> tuple[Tensor, Tensor | None]:
        x = torch.ones(3, 2, dtype=torch.float64, requires_grad=True)
        chosen, ones = torch.zeros(3, 1, dtype=torch.int64), torch.ones(3, 1, dtype=torch.float64)
        out = with_shared(
            x, chosen, ones, lambda x, _: (group.rank + 1) * x, lambda x: 10 * x,
            experts=1, group=AxisGroup("ep", 1, 0), layout=TokenLayout(etp=group, etp_copies=True),
        )  # fmt: skip
        out.backward(torch.ones_like(out))
        return out.detach(), x.grad

    world, spec = World(2), MeshSpec((("tp", 2),))
    for out, grad in world.run(lambda rank: work(SimulatedGroups(spec, rank, world=world).group("tp"))):
        assert torch.equal(out, torch.full((3, 2), 13.0).double()) and torch.equal(grad, out)


def _on_gloo(kind: str) -> list[dict[str, Tensor]]:
    """tp 4 and tokens that three ranks get one each of, and that none gets any of."""
    group = AxisGroup("tp", 4, dist.get_rank(), dist.group.WORLD.group_name)  # type: ignore[union-attr]
    found = []
    for tokens in (3, 0):
        case = Case((tokens,), k=2)
        t = tensors(case)
        x = Routing(t["tokens"].requires_grad_(), indices(case), t["weights"].requires_grad_())
        part = split_tokens(x, group, kind)
        out = join_tokens(part.tokens * part.weights.sum(1, keepdim=True), tokens, group, kind)
        out.backward(summand(t["grad"], group) if kind == "R" else t["grad"])
        found.append({"out": out.detach(), "tokens": x.tokens.grad, "weights": x.weights.grad})
    return found


@pytest.mark.parametrize("kind", ["I", "R"])
def test_shares_on_gloo_ranks(pool, kind):
    ranks = pool.run(_on_gloo, kind)
    for i, tokens in enumerate((3, 0)):
        t = tensors(Case((tokens,), k=2))
        total = t["weights"].sum(1, keepdim=True)
        expected = {
            "out": t["tokens"] * total,
            "tokens": t["grad"] * total,
            "weights": (t["grad"] * t["tokens"]).sum(1, keepdim=True).expand(-1, 2),
        }
        for name, want in expected.items():
            found = [r[i][name] for r in ranks]
            for each in [sum(found)] if kind == "R" and name != "out" else found:
                torch.testing.assert_close(each, want, rtol=1e-12, atol=1e-12)


def test_another_kind_is_refused():
    x = Routing(torch.ones(2, 3), torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1))
    group = AxisGroup("tp", 2, 0)
    for wrong in (
        lambda: split_tokens(x, group, "P"),
        lambda: join_tokens(x.tokens, 4, group, "S"),
        lambda: TokenLayout(copies=group, kind="N"),
    ):
        with pytest.raises(PlanError) as refusal:
            wrong()
        assert refusal.value.code == "bad-value"
