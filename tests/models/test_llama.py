"""The Llama against formulas worked out by hand, and the sizes its published configurations have."""

import math

import pytest
import torch
import torch.nn.functional as F

from meshplan.errors import PlanError
from meshplan.models.llama import Llama, LlamaConfig, llama3_8b, llama31_405b, llama_tiny

SMALL = {"dim": 24, "n_layers": 2, "n_heads": 6, "n_kv_heads": 2, "ffn_dim": 20, "vocab_size": 37}


def small(**options: object) -> Llama:
    torch.manual_seed(1)
    return Llama(LlamaConfig(**SMALL, **options)).double().eval()


def tokens(batch: int = 2, seq: int = 7) -> torch.Tensor:
    return torch.randint(37, (batch, seq), generator=torch.Generator().manual_seed(2))


def by_hand(model: Llama, ids: torch.Tensor) -> torch.Tensor:
    """The same mathematics with loops over heads, explicit softmax and complex rotations."""
    w = dict(model.named_parameters())
    hd, groups = 4, 3

    def norm(x, weight):
        return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight

    seq = ids.shape[1]
    frequencies = 500_000.0 ** -(torch.arange(0, hd, 2, dtype=torch.float32) / hd)
    turn = torch.polar(torch.ones(seq, 2).double(), torch.arange(seq)[:, None] * frequencies.double())

    def rope(x):
        z = torch.complex(x[..., : hd // 2], x[..., hd // 2 :]) * turn
        return torch.cat([z.real, z.imag], -1)

    x = w["tok_embeddings.weight"][ids]
    for n in range(2):
        p = f"layers.{n}."
        h = norm(x, w[p + "attention_norm.weight"])
        heads = []
        for head in range(6):
            kv = head // groups
            q = rope(h @ w[p + "attention.wq.weight"][head * hd : (head + 1) * hd].T)
            k = rope(h @ w[p + "attention.wk.weight"][kv * hd : (kv + 1) * hd].T)
            v = h @ w[p + "attention.wv.weight"][kv * hd : (kv + 1) * hd].T
            scores = q @ k.transpose(1, 2) / math.sqrt(hd)
            scores = scores.masked_fill(torch.ones(seq, seq).triu(1).bool(), -math.inf)
            heads.append(scores.softmax(-1) @ v)
        x = x + torch.cat(heads, -1) @ w[p + "attention.wo.weight"].T
        h = norm(x, w[p + "ffn_norm.weight"])
        gate, up = h @ w[p + "feed_forward.w1.weight"].T, h @ w[p + "feed_forward.w3.weight"].T
        x = x + (gate * torch.sigmoid(gate) * up) @ w[p + "feed_forward.w2.weight"].T
    return norm(x, w["norm.weight"]) @ w["output.weight"].T


def test_logits_are_those_of_the_formulas_with_grouped_heads():
    model = small()
    with torch.no_grad():
        for parameter in model.parameters():  # norms too: weights of one would hide a missing product
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)), alpha=0.3)
        torch.testing.assert_close(model(tokens()), by_hand(model, tokens()), rtol=1e-6, atol=1e-6)


def test_loss_is_the_mean_over_counted_tokens_without_a_shift():
    model, ids = small(), tokens()
    labels = ids.roll(1, 1)
    labels[0, 2:6] = -100
    logits = model(ids)
    nll = -logits.log_softmax(-1).gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    counted = labels != -100
    torch.testing.assert_close(model(ids, labels), nll[counted].sum() / 10)


def test_explicit_positions_replace_the_count_from_zero():
    model, ids = small(), tokens()
    torch.testing.assert_close(model(ids, positions=torch.arange(7)), model(ids))
    # Rotary attention sees differences of positions only; a common offset changes nothing, a stretch does.
    shifted = torch.arange(7).expand(2, 7) + 11
    torch.testing.assert_close(model(ids, positions=shifted), model(ids), rtol=1e-4, atol=1e-6)
    assert not torch.allclose(model(ids, positions=torch.arange(7) * 3), model(ids), rtol=1e-4, atol=1e-6)


def test_head_counts_are_read_off_the_tensors():
    # Half of the heads of each projection give that half's share of the output, as a column and row split needs.
    whole, half = small(), small()
    a, b = whole.layers[0].attention, half.layers[0].attention
    with torch.no_grad():
        b.wq.weight = torch.nn.Parameter(a.wq.weight[:12])
        b.wk.weight = torch.nn.Parameter(a.wk.weight[:4])
        b.wv.weight = torch.nn.Parameter(a.wv.weight[:4])
        b.wo.weight = torch.nn.Parameter(a.wo.weight[:, :12])
        a.wo.weight[:, 12:] = 0
    x = torch.randn(2, 7, 24, dtype=torch.float64)
    cos, sin = whole.rotary(torch.arange(7))
    torch.testing.assert_close(b(x, cos, sin), a(x, cos, sin))


def test_tied_head_is_the_embedding_and_qk_norms_are_per_head():
    model = small(tied=True, qk_norm=True, norm_eps=1e-14)
    assert model.output.weight is model.tok_embeddings.weight
    assert model.layers[1].attention.q_norm.weight.shape == (4,)
    q_scaled, before = model.layers[0].attention, model(tokens())
    with torch.no_grad():
        q_scaled.wq.weight.mul_(5.0)
    torch.testing.assert_close(model(tokens()), before)  # a norm per head takes the scale out again


@pytest.mark.parametrize("sizes", [{"n_kv_heads": 4}, {"dim": 25}, {"head_dim": 5}], ids=str)
def test_sizes_that_no_attention_has_are_refused(sizes):
    with pytest.raises(PlanError) as error:
        LlamaConfig(**{**SMALL, **sizes})
    assert error.value.code == "bad-model"


def test_dropout_acts_in_training_alone():
    model = small(dropout=0.5)
    assert torch.equal(model(tokens()), model(tokens()))
    model.train()
    assert not torch.equal(model(tokens()), model(tokens()))


def test_rotary_is_not_saved_and_is_refilled():
    model = small()
    assert not [name for name in model.state_dict() if "rotary" in name]
    want = model.rotary.inv_freq.clone()
    model.rotary.inv_freq.fill_(float("nan"))
    model.rotary.reset_parameters()
    torch.testing.assert_close(model.rotary.inv_freq, want, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("factory", "parameters"), [(llama3_8b, 8_030_261_248), (llama31_405b, 405_853_388_800)], ids=["8b", "405b"]
)
def test_published_parameter_counts(factory, parameters):
    with torch.device("meta"):
        model = factory()
    assert sum(p.numel() for p in model.parameters()) == parameters


def test_tiny_model_learns():
    torch.manual_seed(0)
    model, ids = llama_tiny(), torch.arange(48).view(2, 24)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    first = model(ids, ids.roll(-1, 1))
    assert first.item() == pytest.approx(math.log(256), abs=0.2)
    for _ in range(10):
        F.cross_entropy(model(ids).flatten(0, 1), ids.roll(-1, 1).flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert model(ids, ids.roll(-1, 1)).item() < 0.6 * first.item()
