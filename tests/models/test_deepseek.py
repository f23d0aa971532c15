"""DeepSeek-V3 against transformers' own with the same weights, and the arithmetic of its published size."""

import pytest
import torch

from meshplan.errors import PlanError
from meshplan.models.deepseek import DeepSeekConfig, DeepSeekV3, deepseek_tiny, deepseek_v3
from meshplan.models.rotary import Yarn
from meshplan.models.router_losses import RouterLosses
from tests.models.against import check, give, labels, randomise, tokens

SIZES = {
    "dim": 20,
    "n_layers": 3,
    "n_heads": 3,
    "vocab_size": 37,
    "q_rank": 14,
    "kv_rank": 10,
    "nope_dim": 6,
    "rope_dim": 4,
    "v_dim": 5,
    "n_dense": 1,
    "dense_dim": 26,
    "n_experts": 12,
    "top_k": 3,
    "expert_dim": 7,
    "shared_dim": 7,
    "n_groups": 4,
    "top_groups": 2,
}
RULES = [
    (r"moe\.router\.gate\.weight", "mlp.gate.weight"),
    (r"moe\.router\.balance_bias", "mlp.gate.e_score_correction_bias"),
    (r"wkv_a\b", "kv_a_proj_with_mqa"),
    (r"\bw(q_a|q_b|kv_b|o)\b", r"\1_proj"),
    (r"\b(q|kv)_norm\b", r"\1_a_layernorm"),
]


def ours(**options):
    torch.manual_seed(1)
    return randomise(DeepSeekV3(DeepSeekConfig(**{**SIZES, **options})))


def theirs(rope):
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    return DeepseekV3ForCausalLM(
        DeepseekV3Config(
            hidden_size=20,
            num_hidden_layers=3,
            num_attention_heads=3,
            num_key_value_heads=3,
            vocab_size=37,
            q_lora_rank=14,
            kv_lora_rank=10,
            qk_nope_head_dim=6,
            qk_rope_head_dim=4,
            v_head_dim=5,
            first_k_dense_replace=1,
            intermediate_size=26,
            n_routed_experts=12,
            num_experts_per_tok=3,
            moe_intermediate_size=7,
            n_shared_experts=1,
            n_group=4,
            topk_group=2,
            routed_scaling_factor=2.5,
            num_nextn_predict_layers=0,
            rope_parameters={"rope_theta": 10_000.0, **rope},
        )
    )


@pytest.mark.parametrize("stretched", [False, True])
def test_it_is_that_of_transformers(stretched):
    rope = {"rope_type": "default"}
    if stretched:
        rope = {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 64}
        rope |= {"beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}
    model = ours(rope_scaling=Yarn(factor=40.0, original_length=64, sharpens="scores") if stretched else None)
    other = theirs(rope)
    check(model, other, give(model, other, RULES))


def test_the_bias_that_balances_chooses_experts_and_gets_no_gradient():
    model, ids = ours(), tokens()
    router = model.layers[2].moe.router
    with torch.no_grad():
        router.balance_bias.fill_(0).index_fill_(0, torch.tensor([4, 5, 9]), 10.0)
    x = torch.randn(13, 20, dtype=torch.float64)
    assert {tuple(sorted(row)) for row in router(x).chosen.tolist()} == {(4, 5, 9)}
    model(ids, labels(ids)).backward()
    assert router.gate.weight.grad.abs().max() > 0 and not router.balance_bias.requires_grad


def test_update_biases_moves_every_router_by_the_counts_of_training():
    model, ids = deepseek_tiny().train(), torch.arange(26).view(2, 13)
    routers = [layer.moe.router for layer in model.layers if layer.moe is not None]
    model(ids, ids).backward()
    counts = [r.choices.clone() for r in routers]
    assert [c.sum().item() for c in counts] == [26 * 3] * 2
    model.eval()
    model(ids)
    assert torch.equal(routers[0].choices, counts[0])  # not in eval
    model.update_biases(0.5)
    for router, count in zip(routers, counts, strict=True):
        mean = 26 * 3 / 8
        assert torch.equal(router.balance_bias, 0.5 * torch.sign(mean - count.float()))
        assert not router.choices.any()


def test_the_loss_within_each_sequence_is_the_papers():
    model, ids = ours(losses=RouterLosses(sequence=0.7)), tokens()
    want = labels(ids)
    plain = ours()(ids, want)
    with torch.no_grad():
        got = model(ids, want) - plain
    # Equations 17 to 20 over loops, from the router's own logits.
    seen = []
    for layer in model.layers[1:]:
        layer.moe.router.gate.register_forward_hook(lambda m, args, out: seen.append(out.detach()))
    chosen = []
    for layer in model.layers[1:]:
        layer.moe.router.register_forward_hook(lambda m, args, out: chosen.append(out.chosen))
    model(ids)
    total = 0.0
    for logits, index in zip(seen, chosen, strict=True):
        scores = logits.sigmoid()
        for row in range(3):
            for e in range(12):
                times = (index[row * 11 : row * 11 + 11] == e).sum().item()
                share = scores[row * 11 : row * 11 + 11, e] / scores[row * 11 : row * 11 + 11].sum(-1)
                total += 12 / (3 * 11) * times * share.mean().item() / 3
    assert got.item() == pytest.approx(0.7 * total, rel=1e-9)


def test_published_arithmetic():
    with torch.device("meta"):
        model = deepseek_v3()
    sparse = [layer for layer in model.layers if layer.moe is not None]
    assert len(sparse) == 58
    experts = sparse[0].moe.experts
    one = 3 * 7168 * 2048
    assert one == 44_040_192
    assert experts.gate_up_proj[0].numel() + experts.down_proj[0].numel() == one
    assert sum(p.numel() for p in experts.parameters()) * 2 == 256 * one * 2 == 22_548_578_304  # bytes in bfloat16
    attention = 7168 * 1536 + 1536 + 1536 * 128 * 192 + 7168 * 576 + 512 + 512 * 128 * 256 + 128 * 128 * 7168
    a_layer = attention + 2 * 7168
    routed = 256 * one + one + 256 * 7168  # experts, the shared one, the router
    total = 61 * a_layer + 3 * 3 * 7168 * 18432 + 58 * routed + 2 * 129280 * 7168 + 7168
    # Without the multi-token prediction module, and without the 58 x 256 balancing biases, which are buffers.
    assert sum(p.numel() for p in model.parameters()) == total == 671_026_404_352
    active = total - 58 * (256 - 8) * one
    assert active / 1e9 == pytest.approx(37, abs=0.6)


@pytest.mark.parametrize(
    "sizes", [{"n_groups": 5}, {"top_groups": 5}, {"top_k": 7}, {"n_groups": 12, "top_groups": 6}], ids=str
)
def test_groups_that_do_not_fit_are_refused(sizes):
    with pytest.raises(PlanError) as error:
        DeepSeekConfig(**{**SIZES, **sizes})
    assert error.value.code == "bad-model"
