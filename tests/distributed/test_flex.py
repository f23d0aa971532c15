"""flex_attention on ranks: forward is the model's own, gradients are those of the same attention under a mask given as a tensor.

torch has no backward of flex_attention on the CPU, so that one device cannot train such a model here; ranks can, since they
compute with meshplan's own blocks.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, create_mask, flex_attention

import meshplan as mp
from tests.covering import covering

pytestmark = pytest.mark.usefixtures("pool")
S = mp.S
BATCH, HEADS, KV, DIM = 2, 8, 4, 3
WIDE = HEADS * DIM
compiled = torch.compile(flex_attention)


def mask_mod(kind: str, docs: Tensor, length: int) -> Any:
    """The masks by name; `late` reads the length that its maker saw, `heads` and `batch` differ from one to the next."""
    return {
        "causal": lambda b, h, q, kv: q >= kv,
        "window": lambda b, h, q, kv: (q >= kv) & (q - kv < 7),
        "documents": lambda b, h, q, kv: (q >= kv) & (docs[b, q] == docs[b, kv]),
        "prefix": lambda b, h, q, kv: (q >= kv) | (kv < 5),
        "late": lambda b, h, q, kv: (q >= kv) | (kv >= length - 3),
        "heads": lambda b, h, q, kv: (q >= kv) & (q - kv <= 2 * h),
        "batch": lambda b, h, q, kv: (q >= kv) & (q - kv <= 3 * b + docs[b, q]),
        "blind": lambda b, h, q, kv: (kv < q) & (q % 5 != 2),
    }[kind]


class Flexed(nn.Module):
    """Eight query heads on four key heads under a mask function. `how` says by which way attention is asked for: a `call`, a
    `compiled` one, a block mask that was `kept` since the model was built, or `dense`: a mask as a tensor."""

    def __init__(self, kind: str, how: str, length: int) -> None:
        super().__init__()
        self.kind, self.how = kind, how
        self.q, self.k, self.v = (nn.Linear(8, n * DIM, bias=False) for n in (HEADS, KV, KV))
        self.o = nn.Linear(WIDE, 8)
        self.kept = None
        if how == "kept":
            self.kept = create_block_mask(
                mask_mod(kind, torch.zeros(0), length), None, None, length, length, device="cpu"
            )

    def forward(self, x: Tensor, docs: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, DIM)).transpose(1, 2) for p in (self.q, self.k, self.v))
        n, mod = x.shape[1], mask_mod(self.kind, docs, x.shape[1])
        if self.how == "dense":
            mask = create_mask(mod, BATCH, HEADS, n, n, device="cpu")
            out = nn.functional.scaled_dot_product_attention(q, k, v, mask, scale=0.4, enable_gqa=True)
        else:
            blocks = self.kept
            if blocks is None:
                blocks = create_block_mask(mod, x.shape[0], q.shape[1], n, n, device="cpu")
            attend = compiled if self.how == "compiled" else flex_attention
            out = attend(q, k, v, block_mask=blocks, scale=0.4, enable_gqa=True)
        return self.o(out.transpose(1, 2).flatten(2)).pow(2).mean()


def built(kind: str, how: str, length: int) -> nn.Module:
    torch.manual_seed(0)
    return Flexed(kind, how, length).double()


def batch(length: int) -> dict[str, Tensor]:
    drawn = torch.Generator().manual_seed(1)
    docs = torch.rand(BATCH, length, generator=drawn).lt(0.2).cumsum(1)
    return {"x": torch.randn(BATCH, length, 8, generator=drawn, dtype=torch.float64), "docs": docs}


def plan(mesh: dict[str, int], length: int, method: str = "ring", balance: str = "zigzag") -> mp.Plan:
    place = {"dp": S(0), "cp": S(1)}
    context = {"attention": [""], "method": method, "balance": balance}
    return mp.Plan(
        mesh=mesh,
        inputs={
            "x": mp.Input(shape=(BATCH, length, 8), dtype=torch.float64, place=place),
            "docs": mp.Input(shape=(BATCH, length), dtype=torch.int64, place=place),
        },
        rules=[mp.Rule("{q,k,v}", use="colwise"), mp.Rule("o", use="rowwise")] if "tp" in mesh else [],
        context=(context | ({"inner": 2} if method == "hybrid" else {})) if "cp" in mesh else None,
    )


def one_device(kind: str, length: int, kept: bool = False) -> tuple[float, dict[str, Tensor]]:
    """The loss as torch's flex_attention has it, and the gradients under the mask as a tensor."""
    with torch.no_grad():
        loss = built(kind, "kept" if kept else "call", length)(**batch(length)).item()
    dense = built(kind, "dense", length)
    dense(**batch(length)).backward()
    return loss, {name: p.grad for name, p in dense.named_parameters()}


def _step(kind: str, how: str, length: int, given: mp.Plan) -> tuple[float, dict[str, Tensor]]:
    torch._dynamo.reset()
    model = mp.parallelize(built(kind, how, length), given)
    loss = model(**mp.shard_batch(model, batch(length)))
    loss.backward()
    return loss.item(), {n: getattr(p.grad, "full_tensor", lambda p=p: p.grad)() for n, p in model.named_parameters()}


def check(pool: Any, kind: str, how: str, length: int, given: mp.Plan) -> None:
    world = functools.reduce(int.__mul__, given.mesh.values())
    data = world // given.mesh.get("tp", 1)
    want, gradients = one_device(kind, length, how == "kept")
    ranks = pool.run(_step, kind, how, length, given, world=world)
    assert sum(loss for loss, _ in ranks) / world == pytest.approx(want, rel=1e-12), data
    for _, found in ranks:
        for name, wanted in gradients.items():
            assert torch.allclose(found[name], wanted, rtol=0, atol=1e-13), name


