"""The mixture of experts as a whole: router, experts and shared expert on batches."""

import pytest
import torch

from meshplan.errors import PlanError
from meshplan.models.moe import ExpertsConfig, MoE, MoEConfig
from meshplan.models.router import RouterConfig

ROUTER = RouterConfig(n_experts=4, top_k=3, scaling=0.7)


def moe(**options) -> MoE:
    torch.manual_seed(1)
    made = MoE(MoEConfig(dim=5, expert_dim=3, router=ROUTER, **options)).double()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_()
    return made


@pytest.mark.parametrize("form", ["packed", "list"])
@pytest.mark.parametrize("shared", [0, 7])
def test_every_token_is_the_weighted_sum_of_its_experts_and_the_shared_one(form, shared):
    block, x = moe(experts=ExpertsConfig(form=form), shared_dim=shared), torch.randn(2, 6, 5).double()
    y, routing = block(x)
    assert routing.chosen.shape == (12, 3) and routing.logits.shape == (12, 4)
    for b in range(2):
        for s in range(6):
            row = x[b, s]
            index, weights, _ = block.router(row.unsqueeze(0))
            assert torch.equal(index[0], routing.chosen[b * 6 + s])
            expected = sum(w * block.experts.expert(int(e), row) for e, w in zip(index[0], weights[0], strict=True))
            if shared:
                expected = expected + block.shared_experts(row)
            torch.testing.assert_close(y[b, s], expected, rtol=1e-12, atol=1e-12)


def test_a_block_without_a_shared_expert_has_no_parameters_of_one():
    assert not [name for name, _ in moe().named_parameters() if "shared" in name]
    assert moe(shared_dim=7).shared_experts.w1.weight.shape == (7, 5)


@pytest.mark.parametrize(
    "options",
    [
        {"form": "tuple"},
        {"gate": "relu"},
        {"form": "list", "has_bias": True},
        {"form": "list", "gate": "clamped_swiglu"},
    ],
    ids=str,
)
def test_what_no_experts_can_be_is_refused(options):
    with pytest.raises(PlanError) as error:
        ExpertsConfig(**options)
    assert error.value.code == "bad-model"
