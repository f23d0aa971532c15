"""Documents given by offsets (`cu_seqlens`), an input of the model: exact in every order, refused together where wrong."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import meshplan as mp
from tests.covering import covering

pytestmark = pytest.mark.usefixtures("pool")
S = mp.S


class Packed(nn.Module):
    """Causal attention within documents that offsets mark off, under a mask given as a tensor or as a function."""

    def __init__(self, flex: bool = False) -> None:
        super().__init__()
        self.flex, self.embed = flex, nn.Embedding(31, 8)
        self.q, self.k, self.v = (nn.Linear(8, 12, bias=False) for _ in range(3))
        self.o = nn.Linear(12, 31)

    def forward(self, tokens: Tensor, labels: Tensor, cu_seqlens: Tensor) -> Tensor:
        x, n = self.embed(tokens), tokens.shape[1]
        q, k, v = (p(x).unflatten(-1, (4, 3)).transpose(1, 2) for p in (self.q, self.k, self.v))
        at = torch.arange(n)
        docs = torch.searchsorted(cu_seqlens[1:].contiguous(), at, right=True)
        if self.flex:

            def sees(b, h, q, kv):
                return (docs[q] == docs[kv]) & (q >= kv)

            blocks = create_block_mask(sees, None, None, n, n, device="cpu")
            out = flex_attention(q, k, v, block_mask=blocks)
        else:
            seen = (docs[:, None] == docs) & (at[:, None] >= at)
            out = F.scaled_dot_product_attention(q, k, v, seen)
        logits = self.o(out.transpose(1, 2).flatten(2))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def plan(
    mesh: dict[str, int], length: int, method: str = "ring", balance: str = "zigzag", documents: int = 5
) -> mp.Plan:
    ids = mp.Input(shape=(2, length), dtype=torch.int64, place={"dp": S(0), "cp": S(1)})
    offsets = mp.Input(shape=(documents + 1,), dtype=torch.int32, offsets="tokens")
    split = [mp.Rule("{q,k,v}", use="colwise"), mp.Rule("o", use="rowwise")]
    return mp.Plan(
        mesh=mesh, inputs={"tokens": ids, "labels": ids, "cu_seqlens": offsets}, rules=split if "tp" in mesh else [],
        context={"attention": [""], "method": method, "balance": balance},
    )  # fmt: skip


WAYS = [
    ({"cp": 2}, 20, "ring", "zigzag"),
    ({"cp": 2}, 22, "ring", "contiguous"),
    ({"cp": 2}, 20, "allgather", "zigzag"),
    ({"cp": 2}, 26, "ulysses", "contiguous"),
    ({"dp_shard": 2, "cp": 2}, 22, "allgather", "contiguous"),
    ({"cp": 2, "tp": 2}, 20, "ring", "zigzag"),
]


@pytest.mark.parametrize(("way", "flex"), covering(WAYS, [False, True]))
def test_documents_of_unequal_lengths_are_exact(way, flex):
    mesh, length, method, balance = way
    """verify draws the offsets: five documents of which some end inside a rank's stretch."""
    n = functools.reduce(int.__mul__, mesh.values())
    receipt = mp.verify(functools.partial(Packed, flex), plan(mesh, length, method, balance), nproc=n)
    assert receipt.passed, str(receipt)
    assert receipt.check("gradients").error < 1e-13
    assert receipt.inputs["cu_seqlens"] == "int32[6]"


GOOD = [0, 3, 3, 12, 13, 20]
WRONG = {
    "begin": ([1, 3, 5, 12, 13, 20], "begin at 1"),
    "descend": ([0, 3, 12, 5, 13, 20], "go from 12 down to 5"),
    "end early": ([0, 3, 5, 12, 13, 19], "end at 19"),
    "end at a rank's part": ([0, 1, 2, 3, 4, 10], "end at 10"),
}


def _said(offsets: dict[int, list[int]]) -> list[tuple[str, str, bool]]:
    """What each rank hears of the offsets that it hands over (key -1: the others'), and after that of good ones."""
    torch.manual_seed(0)
    model = mp.parallelize(Packed().double(), plan({"cp": 2}, 20))
    tokens = torch.arange(40).view(2, 20) % 31
    found = []
    for given in (offsets.get(dist.get_rank(), offsets[-1]), GOOD):
        whole = {"tokens": tokens, "labels": tokens, "cu_seqlens": torch.tensor(given, dtype=torch.int32)}
        try:
            model(**mp.shard_batch(model, whole)).backward()
            found.append(("", "", False))
        except mp.PlanError as error:
            found.append((error.code, error.message, error.where is not None))
    return found


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_offsets_are_refused_on_every_rank_and_the_next_call_runs(pool, wrong):
    given, said = WRONG[wrong]
    for rank in pool.run(_said, {-1: given}, world=2):
        assert rank == [("bad-offsets", f"the offsets cu_seqlens of a sequence of 20 {said}", True), ("", "", False)]


def test_ranks_that_were_given_different_offsets_are_refused_together(pool):
    for other in ([0, 3, 5, 12, 13, 20], WRONG["begin"][0]):
        for rank in pool.run(_said, {-1: GOOD, 1: other}, world=2):
            assert [code for code, _, _ in rank] == ["inputs-differ", ""]
            assert str(other) in rank[0][1]


def test_offsets_that_a_models_attention_does_not_look_at_are_refused():
    """transformers hands `cu_seq_lens_q` on to kernels of varying length alone: torch's own attention would see one document."""
    config = transformers.LlamaConfig(
        vocab_size=31, hidden_size=12, intermediate_size=10, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, use_cache=False, pad_token_id=None, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    ids: Any = mp.Input(shape=(1, 20), dtype=torch.int64, place={"cp": S(1)})
    offsets = mp.Input(shape=(4,), dtype=torch.int32, offsets="input_ids")
    given = mp.Plan(
        mesh={"cp": 2}, inputs={"input_ids": ids, "labels": ids, "cu_seq_lens_q": offsets},
        context={"attention": ["model.layers.*.self_attn"], "method": "ring"},
    )  # fmt: skip
    with pytest.raises(mp.PlanError) as caught:
        mp.lower(model, given, 2)
    assert caught.value.code == "ignored-input" and "cu_seq_lens_q" in caught.value.message
