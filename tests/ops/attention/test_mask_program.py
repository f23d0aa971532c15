"""A mask function read as a program: what it captured, what it depends on, and the same values as torch makes of it."""

from __future__ import annotations

import functools

import pytest
import torch
from torch.nn.attention.flex_attention import and_masks, create_mask, noop_mask, or_masks

from meshplan.errors import PlanError
from meshplan.ops.attention.mask_program import is_identity, read_mask

CPU = torch.device("cpu")
DOCS = torch.tensor([[0, 0, 1, 1, 1, 2, 2], [0, 1, 1, 1, 1, 1, 1], [5, 5, 5, 3, 3, 3, 3]])
LENGTHS = torch.tensor([7, 4, 5])


def causal(b, h, q, kv):
    return q >= kv


def documents(b, h, q, kv):
    return DOCS[b, q] == DOCS[b][kv]


def padded(b, h, q, kv):
    return kv < LENGTHS[b]


def by_head(b, h, q, kv):
    return (q - kv).abs() <= 2 * h + DOCS[1, kv]


def far(reach, b, h, q, kv):
    near = torch.where(q > 3, kv < reach, torch.zeros_like(q, dtype=torch.bool))
    return near | (kv == DOCS.max())


MASKS = {
    "causal": causal,
    "documents": documents,
    "padded": padded,
    "by head": by_head,
    "partial": functools.partial(far, 2),
    "and": and_masks(causal, documents),
    "or": or_masks(causal, padded),
    "all": noop_mask,
    "batch": lambda b, h, q, kv: (q + b) % 3 != kv % 2,
}


@pytest.mark.parametrize("name", MASKS)
def test_a_program_gives_any_rank_the_part_of_the_mask_that_torch_makes(name):
    program, captured = read_mask(MASKS[name], CPU)
    whole = create_mask(MASKS[name], 3, 4, 7, 7, device="cpu")
    batch, heads, rows = torch.arange(3), torch.tensor([3, 1]), torch.tensor([6, 0, 3])
    got = program.evaluate(captured, batch, heads, rows, torch.arange(7))
    assert torch.equal(got.expand(3, 2, 3, 7), whole[:, heads][:, :, rows])
    assert got.shape[0] == (3 if program.per_batch else 1) and got.shape[1] == (2 if program.per_head else 1)


@pytest.mark.parametrize(
    ("name", "per_batch", "counts_batch", "per_head", "rows"),
    [
        ("causal", False, False, False, set()),
        ("documents", True, False, False, {0}),
        ("padded", True, False, False, {0}),
        ("by head", False, False, True, set()),
        ("partial", False, False, False, set()),
        ("and", True, False, False, {0}),
        ("all", False, False, False, set()),
        ("batch", True, True, False, set()),
    ],
)
def test_what_a_mask_depends_on_is_told(name, per_batch, counts_batch, per_head, rows):
    program, _ = read_mask(MASKS[name], CPU)
    assert (program.per_batch, program.counts_batch, program.per_head) == (per_batch, counts_batch, per_head)
    assert program.batch_rows == rows


def test_a_tensor_that_is_also_used_whole_has_no_rows_of_ones_own():
    program, _ = read_mask(lambda b, h, q, kv: DOCS[b, q] == DOCS[0, kv], CPU)
    assert program.batch_rows == frozenset() and program.counts_batch


def test_programs_are_equal_if_they_compute_the_same_of_what_they_are_handed():
    def window(size, docs):
        return lambda b, h, q, kv: (q - kv < size) & (docs[b, q] == docs[b, kv])

    one, other, wider = (read_mask(window(*a), CPU) for a in ((3, DOCS), (3, DOCS + 1), (4, DOCS)))
    assert one[0] == other[0] and one[0] != wider[0]
    assert one[1][0] is DOCS and len(one[1]) == 1


def test_captured_tensors_are_arguments():
    program, _ = read_mask(documents, CPU)
    other = (DOCS * 7) % 4
    at = [torch.arange(n) for n in (3, 1, 7, 7)]
    want = create_mask(lambda b, h, q, kv: other[b, q] == other[b, kv], 3, 1, 7, 7, device="cpu")
    assert torch.equal(program.evaluate([other], *at), want)


def _writes(b, h, q, kv):
    return (q >= kv).logical_not_()


def _reads(b, h, q, kv):
    return q >= kv if q.item() >= 0 else q < kv


@pytest.mark.parametrize(
    ("mask", "said"),
    [
        (lambda b, h, q, kv: q - kv, "returns torch.int64[]"),
        (lambda b, h, q, kv: True, "returns bool"),
        (lambda b, h, q, kv: DOCS[b] == q, "returns torch.bool[7]"),
        (_writes, "writes (logical_not_)"),
    ],
)
def test_what_is_no_mask_function_is_refused(mask, said):
    with pytest.raises(PlanError, match="flex-attention") as caught:
        read_mask(mask, CPU)
    assert said in caught.value.message


def test_a_function_that_reads_a_value_is_refused_while_a_program_is_read():
    from meshplan import compat

    with compat.fake_tensor_mode(), pytest.raises(PlanError, match="_reads, which reads a value"):
        read_mask(_reads, CPU)


def test_a_score_function_is_the_identity_if_it_hands_back_the_score():
    like = torch.ones(1)
    assert is_identity(lambda score, b, h, q, kv: score, like)
    assert not is_identity(lambda score, b, h, q, kv: score * 1.0, like)
