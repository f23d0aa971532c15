"""Offsets of packed documents: the documents that they mark off, in context attention too, and what is wrong with others."""

import pytest
import torch

from meshplan.errors import PlanError
from meshplan.ops.attention.attention import context_attention
from meshplan.ops.attention.offsets import documents_of, fault_of
from meshplan.ops.attention.sequence import Sequence
from meshplan.runtime.comm import AxisGroup


def test_documents_are_numbered_and_may_be_empty():
    offsets = torch.tensor([0, 3, 3, 4, 7, 7], dtype=torch.int32)
    assert documents_of(offsets, 7).tolist() == [0, 0, 0, 2, 3, 3, 3]


@pytest.mark.parametrize(
    ("offsets", "fault"),
    [
        ([0, 7], None),
        ([0, 0, 7, 7], None),
        ([2, 7], "begin at 2"),
        ([0, 5, 4, 7], "go from 5 down to 4"),
        ([0, 5, 9], "end at 9"),
        ([0], "end at 0"),
        ([], "are int64[0]"),
        ([[0, 7]], "are int64[1, 2]"),
    ],
)
def test_what_is_wrong_is_said(offsets, fault):
    assert fault_of(torch.tensor(offsets, dtype=torch.int64), 7) == fault


def test_other_types_are_none():
    assert fault_of(torch.tensor([0.0, 7.0]), 7) == "are float32[2]"


@pytest.mark.parametrize("method", ["ring", "allgather", "ulysses"])
def test_context_attention_takes_them_in_place_of_documents(method):
    q = torch.randn(2, 2, 11, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    alone = {"group": AxisGroup("cp", 1, 0), "sequence": Sequence(11, 1), "method": method, "is_causal": True}
    offsets = torch.tensor([0, 4, 9, 11])
    docs = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1, 1, 2, 2])
    mask = (docs[:, None] == docs) & torch.ones(11, 11, dtype=torch.bool).tril()
    want = torch.nn.functional.scaled_dot_product_attention(q, q, q, mask)
    assert torch.allclose(context_attention(q, q, q, **alone, cu_seqlens=offsets), want, rtol=0, atol=1e-14)
    with pytest.raises(PlanError, match="bad-offsets"):
        context_attention(q, q, q, **alone, cu_seqlens=offsets[:-1])
    with pytest.raises(PlanError, match="both docs and cu_seqlens"):
        context_attention(q, q, q, **alone, cu_seqlens=offsets, docs=docs)