KINDS = ["causal", "window", "documents", "prefix", "late", "heads", "batch", "blind"]
WAYS = [("ring", "zigzag", 20), ("ring", "contiguous", 22), ("allgather", "zigzag", 20), ("ulysses", "contiguous", 26)]
MESHES = [{"tp": 2}, {"dp_shard": 2}, {"cp": 2, "tp": 2}, {"dp_shard": 2, "cp": 2}]


@pytest.mark.parametrize(("kind", "way"), covering(KINDS, WAYS, 2))
def test_every_mask_is_exact_over_a_split_sequence(pool, kind, way):
    method, balance, length = way
    check(pool, kind, "call", length, plan({"cp": 2}, length, method, balance))


@pytest.mark.parametrize(("kind", "mesh"), covering(["documents", "late", "heads", "batch"], MESHES, 2))
def test_every_mask_is_exact_beside_split_heads_and_batches(pool, kind, mesh):
    check(pool, kind, "call", 20, plan(mesh, 20))


@pytest.mark.parametrize("method", ["ring", "hybrid"])
def test_four_ranks_of_a_sequence(pool, method):
    check(pool, "documents", "call", 24, plan({"cp": 4}, 24, method))


@pytest.mark.parametrize(
    ("kind", "mesh", "method"),
    [("heads", {"cp": 2, "tp": 2}, "ulysses"), ("documents", {"cp": 4}, "hybrid"), ("batch", {"cp": 2}, "allgather")],
)
def test_what_is_sent_is_what_is_listed(kind, mesh, method):
    n = functools.reduce(int.__mul__, mesh.values())
    receipt = mp.verify(functools.partial(Flexed, kind, "call", 24), plan(mesh, 24, method), nproc=n)
    assert receipt.passed, str(receipt)
    assert "as predicted, one by one" in receipt.check("collectives").detail


@pytest.mark.parametrize(("kind", "how"), [("documents", "compiled"), ("window", "kept"), ("late", "kept")])
def test_however_a_model_holds_the_function_or_the_mask(pool, kind, how):
    check(pool, kind, how, 20, plan({"cp": 2}, 20))


def hugging_face(model_type: str, **changes: Any) -> nn.Module:
    """A tiny transformers model on flex_attention, which it calls compiled, with a score function that changes nothing."""
    config = transformers.AutoConfig.for_model(
        model_type, vocab_size=61, hidden_size=24, intermediate_size=20, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, use_cache=False, pad_token_id=None, bos_token_id=None,
        eos_token_id=None, **changes,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="flex_attention")


def hugging_face_plan(mesh: dict[str, int], names: tuple[str, ...], rows: int = 2, **sections: Any) -> mp.Plan:
    ids = mp.Input(shape=(rows, 20), dtype=torch.int64, place={"dp": S(0), "cp": S(1)})
    attention = "model.layers.*.self_attn"
    split = [
        mp.Rule(attention + ".{q_proj,k_proj,v_proj}", use="colwise"),
        mp.Rule(f"{attention}.o_proj", use="rowwise"),
    ]
    return mp.Plan(
        mesh=mesh, inputs=dict.fromkeys(names, ids), rules=split if "tp" in mesh else [],
        context={"attention": [attention], "method": "ring"}, **sections,
    )  # fmt: skip


def packed() -> dict[str, Tensor]:
    """Two documents in one row, told by positions that start again."""
    tokens = torch.randint(0, 61, (1, 20), generator=torch.Generator().manual_seed(2))
    positions = torch.cat([torch.arange(7), torch.arange(13)]).unsqueeze(0)
    return {"input_ids": tokens, "labels": tokens, "position_ids": positions}


UNITS = {"fsdp": {"units": ["model.layers.*"]}, "recompute": {"units": ["model.layers.*"], "policy": "full"}}
TRANSFORMERS = {
    "window beside tp, recomputed": (
        functools.partial(hugging_face, "mistral", sliding_window=7), None,
        hugging_face_plan({"cp": 2, "tp": 2}, ("input_ids", "labels"), **UNITS),
    ),
    "packed documents": (
        functools.partial(hugging_face, "llama"), packed,
        hugging_face_plan({"cp": 2}, ("input_ids", "labels", "position_ids"), 1),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", TRANSFORMERS)
def test_transformers_models_train_as_one_device_does(case):
    """verify's one device has its losses by flex_attention and its gradients under the mask as a tensor, and says so."""
    factory, inputs, given = TRANSFORMERS[case]
    n = functools.reduce(int.__mul__, given.mesh.values())
    sgd = functools.partial(torch.optim.SGD, lr=0.1)
    receipt = mp.verify(factory, given, nproc=n, inputs=inputs, steps=3, rtol=2e-6, optimizer=sgd)
    assert receipt.passed, str(receipt)
    assert any("gradients of flex_attention" in note for note in receipt.not_checked)


def test_a_soft_cap_is_refused_by_name_and_layer():
    factory = functools.partial(hugging_face, "gemma2", head_dim=6, sliding_window=7)
    with pytest.raises(
        mp.PlanError, match=r"score function flex_attention_forward.score_mod \[flex-attention\]"
    ) as caught:
        mp.lower(factory(), hugging_face_plan({"cp": 2}, ("input_ids", "labels")), 2)
    assert caught.value.module == "model.layers.0.self_attn"
