"""FLOPs and bytes of calls, against the counts of torch's own counter and closed formulas."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

import meshplan as mp
from meshplan.cost.work import block_flops, flops, touched
from meshplan.ops.experts.block import block_call
from tests.distributed.moe_blocks import Looped, Masked


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


def plan_of_blocks() -> mp.Plan:
    given = mp.Input(shape=(4, 6), dtype=torch.int64, place={"dp": mp.S(0)})
    experts = {"at": ["layers.*.moe"], "ep": 2}
    return mp.Plan(mesh={"dp_shard": 2}, inputs={"tokens": given, "labels": given}, experts=experts)


def test_a_block_of_experts_multiplies_the_matrices_of_those_that_a_token_chose():
    """Two of eight experts of three matrices of 12 x 10 each, a router of 8 x 12; 24 tokens."""
    low = mp.lower(Looped(Masked, layers=1), plan_of_blocks(), 2)
    (call,) = [d.call for d in low.core.program.decided if d.call.func is block_call]
    own = call.leaves[0]
    tokens = torch.empty(4, 6, 12, device="meta")
    law = next(iter(own.laws.known.values()))
    assert block_flops(own, law, tokens) == 2 * 24 * (8 * 12 + 2 * 3 * 12 * 10)
