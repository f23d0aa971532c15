"""Mixtral and Qwen3-MoE against transformers' own with the same weights, and the sizes they were published with."""

import pytest
import torch

from meshplan.errors import PlanError
from meshplan.models.moe_llama import MoELlama, MoELlamaConfig, mixtral_8x7b, qwen3_30b_a3b, qwen3_235b_a22b
from meshplan.models.rotary import RopeScaling
from meshplan.models.router_losses import RouterLosses
from tests.models.against import InFloat64, check, close, give, labels, randomise, tokens

SIZES = {"dim": 20, "n_layers": 3, "n_heads": 6, "n_kv_heads": 2, "head_dim": 4, "ffn_dim": 14, "vocab_size": 37}
THEIRS = {
    "hidden_size": 20,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "vocab_size": 37,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
RULES = [(r"moe\.router\.gate", "mlp.gate"), (r"\bw(q|k|v|o)\b", r"\1_proj")]


def ours(**options):
    torch.manual_seed(1)
    return randomise(MoELlama(MoELlamaConfig(**{**SIZES, **options})))


def mixtral(**options):
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(**THEIRS, intermediate_size=14, num_local_experts=5, num_experts_per_tok=2, **options)
    return MixtralForCausalLM(config)


def test_mixtral_is_that_of_transformers():
    model, theirs = ours(n_experts=5, top_k=2, rope_theta=1e6), mixtral()
    check(model, theirs, give(model, theirs, RULES))


def test_qwen3_moe_is_that_of_transformers():
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    theirs = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            **THEIRS,
            moe_intermediate_size=14,
            num_experts=9,
            num_experts_per_tok=4,
            norm_topk_prob=True,
            rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        )
    )
    model = ours(n_experts=9, top_k=4, qk_norm=True, rope_theta=1e6, norm_eps=1e-6)
    check(model, theirs, give(model, theirs, RULES))


def test_load_balance_loss_is_that_of_transformers():
    theirs = mixtral(output_router_logits=True, router_aux_loss_coef=0.3)
    model = ours(n_experts=5, top_k=2, rope_theta=1e6, losses=RouterLosses(load_balance=0.3))
    names = give(model, theirs, RULES)
    ids = tokens()
    want = labels(ids)
    # Their labels are shifted inside.
    given = torch.cat([torch.full_like(want[:, :1], -100), want[:, :-1]], 1)
    with InFloat64():
        reference = theirs(ids, labels=given, use_cache=False)
        reference.loss.backward()
    assert reference.aux_loss > 0.3
    loss = model(ids, want)
    close(loss, reference.loss, "loss")
    loss.backward()
    for layer in range(3):
        gate = f"layers.{layer}.moe.router.gate.weight"
        close(model.get_parameter(gate).grad, theirs.get_parameter(names[gate]).grad, gate)


def test_a_list_of_experts_computes_what_packed_ones_do():
    packed, listed = ours(n_experts=5, top_k=2), ours(n_experts=5, top_k=2, expert_form="list")
    state = dict(packed.state_dict())
    for layer in range(3):
        experts = f"layers.{layer}.moe.experts"
        gate_up, down = state.pop(f"{experts}.gate_up_proj"), state.pop(f"{experts}.down_proj")
        for e in range(5):
            state[f"{experts}.{e}.w1.weight"], state[f"{experts}.{e}.w3.weight"] = gate_up[e].chunk(2)
            state[f"{experts}.{e}.w2.weight"] = down[e]
    listed.load_state_dict(state)
    ids = tokens()
    torch.testing.assert_close(listed(ids), packed(ids), rtol=1e-12, atol=1e-12)


def sizes(*, layers, dim, heads, kv, head, width, experts, vocab, qk_norm):
    """The closed formula: attention, router, experts and two norms a layer; embedding, head and a norm."""
    attention = 2 * dim * heads * head + 2 * dim * kv * head + 2 * head * qk_norm
    return layers * (attention + experts * dim + experts * 3 * dim * width + 2 * dim) + 2 * vocab * dim + dim


@pytest.mark.parametrize(
    ("factory", "published", "formula"),
    [
        (
            mixtral_8x7b,
            46_702_792_704,
            {
                "layers": 32,
                "dim": 4096,
                "heads": 32,
                "kv": 8,
                "head": 128,
                "width": 14336,
                "experts": 8,
                "vocab": 32000,
            },
        ),
        (
            qwen3_30b_a3b,
            30_532_122_624,
            {
                "layers": 48,
                "dim": 2048,
                "heads": 32,
                "kv": 4,
                "head": 128,
                "width": 768,
                "experts": 128,
                "vocab": 151936,
            },
        ),
        (
            qwen3_235b_a22b,
            235_093_634_560,
            {
                "layers": 94,
                "dim": 4096,
                "heads": 64,
                "kv": 4,
                "head": 128,
                "width": 1536,
                "experts": 128,
                "vocab": 151936,
            },
        ),
    ],
    ids=["mixtral-8x7b", "qwen3-30b-a3b", "qwen3-235b-a22b"],
)
def test_published_parameter_counts(factory, published, formula):
    with torch.device("meta"):
        model = factory()
    assert sum(p.numel() for p in model.parameters()) == published
    assert sizes(**formula, qk_norm=factory is not mixtral_8x7b) == published


@pytest.mark.parametrize(
    "options",
    [
        {"tied": True, "n_experts": 4, "top_k": 2},
        {"dropout": 0.1, "n_experts": 4, "top_k": 2},
        {"n_experts": 4, "top_k": 5},
        {"n_experts": 4, "top_k": 2, "expert_form": "dense"},
    ],
    ids=str,
)
def test_what_no_such_model_has_is_refused(options):
    with pytest.raises(PlanError) as error:
        MoELlamaConfig(**SIZES, **options)
    assert error.value.code == "bad-model"


def test_rotary_may_be_stretched():
    plain, stretched = (
        ours(n_experts=4, top_k=2),
        ours(n_experts=4, top_k=2, rope_scaling=RopeScaling(original_length=8)),
    )
    assert not torch.allclose(plain(tokens()), stretched(tokens()))
