"""Blocks that loop over their experts themselves: which are found, what is asked of them, and what no rank could run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import meshplan as mp
from meshplan.plan.placements import Shard
from tests.distributed.moe_blocks import EXPERTS, WIDTH, Counting, Expert, Looped, Masked, Sorted

S = mp.S


def lowered(model: nn.Module, mesh: dict[str, int], place: Any = None, **sections: Any) -> Any:
    tokens = mp.Input(shape=(8, 6), dtype=torch.int64, place={"dp": S(0)} if place is None else place)
    experts = {"at": ["layers.*.moe"], "ep": 2, **sections.pop("experts", {})}
    plan = mp.Plan(mesh=mesh, inputs={"tokens": tokens, "labels": tokens}, experts=experts, **sections)
    world = 1
    for n in mesh.values():
        world *= n
    return mp.lower(model, plan, world)


def refused(kind: type[nn.Module], mesh: dict[str, int] | None = None, **sections: Any) -> mp.PlanError:
    with pytest.raises(mp.PlanError) as caught:
        lowered(Looped(kind), mesh or {"dp_shard": 2}, **sections)
    return caught.value


@pytest.mark.parametrize(
    ("kind", "names"),
    [(Masked, [f"experts.{e}" for e in range(EXPERTS)]), (Sorted, [f"experts.expert_{e}" for e in range(EXPERTS)])],
)
@pytest.mark.parametrize("at", ["layers.*.moe", "layers.*.moe.experts", "layers.*", ""])
def test_the_block_is_found_beside_its_router(kind, names, at):
    found = lowered(Looped(kind), {"dp_shard": 2}, experts={"at": [at]}).core.experts.modules
    assert {path: list(f.each) for path, f in found.items()} == {f"layers.{i}.moe": names for i in range(2)}


def test_results_of_a_block_lie_as_its_tokens_do():
    """Scores come back flattened: rows of a split batch are a stretch of them."""
    low = lowered(Looped(Masked), {"dp_shard": 2})
    outputs = {
        key: kinds
        for path, side, key, _, kinds in low.core.program.layouts
        if (path, side) == ("layers.0.moe", "output")
    }
    assert outputs == {"0": (Shard(0),), "1": (Shard(0),)}


def test_a_sequence_is_split_where_no_result_is_flattened_and_otherwise_the_batch_is():
    kept, moved = (
        lowered(Looped(kind), {"dp_shard": 1, "cp": 2}, {"cp": S(1)}, experts={"ep": 2}) for kind in (Sorted, Masked)
    )
    inputs = [
        {
            path: kinds
            for path, side, _, _, kinds in low.core.program.layouts
            if side == "input" and path.endswith("moe")
        }
        for low in (kept, moved)
    ]
    assert inputs[0]["layers.0.moe"] == (Shard(1),)
    assert not kept.core.program.boundaries
    assert inputs[1]["layers.0.moe"] == (Shard(0),)


def test_parameters_of_listed_experts_stay_whole_and_others_are_sharded_with_their_unit():
    low = lowered(Looped(Counting), {"dp_shard": 2}, fsdp={"units": ["layers.*"]})
    held = {row["name"]: tuple(row["local_shape"]) for row in low.to_json()["placements"]}
    assert held["layers.0.moe.experts.3.w1.weight"] == (10, WIDTH)
    assert held["layers.0.moe.gate"] == (EXPERTS // 2, WIDTH)
    assert held["layers.0.moe.shared.w2.weight"] == (WIDTH // 2, 7)


def test_buffers_that_count_tokens_are_summed_over_the_ranks_and_others_are_not():
    low = lowered(Looped(Counting), {"dp_shard": 2})
    sent = [c for c in low.collectives if c.module == "layers.0.moe" and c.op == "all_reduce"]
    assert [(c.phase, c.dtype, c.elements) for c in sent] == [("forward", "int64", EXPERTS)]
    others = lowered(Looped(Masked), {"dp_shard": 2}).collectives
    assert not [c for c in others if c.module == "layers.0.moe" and "reduce" in c.op]


class Chained(Masked):
    """An expert is fed by what another made."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        tokens = x.flatten(0, -2)
        best = self.gate(tokens).argmax(-1)
        out = torch.zeros_like(tokens)
        for e, expert in enumerate(self.experts):
            out = torch.where(
                (best == e)[:, None], expert(tokens + out.mean(-1, keepdim=True)), out + expert(tokens + out)
            )
        return out.view_as(x)


class Capacity(Masked):
    """An expert takes the first tokens of those that chose it: which these are, all tokens decide."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        tokens = x.flatten(0, -2)
        weights, chosen = self.gate(tokens).softmax(-1).topk(1, -1)
        most = max(1, 2 * len(tokens) // len(self.experts))
        out = torch.zeros_like(tokens)
        for e, expert in enumerate(self.experts):
            top = torch.where(chosen[:, 0] == e)[0][:most]
            out = out.index_add(0, top, expert(tokens[top]) * weights[top])
        return out.view_as(x)


class Centred(Masked):
    """The router sees the mean of all tokens."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x - x.mean((0, 1)))[0]


class Balanced(Masked):
    """A loss of all tokens comes back with the result."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        out, logits = super().forward(x)
        return out + 0 * logits.softmax(-1).mean(0).square().sum(), logits.softmax(-1).mean(0).square().sum()


class Keeping(Masked):
    """The loss is left in an attribute."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        out, logits = super().forward(x)
        self.loss = logits.softmax(-1).mean(0).square().sum()
        return out


class Jittered(Masked):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x * torch.empty_like(x).uniform_(0.99, 1.01))[0]


class Writing(Masked):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x.mul_(2))[0]


