"""The GPT-2 against transformers' own with the same weights."""

import pytest
import torch

from meshplan.errors import PlanError
from meshplan.models.gpt import GPT, GPTConfig, gpt_tiny


def small(**options: object) -> GPT:
    torch.manual_seed(1)
    return GPT(GPTConfig(n_embd=24, n_layer=2, n_head=3, vocab_size=37, block_size=11, **options)).double().eval()


def tokens() -> torch.Tensor:
    return torch.randint(37, (2, 7), generator=torch.Generator().manual_seed(2))


def test_logits_and_loss_are_those_of_transformers():
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        n_embd=24, n_layer=2, n_head=3, vocab_size=37, n_positions=11, bos_token_id=0, eos_token_id=0, attn_pdrop=0
    )
    theirs, ours = GPT2LMHeadModel(config).double().eval(), small()
    with torch.no_grad():
        for parameter in ours.parameters():  # biases and norms too
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)), alpha=0.3)
    state = {}
    for name, value in ours.state_dict().items():
        # GPT2's Conv1D keeps its weight transposed.
        state[name if name.startswith("lm_head") else f"transformer.{name}"] = (
            value.T if name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")) else value
        )
    theirs.load_state_dict(state)
    logits = theirs(tokens()).logits
    torch.testing.assert_close(ours(tokens()), logits)
    labels = tokens().roll(2, 1)
    labels[1, 3:] = -100
    counted = labels != -100
    nll = -logits.log_softmax(-1)[counted].gather(-1, labels[counted].unsqueeze(-1)).sum() / 10
    torch.testing.assert_close(ours(tokens(), labels), nll)


def test_head_is_tied_and_residual_projections_start_smaller():
    model = gpt_tiny()
    assert model.lm_head.weight is model.wte.weight
    assert model.h[0].mlp.c_fc.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert model.h[0].mlp.c_proj.weight.std().item() == pytest.approx(0.01, rel=0.05)  # 2 layers: 0.02 / sqrt(4)
    assert not model.h[1].attn.c_attn.bias.any()


def test_a_width_that_the_heads_do_not_divide_is_refused():
    with pytest.raises(PlanError) as error:
        GPTConfig(n_embd=10, n_layer=1, n_head=3, vocab_size=5, block_size=5)
    assert error.value.code == "bad-model"


def test_dropout_acts_in_training_alone():
    model = small(dropout=0.4)
    assert torch.equal(model(tokens()), model(tokens()))
    model.train()
    assert not torch.equal(model(tokens()), model(tokens()))
