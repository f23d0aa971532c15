"""What is common to the sparse models: loss, positions, initial values, meta, learning, and half precision."""

import math

import pytest
import torch
import torch.nn.functional as F

import meshplan as mp
from meshplan.models.deepseek import deepseek_tiny
from meshplan.models.gpt_oss import gpt_oss_tiny
from meshplan.models.moe_llama import mixtral_tiny, qwen3_moe_tiny
from meshplan.runtime.meta import materialise

TINY = [deepseek_tiny, gpt_oss_tiny, mixtral_tiny, qwen3_moe_tiny]


def ids() -> torch.Tensor:
    return torch.arange(42).view(2, 21)


@pytest.mark.parametrize("factory", TINY)
def test_tiny_models_are_tiny_and_learn(factory):
    torch.manual_seed(0)
    model = factory()
    assert 50_000 < sum(p.numel() for p in model.parameters()) < 150_000
    labels = ids().roll(-1, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    first = model(ids(), labels)
    assert first.item() == pytest.approx(math.log(256), abs=0.2)
    for _ in range(10):
        F.cross_entropy(model(ids()).flatten(0, 1), labels.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert model(ids(), labels).item() < 0.6 * first.item()


@pytest.mark.parametrize("factory", TINY)
def test_loss_is_the_mean_over_counted_tokens_without_a_shift(factory):
    torch.manual_seed(0)
    model, labels = factory().double(), ids().roll(1, 1)
    labels[0, 2:9] = -100
    nll = -model(ids()).log_softmax(-1).gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(model(ids(), labels), nll[labels != -100].sum() / 35)


@pytest.mark.parametrize("factory", TINY)
def test_explicit_positions_replace_the_count_from_zero(factory):
    torch.manual_seed(0)
    model = factory().double()
    for layer in model.layers:  # positions should weigh something at initial values
        torch.nn.init.normal_(layer.attention.wo.weight)
    torch.testing.assert_close(model(ids(), positions=torch.arange(21)), model(ids()))
    assert not torch.allclose(model(ids(), positions=torch.arange(21) * 3), model(ids()), rtol=1e-6)


@pytest.mark.parametrize("factory", TINY)
def test_a_token_does_not_see_those_after_it(factory):
    torch.manual_seed(0)
    model, other = factory().double(), ids().clone()
    other[:, 13:] += 100
    torch.testing.assert_close(model(other)[:, :13], model(ids())[:, :13])


@pytest.mark.parametrize("factory", TINY)
def test_built_on_meta_every_value_has_an_initialiser(factory):
    model = materialise(mp.meta(factory), "cpu")
    mp.init_weights(model, seed=0)
    for name, value in model.state_dict().items():
        assert value.isfinite().all(), name
        if name.endswith(("gate_up_proj", "down_proj", "wo.weight", "output.weight", "router.gate.weight")):
            assert value.std().item() == pytest.approx(0.02, rel=0.2), name
        if name.endswith(("norm.weight", "_norm.weight")):
            assert (value == 1).all(), name
        if name.endswith(("bias", "sinks")):
            assert not value.any(), name


@pytest.mark.parametrize("factory", TINY)
def test_bfloat16_runs_forward_and_backward(factory):
    torch.manual_seed(0)
    model = factory().bfloat16()
    loss = model(ids(), ids())
    loss.backward()
    assert loss.dtype == torch.bfloat16
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
