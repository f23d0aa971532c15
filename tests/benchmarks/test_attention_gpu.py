"""The benchmark of the attention kernels: it says that nothing was measured without a GPU, and its checks can fail."""

import pytest
import torch

from benchmarks import attention_gpu
from benchmarks.attention_gpu import SPANS, checks, gathered, page, shards, zigzag
from meshplan.kernels.attention import block
from meshplan.ops.attention.block import Span
from tests.benchmarks.scripts import report_of
from tests.kernels.interpreted import interpreted


@pytest.mark.skipif(torch.cuda.is_available(), reason="says that there is no GPU")
def test_without_a_gpu_nothing_is_measured_and_that_is_said():
    assert report_of("attention_gpu") == {"measured": False, "why": "no CUDA device was at hand."}
    assert "**Not measured**: no GPU" in page("no GPU", None)


SMALL = {"lengths": (18, 13), "dims": [(16, 16)], "dtypes": (torch.float32,), "heads": (2, 1)}


@interpreted
def test_the_checks_pass_on_right_kernels_the_ring_among_them():
    rows = list(checks("cpu", **SMALL))
    rings = [f"{ring}, 4 ranks, {mask}" for mask in ("full", "causal") for ring in ("ring", "ring of peers")]
    assert [row["mask"] for row in rows] == [*SPANS, *rings]
    assert all(row["right"] for row in rows), rows


@interpreted
def test_a_kernel_that_ignores_a_bound_fails_the_checks():
    with pytest.MonkeyPatch.context() as patch:
        forward = block.forward
        patch.setattr(block, "forward", lambda q, k, v, span, *rest: forward(q, k, v, Span(0, 0), *rest))
        right = {row["mask"]: row["right"] for row in checks("cpu", **SMALL)}
    assert right["full"] and right["ring, 4 ranks, full"] and right["ring of peers, 4 ranks, full"]
    wrong = ("causal", "window", "keys after", "documents", "ring, 4 ranks, causal", "ring of peers, 4 ranks, causal")
    assert not any(right[mask] for mask in wrong)


def test_parts_of_a_zigzag_ring_are_what_each_rank_sees():
    ranks, chunk = 4, 3
    positions = shards(torch.arange(2 * ranks * chunk).view(1, 1, -1, 1), ranks)
    assert gathered(positions).flatten().tolist() == list(range(24))
    for rank in range(ranks):
        seen = {(int(i), int(j)) for i in positions[rank].flatten() for j in range(24) if j <= int(i)}
        found = set()
        for source in range(ranks):
            for rows, keys, span in zigzag(rank, source, chunk, True):
                for a, i in enumerate(positions[rank].flatten()[rows].tolist()):
                    for b, j in enumerate(positions[source].flatten()[keys].tolist()):
                        if span.right is None or b <= a:
                            assert (i, j) not in found
                            found.add((i, j))
        assert found == seen
    assert attention_gpu.zigzag(0, 1, 3, False) == [(slice(0, 6), slice(0, 6), Span(0, 0))]
