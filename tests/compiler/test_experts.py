"""Experts in the compiler: what is found, what is asked of it, and what the lowered program says of them."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshplan as mp
from meshplan.compiler.fsdp_cuts import fsdp_cuts
from meshplan.models.deepseek import DeepSeekV3, deepseek_tiny, deepseek_v3
from meshplan.plan.placements import Partial, Shard
from tests.distributed.moe import Experts, Listed, Moe

S = mp.S


def lowered(model: nn.Module, mesh: dict[str, int], experts: dict[str, Any], **sections: Any) -> Any:
    tokens = mp.Input(shape=(8, 6), dtype=torch.int64, place={"dp": S(0)} if "tp" not in mesh or len(mesh) > 1 else {})
    plan = mp.Plan(mesh=mesh, inputs={"tokens": tokens, "labels": tokens}, experts=experts, **sections)
    world = 1
    for n in mesh.values():
        world *= n
    return mp.lower(model, plan, world)


def test_deepseek_v3_on_eight_ranks_counted_from_its_modules():
    """Published sizes (2412.19437, section 4.2): 256 experts of 3 matrices of 7168 x 2048 in each of 58 layers."""
    with torch.device("meta"):
        whole = deepseek_v3().to(torch.bfloat16)
        config = replace(whole.config, n_layers=2, n_dense=1, vocab_size=64)
        two = DeepSeekV3(config).to(torch.bfloat16)
    assert sum(name.endswith("moe.experts") for name, _ in whole.named_modules()) == 58
    tokens = mp.Input(shape=(8, 16), dtype=torch.int64, place={"dp": S(0)})
    plan = mp.Plan(
        mesh={"dp_shard": 8}, inputs={"tokens": tokens, "labels": tokens}, fsdp={"units": ["layers.*"]},
        experts={"at": ["layers.*.moe.experts"], "ep": 8},
    )  # fmt: skip
    low = mp.lower(two, plan, 8, check="off")  # with values it takes a minute: an expert has 44 million parameters
    (module,) = low.to_json()["experts"]["modules"]
    assert module["experts"] == 256 and module["held"] == 32
    one = 3 * 7168 * 2048
    assert round(one / 1e6, 1) == 44.0 and round(one * 2 / 1e6) == 88
    assert module["bytes"] == 256 * one * 2 and round(module["bytes"] / 1e9, 1) == 22.5
    assert module["held_bytes"] == 32 * one * 2 and round(module["held_bytes"] / 1e9, 1) == 2.8
    said = " ".join(low.explain().split())
    assert "experts: expert_dp 1 x ep 8 x etp 1, ep borrows dp_shard 8, dispatch auto" in said
    assert "1 module of 256 experts, 21 GiB each: a rank holds 32 of them, 2.6 GiB of the parameters" in said


def test_packed_parameters_are_split_over_ep_and_copies_share_their_gradient():
    low = lowered(Moe(), {"dp_shard": 4}, {"at": ["layers.*"], "ep": 2})
    up = low.core.params["layers.0.experts.up"]
    assert up.routed and up.shards == (("dp_shard_ep", S(0)),) and up.reduce == ("dp_shard_expert_dp",)
    assert not low.core.params["layers.0.router.weight"].routed


def test_how_etp_splits_each_parameter_is_found_by_trying():
    low = lowered(Moe(), {"dp_shard": 2, "tp": 2}, {"at": ["layers.*"], "ep": 2, "etp": 2})
    found = dict(low.core.experts.modules["layers.1.experts"].inner)
    # Gate beside up: each is split by itself. The bias of the last product is added once.
    assert found == {"up": Shard(2, (10, 10)), "down": Shard(1), "bias": Partial()}


def test_attributes_that_count_experts_are_told_apart_from_others_of_the_same_value():
    class Confused(Experts):
        def __init__(self, experts: int, width: int, inner: int) -> None:
            super().__init__(experts, width, inner)
            self.halves = 8  # as many as experts, and something else

        def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
            return super().forward(x, chosen, weights) * (self.halves / 8)

    low = lowered(Moe(Confused), {"dp_shard": 2}, {"at": ["layers.*"], "ep": 2})
    assert low.core.experts.modules["layers.0.experts"].sizes == ("number",)


def test_bytes_of_routed_exchanges_are_said_to_be_those_of_an_even_routing():
    low = lowered(Moe(), {"dp_shard": 2}, {"at": ["layers.*"], "ep": 2})
    routed = [c for c in low.to_json()["collectives"] if c.get("routed")]
    assert {c["op"] for c in routed} == {"all_to_all"}
    assert any("even routing" in note for note in low.notes)


class Mixing(Experts):
    """A row sees the others."""

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        return super().forward(x - x.mean(0), chosen, weights)


class Squared(Experts):
    """Not linear in the weights."""

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        return super().forward(x, chosen, weights.square())


class Dropping(Experts):
    """Draws random numbers."""

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        return super().forward(torch.dropout(x, 0.5, True), chosen, weights)


class Neighbour(Experts):
    """Expert e computes with the weights of the next one, which may be on another rank."""

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        return super().forward(x, (chosen + 1) % self.number, weights)


@pytest.mark.parametrize("kind", [Mixing, Squared, Dropping, Neighbour])
def test_what_is_no_weighted_sum_of_experts_is_refused(kind):
    with pytest.raises(mp.PlanError) as caught:
        lowered(Moe(kind), {"dp_shard": 2}, {"at": ["layers.*"], "ep": 2})
    assert caught.value.code == "experts-contract"


def test_each_kind_of_experts_is_tried_also_where_only_something_inside_differs():
    class Inner(Experts):
        def __init__(self, experts: int, width: int, inner: int) -> None:
            super().__init__(experts, width, inner)
            self.drop = nn.Dropout(0.0)

        def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
            return super().forward(self.drop(x), chosen, weights)

    model = Moe(Inner)
    lowered(model, {"dp_shard": 2}, {"at": ["layers.*"], "ep": 2})
    model.layers[1].experts.drop.p = 0.5
    with pytest.raises(mp.PlanError) as caught:
        lowered(model, {"dp_shard": 2}, {"at": ["layers.*"], "ep": 2})
    assert caught.value.code == "experts-contract" and caught.value.module == "layers.1.experts"


@pytest.mark.parametrize(
    ("experts", "code", "legal"),
    [
        ({"at": ["layers.*"], "ep": 3}, "expert-fold", "ep: 1, 2, 4, 8"),
        ({"at": ["layers.*.shared"], "ep": 2}, "experts-not-found", "the MoE block"),
        ({"at": ["layers.*"], "ep": 2, "etp": 4}, "expert-fold", "etp: 1, 2"),
    ],
)
def test_folds_and_places_that_cannot_be_are_refused(experts, code, legal):
    with pytest.raises(mp.PlanError) as caught:
        lowered(Moe(), {"dp_shard": 4, "tp": 2}, experts)
    assert caught.value.code == code and str(caught.value.legal).startswith(legal)


def test_experts_in_a_compiled_unit_are_refused_and_others_are_not():
    compiled = {"units": ["layers.*"], "backend": "eager"}
    with pytest.raises(mp.PlanError) as caught:
        lowered(Moe(), {"dp_shard": 2}, {"at": ["layers.*"], "ep": 2}, compile=compiled)
    assert caught.value.code == "experts-inside-compile"
    lowered(Moe(), {"dp_shard": 2}, {"at": ["layers.*"], "ep": 2}, compile={**compiled, "units": ["layers.*.shared"]})


def test_a_number_of_experts_that_ep_does_not_divide():
    with pytest.raises(mp.PlanError) as caught:
        lowered(Moe(experts=6), {"dp_shard": 4}, {"at": ["layers.*"], "ep": 4})
    assert caught.value.code == "experts-split" and caught.value.legal == "ep: 1, 2, 3, 6"


def test_a_rule_for_a_parameter_of_experts_is_refused():
    with pytest.raises(mp.PlanError) as caught:
        lowered(
            Moe(), {"dp_shard": 2, "tp": 2}, {"at": ["layers.*"], "ep": 2},
            rules=[mp.Rule("layers.*.experts", params={"up": {"tp": S(2)}})],
        )  # fmt: skip
    assert caught.value.code == "experts-split"


def test_a_model_that_loops_over_experts_itself_returns_nothing_along_its_tokens():
    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.router = nn.Embedding(37, 12), nn.Linear(12, 4)
            self.each = nn.ModuleList(nn.Linear(12, 12) for _ in range(4))

        def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
            x = self.embed(tokens).flatten(0, 1)
            best = self.router(x).argmax(-1)
            return sum(self.each[e](x[best == e]).sum() for e in range(4))  # type: ignore[return-value]

    with pytest.raises(mp.PlanError) as caught:
        lowered(Loop(), {"dp_shard": 2}, {"at": [""], "ep": 2})
    assert caught.value.code == "experts-contract" and "is called with" in caught.value.message


def test_a_module_per_expert_keeps_its_parameters_on_every_rank():
    low = lowered(Moe(Listed), {"dp_shard": 2}, {"at": ["layers.*"], "ep": 2}, fsdp={"units": ["layers.*"]})
    units = low.to_json()["fsdp_units"]
    assert not low.core.params["layers.0.experts.each.3.0.weight"].routed
    assert not any(re.search("experts", u["module"]) for u in units)


def test_a_derived_plan_finds_the_experts():
    tokens = torch.zeros((4, 6), dtype=torch.int64)
    plan = mp.auto_plan(deepseek_tiny(), {"dp_shard": 2}, {"tokens": tokens, "labels": tokens}, experts={"ep": 2})
    assert plan.experts is not None and plan.experts.at == ("layers.*.moe.experts",) and plan.experts.ep == 2


def test_fsdp_cuts_experts_along_the_dim_that_the_plan_asks_for():
    asked = {"units": ["layers.*"], "shard_dims": {"layers.*.experts.up": 1}}
    low = lowered(Moe(), {"dp_shard": 4}, {"at": ["layers.*"], "ep": 2}, fsdp=asked)
    cuts = fsdp_cuts(low.core)
    assert (cuts["layers.0.experts.up"], cuts["layers.0.experts.down"]) == (1, 0)
    odd = {"units": ["layers.*"], "shard_dims": {"layers.*.experts.down": 1}}
    with pytest.raises(mp.PlanError) as caught:
        lowered(Moe(experts=6), {"dp_shard": 8}, {"at": ["layers.*"], "ep": 2}, fsdp=odd)
    assert caught.value.code == "fsdp-no-dim" and "4 ranks" in caught.value.message


def test_modules_that_differ_in_a_function_are_tried_apart():
    class Acting(Experts):
        def __init__(self, experts: int, width: int, inner: int) -> None:
            super().__init__(experts, width, inner)
            self.last = torch.clone

        def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
            return self.last(super().forward(x, chosen, weights))

    lowered(Moe(Acting), {"dp_shard": 2}, {"at": ["layers.*"], "ep": 2})
    model = Moe(Acting)
    for layer in model.layers:
        layer.experts.last = torch.cos
    with pytest.raises(mp.PlanError) as caught:
        lowered(model, {"dp_shard": 2}, {"at": ["layers.*"], "ep": 2})
    assert caught.value.code == "experts-contract"


def test_modules_that_differ_in_what_a_config_says_are_tried_apart():
    class Config:
        def __init__(self, power: float) -> None:
            self.power = power

    class Configured(Experts):
        def __init__(self, experts: int, width: int, inner: int) -> None:
            super().__init__(experts, width, inner)
            self.config = Config(1.0)

        def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
            return super().forward(x, chosen, weights**self.config.power)

    model = Moe(Configured)
    lowered(model, {"dp_shard": 2}, {"at": ["layers.*"], "ep": 2})
    for layer in model.layers:
        layer.experts.config.power = 2.0
    with pytest.raises(mp.PlanError) as caught:
        lowered(model, {"dp_shard": 2}, {"at": ["layers.*"], "ep": 2})
    assert caught.value.code == "experts-contract"
