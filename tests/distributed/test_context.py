"""Sequences split over cp: every method and order, alone and composed, is one device's program, collective by collective."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import meshplan as mp
from meshplan.models.llama import Llama, LlamaConfig
from meshplan.verify.aligned import align

S = mp.S
SEQ = 24
PLACE = {"dp": S(0), "cp": S(1)}


@pytest.fixture(autouse=True)
def _ranks(pool):
    """verify borrows the session's pool."""


def small_llama(**changes: Any) -> nn.Module:
    """Six query heads on two key heads, head dim 4."""
    config = {"vocab_size": 61, "dim": 24, "n_layers": 2, "n_heads": 6, "n_kv_heads": 2, "ffn_dim": 20}
    return Llama(LlamaConfig(**(config | changes)))


def rules(tp: bool, sp: bool) -> list[mp.Rule]:
    if not tp:
        return []
    end: dict[str, Any] = {"output": {"tp": S(1)}} if sp else {}
    found = [
        mp.Rule("layers.*.attention.{wq,wk,wv}", use="colwise"),
        mp.Rule("layers.*.attention.wo", use="rowwise", **end),
        mp.Rule("layers.*.feed_forward.{w1,w3}", use="colwise"),
        mp.Rule("layers.*.feed_forward.w2", use="rowwise", **end),
    ]
    return [*found, mp.Rule("tok_embeddings", **end)] if sp else found


def plan(
    mesh: dict[str, int],
    method: str,
    balance: str = "zigzag",
    sp: bool = False,
    transport: str = "send",
    **sections: Any,
) -> mp.Plan:
    context: dict[str, Any] = {
        "attention": ["layers.*.attention"], "method": method, "balance": balance, "transport": transport,
    }  # fmt: skip
    if method == "hybrid":
        context["inner"] = 2
    tokens = mp.Input(shape=(2, SEQ), dtype=torch.int64, place=PLACE)
    return mp.Plan(
        mesh=mesh,
        inputs={"tokens": tokens, "labels": tokens},
        rules=rules("tp" in mesh, sp),
        context=context,
        **sections,
    )


