"""gpt-oss against transformers' own with the same weights, and the sizes it was published with."""

import pytest
import torch

from meshplan.errors import PlanError
from meshplan.models.gpt_oss import GptOss, GptOssConfig, gpt_oss_20b, gpt_oss_120b
from meshplan.models.rotary import Yarn
from tests.models.against import check, give, randomise

SIZES = {
    "dim": 20,
    "n_layers": 3,
    "n_heads": 6,
    "n_kv_heads": 2,
    "head_dim": 4,
    "ffn_dim": 7,
    "vocab_size": 37,
    "n_experts": 5,
    "top_k": 2,
    "window": 3,
}
RULES = [(r"moe\.router\.gate\.", "mlp.router."), (r"\bw(q|k|v|o)\b", r"\1_proj")]


def ours(**options):
    torch.manual_seed(1)
    return randomise(GptOss(GptOssConfig(**{**SIZES, **options})))


@pytest.mark.parametrize("stretched", [False, True])
def test_it_is_that_of_transformers(stretched):
    from transformers import GptOssConfig as Config
    from transformers import GptOssForCausalLM

    rope = {"rope_type": "default"}
    if stretched:
        rope = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 64}
    theirs = GptOssForCausalLM(
        Config(
            hidden_size=20,
            num_hidden_layers=3,
            num_attention_heads=6,
            num_key_value_heads=2,
            head_dim=4,
            intermediate_size=7,
            vocab_size=37,
            num_local_experts=5,
            num_experts_per_tok=2,
            sliding_window=3,
            rope_parameters={"rope_theta": 150_000.0, **rope},
        )
    )
    model = ours(rope_scaling=Yarn(factor=32.0, original_length=64, truncate=False) if stretched else None)
    names = give(model, theirs, RULES)
    with torch.no_grad():
        # Gates beyond the limit on both sides: the clamp is passed in both directions.
        for mine in (model, theirs):
            for layer in mine.layers if mine is model else mine.model.layers:
                (layer.moe if mine is model else layer.mlp).experts.gate_up_proj.mul_(9)
    check(model, theirs, names)


def test_every_other_layer_sees_a_window():
    model = ours()
    assert [layer.attention.window for layer in model.layers] == [3, None, 3]
    seen = model.layers[0].attention._seen(5, torch.device("cpu"))
    assert seen.int().tolist() == [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [0, 1, 1, 1, 0], [0, 0, 1, 1, 1]]


def test_a_heavy_sink_lets_a_head_look_at_nothing():
    attention = ours().layers[1].attention
    with torch.no_grad():
        attention.sinks.fill_(1e4)
    x, angles = torch.randn(1, 5, 20, dtype=torch.float64), torch.zeros(5, 1, 2, dtype=torch.float64)
    torch.testing.assert_close(attention(x, angles.cos(), angles), attention.wo.bias.expand(1, 5, 20))


@pytest.mark.parametrize(
    ("factory", "layers", "experts", "published"),
    [(gpt_oss_20b, 24, 32, 20_914_757_184), (gpt_oss_120b, 36, 128, 116_829_156_672)],
    ids=["20b", "120b"],
)
def test_published_parameter_counts(factory, layers, experts, published):
    with torch.device("meta"):
        model = factory()
    d = 2880
    attention = d * 64 * 80 + 64 * 80 + 64 * 64 * d + d + 64
    one = d * 2 * d + 2 * d + d * d + d
    formula = layers * (attention + experts * (one + d + 1) + 2 * d) + 2 * 201088 * d + d
    assert sum(p.numel() for p in model.parameters()) == formula == published


@pytest.mark.parametrize("options", [{"window": 0}, {"tied": True}, {"qk_norm": True}, {"dropout": 0.5}], ids=str)
def test_what_no_gpt_oss_has_is_refused(options):
    with pytest.raises(PlanError) as error:
        GptOssConfig(**{**SIZES, **options})
    assert error.value.code == "bad-model"
