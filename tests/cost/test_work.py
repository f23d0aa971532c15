"""FLOPs and bytes of calls, against the counts of torch's own counter and closed formulas."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from meshplan.cost.work import flops, touched


def rand(*shape: int) -> torch.Tensor:
    return torch.rand(*shape)


@pytest.mark.parametrize(
    ("func", "args"),
    [
        (F.linear, (rand(3, 5, 7), rand(11, 7))),
        (torch.matmul, (rand(2, 3, 5, 7), rand(2, 3, 7, 4))),
        (torch.Tensor.__rmatmul__, (rand(7, 4), rand(5, 7))),
        (torch.bmm, (rand(3, 5, 7), rand(3, 7, 2))),
        (torch.addmm, (rand(4), rand(5, 7), rand(7, 4))),
        (torch.einsum, ("bsd,hd->bsh", rand(2, 3, 5), rand(7, 5))),
        (F.conv1d, (rand(2, 6, 9), rand(4, 6, 3))),
        (F.conv1d, (rand(2, 6, 9), rand(6, 1, 3), None, 1, 0, 1, 6)),
        (F.conv2d, (rand(2, 3, 8, 8), rand(5, 3, 4, 4), None, 4)),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_flops_are_those_of_torchs_counter(func, args):
    with FlopCounterMode(display=False) as counter:
        out = func(*args)
    ins = [a for a in args if isinstance(a, torch.Tensor)]
    assert flops(func, args, ins, [out]) == counter.get_total_flops() > 0


def test_attention_is_two_products_over_all_pairs():
    q, k, v = rand(2, 4, 6, 8), rand(2, 4, 10, 8), rand(2, 4, 10, 12)
    out = F.scaled_dot_product_attention(q, k, v)
    assert flops(F.scaled_dot_product_attention, (q, k, v), [q, k, v], [out]) == 2 * 2 * 4 * 6 * 10 * (8 + 12)


def test_views_touch_nothing_and_elementwise_calls_read_and_write():
    x = rand(3, 5)
    assert touched(torch.Tensor.view, [x], [x.view(15)]) == 0
    assert touched(F.gelu, [x], [F.gelu(x)]) == 2 * 15 * 4
    assert flops(F.gelu, (x,), [x], [F.gelu(x)]) == 0
