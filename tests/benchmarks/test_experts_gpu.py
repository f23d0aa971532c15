"""The benchmark of the expert kernels: it says that nothing was measured without a GPU, and its checks can fail."""

import pytest
import torch

from benchmarks.experts_gpu import Scale, checks, page
from meshplan.kernels.experts import grouped, sort
from tests.benchmarks.scripts import report_of
from tests.kernels.interpreted import interpreted


@pytest.mark.skipif(torch.cuda.is_available(), reason="says that there is no GPU")
def test_without_a_gpu_nothing_is_measured_and_that_is_said():
    assert report_of("experts_gpu") == {"measured": False, "why": "no CUDA device was at hand."}
    assert "**Not measured**: no GPU" in page("no GPU", None)


SMALL = {"scale": Scale(tokens=(3, 0, 1), k=2, experts=3, hidden=5, width=6), "dtypes": (torch.float32,)}


@interpreted
def test_the_checks_pass_on_right_kernels_the_fused_ones_among_them():
    rows = list(checks("cpu", **SMALL))
    assert {row["kernel"] for row in rows} == {"sort", "permute, combine", "mlp", "fused, 3 logical ranks"}
    assert len(rows) == 2 * (1 + 1) + 6 + 4 and all(row["right"] for row in rows), rows


@interpreted
def test_kernels_that_are_wrong_fail_the_checks():
    with pytest.MonkeyPatch.context() as patch:
        sums, real = grouped.sums, sort.sort
        patch.setattr(grouped, "sums", lambda *a: sums(*a) * 1.001)
        patch.setattr(sort, "sort", lambda *a: real(*a)._replace(slots=real(*a).slots.flip(0)))
        right = {row["kernel"]: row["right"] for row in checks("cpu", **SMALL) if "rows first" not in row["case"]}
    assert not right["sort"] and not right["mlp"] and not right["fused, 3 logical ranks"] and right["permute, combine"]