FSDP = {"fsdp": {"units": ["layers.*"]}}
CASES = {
    "ring": plan({"cp": 4}, "ring"),
    "ring contiguous": plan({"cp": 2}, "ring", "contiguous"),
    "ring of peers + fsdp + recompute": plan(
        {"cp": 2}, "ring", transport="peer", **FSDP, recompute={"units": ["layers.*"], "policy": "full"}
    ),
    "hybrid": plan({"cp": 4}, "hybrid"),
    "ulysses + fsdp": plan({"cp": 2}, "ulysses", **FSDP),
    "allgather x dp_shard": plan({"dp_shard": 2, "cp": 2}, "allgather", **FSDP),
    "hsdp x ring": plan({"dp_replicate": 2, "cp": 2}, "ring", **FSDP),
    "tp + sp x ring + fsdp + recompute": plan(
        {"cp": 2, "tp": 2}, "ring", sp=True, **FSDP, recompute={"units": ["layers.*"], "policy": "full"}
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_three_steps_are_those_of_one_device(case):
    given = CASES[case]
    n = functools.reduce(int.__mul__, given.mesh.values())
    receipt = mp.verify(small_llama, given, nproc=n, steps=3)
    assert receipt.passed, str(receipt)
    assert receipt.check("gradients").error < 1e-13


def hugging_face(model_type: str, attention: str = "sdpa", **changes: Any) -> nn.Module:
    """A tiny transformers model, on torch's own attention unless another is asked for."""
    config = transformers.AutoConfig.for_model(
        model_type, vocab_size=61, hidden_size=24, intermediate_size=20, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=2, max_position_embeddings=64, use_cache=False, pad_token_id=None, bos_token_id=None,
        eos_token_id=None, **changes,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)


FAMILIES = {
    "llama": functools.partial(hugging_face, "llama"),
    "qwen3": functools.partial(hugging_face, "qwen3", head_dim=6),
    "mistral": functools.partial(hugging_face, "mistral", sliding_window=7),
}
"""Plain causal, with q and k norms, and a sliding window that transformers hands over as a mask."""


def hugging_face_plan(mesh: dict[str, int], method: str) -> mp.Plan:
    ids = mp.Input(shape=(4, SEQ), dtype=torch.int64, place=PLACE)
    names = "{q_proj,k_proj,v_proj}"
    split = [
        mp.Rule(f"model.layers.*.self_attn.{names}", use="colwise"),
        mp.Rule("model.layers.*.self_attn.o_proj", use="rowwise"),
    ]
    return mp.Plan(
        mesh=mesh,
        inputs={"input_ids": ids, "labels": ids},
        rules=split if "tp" in mesh else [],
        context={"attention": ["model.layers.*.self_attn"], "method": method},
        fsdp={"units": ["model.layers.*"]},
    )


@pytest.mark.parametrize(
    ("family", "mesh", "method"),
    [
        ("llama", {"cp": 2, "tp": 2}, "ring"),
        ("qwen3", {"dp_shard": 2, "cp": 2}, "allgather"),
        ("mistral", {"cp": 2}, "ring"),
    ],
)
def test_transformers_models_take_three_steps(family, mesh, method):
    n = functools.reduce(int.__mul__, mesh.values())
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    receipt = mp.verify(FAMILIES[family], hugging_face_plan(mesh, method), nproc=n, steps=3, rtol=2e-6, optimizer=sgd)
    assert receipt.passed, str(receipt)


def test_gemma2_with_its_window_and_soft_cap_takes_three_steps():
    """Its attention is written out in products (transformers has no other that caps scores), which gather their keys without a
    section."""
    ids = mp.Input(shape=(2, SEQ), dtype=torch.int64, place=PLACE)
    given = mp.Plan(mesh={"cp": 2}, inputs={"input_ids": ids, "labels": ids}, fsdp={"units": ["model.layers.*"]})
    factory = functools.partial(hugging_face, "gemma2", "eager", head_dim=6, sliding_window=7)
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    receipt = mp.verify(factory, given, nproc=2, steps=3, rtol=2e-6, optimizer=sgd)
    assert receipt.passed, str(receipt)


class Masked(nn.Module):
    """Attention of eight heads on four key heads under a mask of its own, heads split by tp."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.q, self.k, self.v = (nn.Linear(8, n * 3, bias=False) for n in (8, 4, 4))
        self.o = nn.Linear(24, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, 3)).transpose(1, 2) for p in (self.q, self.k, self.v))
        at = torch.arange(x.shape[1])
        back = at[:, None] - at
        masks = {"window": (back >= 0) & (back < 7), "alibi": -0.1 * back.abs().to(x.dtype)}
        masks["packed"] = (back >= 0) & (at[:, None] // 9 == at // 9)
        seen = {"is_causal": True} if self.kind == "causal" else {"attn_mask": masks[self.kind]}
        out = nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True, **seen)
        return self.o(out.transpose(1, 2).flatten(2)).pow(2).mean()


@pytest.mark.parametrize("kind", ["causal", "window", "packed", "alibi"])
@pytest.mark.parametrize("method", ["ring", "ring peer", "allgather", "ulysses"])
def test_masks_are_exact_beside_tp_and_data_parallel_ranks(method, kind):
    method, _, transport = method.partition(" ")
    given = mp.Plan(
        mesh={"dp_shard": 2, "cp": 2, "tp": 2},
        inputs={"x": mp.Input(shape=(2, SEQ, 8), dtype=torch.float64, place={"dp": S(0), "cp": S(1)})},
        rules=[mp.Rule("{q,k,v}", use="colwise"), mp.Rule("o", use="rowwise")],
        context={"attention": [""], "method": method, "transport": transport or "send"},
    )
    assert align(Masked(kind).double(), given, 8).distance < 1e-11


class Positions(nn.Module):
    """Does to the sequence all that a shard in another order would get wrong, and then attends to it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(61, 8), nn.Embedding(SEQ, 8)
        self.conv = nn.Conv1d(8, 8, 3, padding=2, groups=8)
        self.qkv, self.head = nn.Linear(8, 24), nn.Linear(8, 61)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        n = tokens.shape[1]
        x = self.embed(tokens) + self.place(torch.arange(n))
        x = x + self.conv(x.mT)[..., :n].mT + x.cumsum(1) / n + torch.roll(x, 1, 1) + x.flip(1)
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        x = x + nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        logits = self.head(x)
        shifted = nn.functional.pad(tokens, (0, 1), value=-100)[:, 1:]
        return nn.functional.cross_entropy(logits.flatten(0, 1), shifted.flatten(), reduction="mean")


@pytest.mark.parametrize("balance", ["zigzag", "contiguous"])
def test_what_depends_on_positions_inside_the_model_is_exact(balance):
    given = mp.Plan(
        mesh={"cp": 3},
        inputs={"tokens": mp.Input(shape=(2, SEQ), dtype=torch.int64, place=PLACE)},
        context={"attention": [""], "method": "ring", "balance": balance},
    )
    assert align(Positions().double(), given, 3).distance < 1e-12


class Dropping(Positions):
    """Dropout of activations and of probabilities."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = nn.functional.dropout(self.embed(tokens), 0.3)
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        seen = nn.functional.scaled_dot_product_attention(q, k, v, dropout_p=0.2, is_causal=True)
        return self.head(nn.functional.dropout(seen.transpose(1, 2).flatten(2), 0.3)).pow(2).mean()


@pytest.mark.parametrize("method", ["ring", "allgather"])
def test_dropout_drops_what_one_device_drops(method):
    given = mp.Plan(
        mesh={"dp_shard": 2, "cp": 2},
        inputs={"tokens": mp.Input(shape=(4, SEQ), dtype=torch.int64, place=PLACE)},
        context={"attention": [""], "method": method},
    )
    receipt = mp.verify(Dropping, given, nproc=4)
    assert receipt.passed, str(receipt)


def test_shards_are_dealt_in_zigzag_order_and_gathered_outputs_are_in_true_order(pool):
    assert pool.run(_dealt, world=2) == [True, True]


class Doubling(nn.Module):
    """Returns what it was given, and attends to it."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q = x.unsqueeze(1)
        return 2 * x, nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True).squeeze(1)


def _dealt() -> bool:
    whole = torch.arange(2 * 8 * 3, dtype=torch.float32).view(2, 8, 3)
    given = mp.Plan(
        mesh={"cp": 2},
        inputs={"x": mp.Input(shape=(2, 8, 3), dtype=torch.float32, place={"cp": S(1)})},
        rules=[mp.Rule("", output={"0": {"cp": mp.R}})],
        context={"attention": [""], "method": "ring"},
    )
    model = mp.parallelize(Doubling(), given)
    mine = mp.shard_batch(model, {"x": whole})["x"]
    rows = [0, 1, 6, 7] if torch.distributed.get_rank() == 0 else [2, 3, 4, 5]
    doubled, seen = model(mine)
    one = Doubling()(whole)[1]
    return torch.equal(mine, whole[:, rows]) and torch.equal(doubled, 2 * whole) and torch.allclose(seen, one[:, rows])


def test_a_ring_sends_its_keys_and_values_un_repeated():
    low = mp.lower(small_llama(), plan({"cp": 4}, "ring"), 4)
    sent = [c for c in low.collectives if c.op in ("send", "recv") and c.module == "layers.0.attention"]
    # 2 sequences x 2 key heads x 6 positions a rank x head dim 4, keys and values together.
    kv = 2 * 2 * 6 * 4 * 2
    assert [(c.op, c.elements) for c in sent if c.phase == "forward"] == [("send", kv), ("recv", kv)] * 3
    assert sum(c.elements for c in sent if c.phase == "backward" and c.op == "send") == 2 * 3 * kv


def test_a_ring_of_peers_pulls_what_a_ring_sends():
    sent, pulled = (mp.lower(small_llama(), plan({"cp": 4}, "ring", transport=t), 4) for t in ("send", "peer"))

    def moved(low: Any, phase: str) -> int:
        return sum(
            c.to_json()["wire_bytes"]
            for c in low.collectives
            if c.axis == "cp" and c.phase == phase and c.what != "fsdp"
        )

    assert {c.op for c in pulled.collectives if c.module == "layers.0.attention"} == {"peer_pull"}
    for phase in ("forward", "backward"):
        assert moved(pulled, phase) == moved(sent, phase) > 0
    assert "ring zigzag by peer" in pulled.explain()


@pytest.mark.parametrize(
    ("changes", "code", "legal"),
    [
        ({"n_kv_heads": 6, "method": "ulysses", "cp": 4}, "context-heads", "cp: 1 or 2 or 3 or 6"),
        ({"method": "hybrid", "cp": 3}, "context-heads", "a divisor of 3: 1, 3"),
        ({"attention": ["layers.*.feed_forward"]}, "context-unused", "scaled_dot_product_attention"),
        ({"seq": 20, "cp": 4}, "input-not-divisible", "a multiple of 8"),
    ],
    ids=["heads", "inner", "unused", "length"],
)
def test_what_cannot_be_split_is_refused_with_what_can(changes, code, legal):
    given = plan({"cp": changes.get("cp", 2)}, changes.get("method", "ring"))
    context = given.context.to_dict() | {"attention": changes.get("attention", ["layers.*.attention"])}
    tokens = mp.Input(shape=(2, changes.get("seq", SEQ)), dtype=torch.int64, place=PLACE)
    given = mp.Plan(mesh=given.mesh, inputs={"tokens": tokens, "labels": tokens}, context=context)
    with pytest.raises(mp.PlanError) as caught:
        mp.lower(small_llama(n_kv_heads=changes.get("n_kv_heads", 2)), given, changes.get("cp", 2))
    assert caught.value.code == code and legal in str(caught.value)


@pytest.mark.parametrize(("balance", "said"), [("zigzag", []), ("contiguous", ["1.75 times the mean"])])
def test_explain_says_how_uneven_the_order_is(balance, said):
    notes = mp.lower(small_llama(), plan({"cp": 4}, "ring", balance), 4).notes
    found = [note for note in notes if "causal" in note]
    assert len(found) == len(said) and all(text in note for text, note in zip(said, found, strict=True))


def _compiled_step(method: str, units: str) -> tuple[float, float]:
    """The loss, and the largest distance of a gradient from one device's, relative to the largest gradient."""
    torch._dynamo.reset()
    section = mp.Compile(units=[units], backend="aot_eager")
    torch.manual_seed(0)
    single = small_llama().double()
    model = mp.parallelize(copy.deepcopy(single), plan({"cp": 2}, method, compile=section))
    drawn = torch.randint(0, 61, (2, SEQ), generator=torch.Generator().manual_seed(0))
    whole = {"tokens": drawn, "labels": drawn}
    single(**whole).backward()
    loss = model(**mp.shard_batch(model, whole))
    loss.backward()
    ours = dict(model.named_parameters())
    largest = max(float(p.grad.abs().max()) for p in single.parameters())
    apart = max(float((ours[n].grad - p.grad).abs().max()) for n, p in single.named_parameters())
    return loss.item(), apart / largest


@pytest.mark.parametrize(
    ("method", "units"), [("ring", "layers.*.feed_forward"), ("ulysses", "layers.*"), ("allgather", "layers.*")]
)
def test_compiled_units_are_exact(pool, method, units):
    torch.manual_seed(0)
    single = small_llama().double()
    drawn = torch.randint(0, 61, (2, SEQ), generator=torch.Generator().manual_seed(0))
    ranks = pool.run(_compiled_step, method, units, world=2)
    assert sum(loss for loss, _ in ranks) / 2 == pytest.approx(single(tokens=drawn, labels=drawn).item(), rel=1e-12)
    assert all(apart < 1e-12 for _, apart in ranks)