class Averaging(Counting):
    """A moving average of the load is no sum over tokens."""

    def forward(self, x: Tensor) -> Tensor:
        self.bias.mul_(0.9).add_(x.detach().mean())
        return super().forward(x)


class Direct(Masked):
    """Experts' parameters are used without a call."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        best = self.gate(x).argmax(-1)
        return sum((best == e)[..., None] * F.linear(x, expert.w1.weight) @ expert.w2.weight.T  # type: ignore[return-value]
                   for e, expert in enumerate(self.experts))  # fmt: skip


class Numbered(Masked):
    """The result depends on where in the batch a token is."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x + torch.arange(x.shape[1], dtype=x.dtype)[:, None])[0]


class Checkpointed(Masked):
    """Experts run again in backward, by themselves."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        tokens = x.flatten(0, -2)
        weights, chosen = self.gate(tokens).softmax(-1).max(-1)
        out = torch.zeros_like(tokens)
        for e, expert in enumerate(self.experts):
            top = torch.where(chosen == e)[0]
            out = out.index_add(0, top, checkpoint(expert, tokens[top], use_reentrant=False) * weights[top, None])
        return out.view_as(x)


FAULTS = {
    Checkpointed: "its experts run in a checkpoint of its own",
    Chained: "what an expert is called with depends on what another returned",
    Capacity: "a token by itself gives another result",
    Centred: "a token by itself gives another result",
    Balanced: "no entry for each token in order",
    Keeping: "it keeps loss from one call to the next",
    Jittered: "it draws random numbers",
    Writing: "it writes into its arguments",
    Averaging: "what it does to its buffer bias is no sum over tokens",
    Direct: "it does not call experts.0 and the others, one by one",
    Numbered: "a token by itself gives another result",
}


@pytest.mark.parametrize("kind", FAULTS)
def test_a_block_that_ranks_could_not_run_on_their_own_tokens_is_refused(kind):
    error = refused(kind)
    assert error.code == "experts-contract" and error.module == "layers.0.moe"
    assert FAULTS[kind] in error.message, error.message


def test_a_parameter_of_another_module_has_no_gradient_inside_a_block():
    model = Looped(Masked)
    model.layers[1].moe.experts[0].forward = lambda x: x @ model.head.weight.T @ model.head.weight
    with pytest.raises(mp.PlanError) as caught:
        lowered(model, {"dp_shard": 2})
    assert caught.value.code == "experts-contract" and "not its own" in caught.value.message


def test_a_hook_inside_a_block_would_hear_two_runs():
    model = Looped(Masked)
    model.layers[0].moe.gate.register_forward_hook(lambda *_: None)
    with pytest.raises(mp.PlanError) as caught:
        lowered(model, {"dp_shard": 2})
    assert caught.value.code == "experts-contract" and "a hook listens to layers.0.moe.gate" in caught.value.message


@pytest.mark.parametrize(
    ("mesh", "sections", "said"),
    [
        ({"dp_shard": 2, "tp": 2}, {"experts": {"ep": 2, "etp": 2}}, "over etp 2"),
        ({"dp_shard": 2, "tp": 2}, {"rules": [mp.Rule("layers.*.moe.shared.w1", use="colwise")]}, "the plan splits over tp"),
        ({"dp_shard": 2, "tp": 2}, {"rules": [mp.Rule("layers.*.moe.shared", output={"tp": S(1)})]}, "the plan places what"),
    ],
)  # fmt: skip
def test_what_runs_inside_a_block_is_not_split(mesh, sections, said):
    error = refused(Counting, mesh, **sections)
    assert error.code == "experts-split" and said in error.message


def test_equal_tokens_on_a_data_axis_that_ep_borrows_are_refused():
    error = refused(Masked, place={})
    assert error.code == "experts-tokens"


def test_attention_whose_projections_are_alike_is_no_block_of_experts():
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            q, k, v, o = self.project
            return o(F.scaled_dot_product_attention(q(x), k(x), v(x)))

    assert refused(Attention, experts={"at": ["layers.*"]}).code == "experts-not-found"
    assert refused(Attention).code == "experts-contract"  # named outright, it is tried


class Packed(nn.Module):
    """Experts are rows of one parameter: no module an expert, and none that is handed a routing."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4)
        self.weight = nn.Parameter(torch.randn(4 * WIDTH, WIDTH) / 4)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        best = self.gate(tokens).softmax(-1).max(-1)
        out = torch.zeros_like(tokens)
        for e in best.indices.unique().tolist():
            at = torch.where(best.indices == e)[0]
            out = out.index_add(0, at, best.values[at, None] * (tokens[at] @ self.weight.view(4, WIDTH, WIDTH)[e]))
        return out.view_as(x)


def test_a_block_that_is_named_runs_on_each_ranks_tokens_where_every_rank_has_all_experts():
    error = refused(Packed, experts={"ep": 2})
    assert error.code == "experts-not-found"
    low = lowered(Looped(Packed), {"dp_shard": 2}, experts={"ep": 1})
    assert not [c for c in low.collectives if c.module == "layers.0.moe"]


def test_a_block_on_meta_is_tried_with_numbers_of_its_shapes():
    with torch.device("meta"):
        model = Looped(Counting)
    low = lowered(model, {"dp_shard": 2}, fsdp={"units": ["layers.*"]})
    assert {c.op for c in low.collectives if c.module == "layers.0.moe" and c.what == "operator"} == {
        "all_to_all",
        "all_reduce",
    }


def test_an_expert_that_is_no_module_of_its_own_for_every_entry():
    """One module that stands in the list twice is one expert, and the list is no list of experts."""

    class Twice(Masked):
        def __init__(self) -> None:
            super().__init__(experts=2)
            self.experts = nn.ModuleList([Expert()] * 2)

    assert refused(Twice).code == "experts-not-found"
