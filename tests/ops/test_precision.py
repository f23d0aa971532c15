"""The dtype of computation: torch's for half precision, and autocast's where autocast is on."""

import pytest
import torch
import torch.nn.functional as F

from meshplan.ops.precision import autocast_to_float32, wide


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_half_precision_accumulates_in_float32_and_the_rest_in_itself(dtype):
    assert wide(dtype) == torch.float32
    assert wide(torch.float64) == torch.float64


def test_losses_become_float32_under_cpu_autocast_and_norms_do_not_as_in_torch():
    x = torch.randn(2, 3, dtype=torch.bfloat16)
    assert autocast_to_float32(x, on_cpu=True) is x
    with torch.autocast("cpu", torch.bfloat16):
        assert autocast_to_float32(x, on_cpu=True).dtype == F.cross_entropy(x, torch.tensor([0, 1])).dtype
        assert autocast_to_float32(x, on_cpu=False).dtype == F.layer_norm(x, (3,)).dtype
        assert autocast_to_float32(x.double(), on_cpu=True).dtype == torch.float64


def test_devices_without_autocast_are_left_alone():
    x = torch.empty(2, dtype=torch.bfloat16, device="meta")
    assert autocast_to_float32(x, on_cpu=True) is x
