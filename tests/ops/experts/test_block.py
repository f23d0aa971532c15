"""How results of a block lie along its tokens, and which of their dims a split of the tokens splits."""

from __future__ import annotations

import pytest
import torch

from meshplan.errors import PlanError
from meshplan.ops.experts.block import Made, tokens_of

LIKE = Made(((0, 1), (1, 2), 12), None, True, True)  # [B, S, H]
FLAT = Made(((0, 2), 8), None, True, False)  # [B S, E]
TURNED = Made((3, (0, 1), (1, 2)), torch.int64, False, False)  # [k, B, S]


def test_shapes_follow_the_tokens():
    assert [m.shape((4, 6)) for m in (LIKE, FLAT, TURNED)] == [(4, 6, 12), (24, 8), (3, 4, 6)]
    assert [m.apart((4, 6)) for m in (LIKE, FLAT, TURNED)] == [(4, 6, 12), (4, 6, 8), (3, 4, 6)]


def test_each_dim_of_the_tokens_has_a_place():
    assert [[m.place(d) for d in (0, 1)] for m in (LIKE, FLAT, TURNED)] == [[0, 1], [0, 1], [1, 2]]


@pytest.mark.parametrize(("made", "batch", "sequence"), [(LIKE, 0, 1), (FLAT, 0, None), (TURNED, 1, 2)])
def test_shards_of_tokens_are_stretches_of_results_or_they_are_not(made, batch, sequence):
    assert made.split(0, even=True) == batch and made.split(1, even=True) == sequence


def test_an_uneven_batch_is_no_even_stretch_of_a_flattened_result():
    """3 rows on 2 ranks are 2 and 1; of 3 x 5 flattened, torch.chunk gives 8 and 7."""
    assert FLAT.split(0, even=False) is None and LIKE.split(0, even=False) == 0
    assert [len(c) for c in torch.arange(15).chunk(2)] != [5 * len(c) for c in torch.arange(3).chunk(2)]


def test_tokens_are_the_first_floating_tensor_and_others_begin_as_they_do():
    x = torch.zeros(2, 3, 4)
    assert tokens_of([torch.zeros(2, 3, dtype=torch.bool), None, x], "") is x
    for others in ([torch.zeros(3, 2)], [torch.zeros(3)]):
        with pytest.raises(PlanError) as caught:
            tokens_of([x, *others], "moe")
        assert caught.value.code == "experts-contract" and "moe is taken for a block" in caught.value.message
