"""Small relatives of uses: short, unequal, cut as the true ones, and never another question."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from meshplan import compat
from meshplan.compiler.check_shrink import shrink, small_degree
from meshplan.compiler.kinds import Kind, P, R
from meshplan.compiler.uses import Decided, Use, use_of
from meshplan.plan.placements import Shard
from tests.compiler.rules.held import f, ids, record

T = torch.Tensor


def use(
    func: Any, *args: Any, ins: list[Kind], outs: list[Kind], n: int, operator: str | None = None, **kw: Any
) -> Use:
    call, trace = record(func, *args, **kw)
    made = use_of(Decided(call, tuple((k,) for k in ins), tuple((k,) for k in outs), (operator,)), 0, n, trace)
    assert made is not None
    return made


@pytest.mark.parametrize(("degree", "small"), [(1, 1), (2, 2), (3, 3), (4, 4), (8, 4), (6, 3), (9, 3), (10, 2), (7, 7)])
def test_the_small_degree_divides_the_true_one(degree: int, small: int) -> None:
    assert small_degree(degree) == small


def test_a_linear_of_a_large_model_becomes_tiny_with_unequal_dims() -> None:
    made = use(F.linear, f(16, 8192, 4096), f(14336, 4096), ins=[R, Shard(0)], outs=[Shard(2)], n=8)
    small = shrink(made)
    assert small is not None and small.degree == 4
    (b, s, k), (n, k2) = (t.shape for t in small.tensors)
    assert k == k2 and len({b, s, k, n}) == 4
    assert n % 4 == 0 and math.prod((b, s, k)) < 3000


def test_an_uneven_dim_stays_uneven_and_an_empty_shard_empty() -> None:
    uneven = use(F.linear, f(64, 512), f(1023, 512), ins=[R, Shard(0)], outs=[Shard(1)], n=4)
    small = shrink(uneven)
    assert small is not None and small.tensors[1].shape[0] % 4 != 0
    hollow = use(F.gelu, f(9, 1000), ins=[Shard(0)], outs=[Shard(0)], n=8)  # 2 + 2 + 2 + 2 + 1 + 0 + 0 + 0
    small = shrink(hollow)
    assert small is not None and small.tensors[0].shape[0] == 5  # 2 + 2 + 1 + 0


def test_a_dim_with_one_row_a_rank_keeps_one() -> None:
    small = shrink(use(F.gelu, f(8, 4000), ins=[Shard(0)], outs=[Shard(0)], n=8))
    assert small is not None and small.tensors[0].shape[0] == small.degree == 4


def test_a_view_as_heads_is_shortened_by_its_factors() -> None:
    made = use(T.view, f(4, 512, 4096), 4, 512, 32, 128, ins=[Shard(2)], outs=[Shard(2)], n=8)
    small = shrink(made)
    assert small is not None
    out = small.func(*small.arguments([torch.empty(t.shape) for t in small.tensors])[0]).shape
    assert out[2] * out[3] == small.tensors[0].shape[2] < 300 and out[2] % small.degree == 0


def test_parts_of_a_fused_dim_shrink_with_the_arguments_that_name_them() -> None:
    sizes = [4096, 1024, 1024]
    parts = Shard(1, tuple(sizes))
    made = use(torch.split, f(8, 6144), sizes, 1, ins=[parts], outs=[Shard(1)] * 3, n=8)
    small = shrink(made)
    assert small is not None
    assert isinstance(small.ins[0], Shard) and small.ins[0].parts is not None
    assert sum(small.ins[0].parts) == small.tensors[0].shape[1] < 100
    assert [x for x in small.leaves if type(x) is int][:3] == list(small.ins[0].parts)


def test_grouped_heads_keep_their_ratio() -> None:
    q, k = f(2, 32, 4096, 128), f(2, 8, 4096, 128)
    split = Shard(1)
    made = use(
        F.scaled_dot_product_attention, q, k, k, ins=[split] * 3, outs=[split], n=4, is_causal=True, enable_gqa=True
    )
    small = shrink(made)
    assert small is not None
    (_, heads, rows, width), (_, keys, *_) = (t.shape for t in small.tensors[:2])
    assert heads == 4 * keys and keys % 4 == 0
    assert rows <= 10 and width < 20


def test_a_number_that_names_a_dim_is_left_alone() -> None:
    made = use(torch.cumsum, f(3, 4, 1000), 2, ins=[Shard(0)], outs=[Shard(0)], n=3)
    small = shrink(made)
    assert small is not None and small.leaves[1] == 2


def test_a_call_that_names_a_device_shrinks_too() -> None:
    made = use(T.to, f(4, 9000), torch.float32, ins=[Shard(0)], outs=[Shard(0)], n=2)
    leaves, structure = compat.flatten(((made.leaves[0], torch.device("cpu"), torch.float32), {}))
    small = shrink(replace(made, leaves=tuple(leaves), structure=structure))
    assert small is not None and small.tensors[0].shape[1] < 10 and small.leaves[1] == torch.device("cpu")


def test_a_small_use_is_its_own_relative() -> None:
    made = use(F.embedding, ids(3, 4), f(7, 5), ins=[R, Shard(0)], outs=[P], n=2, operator="embedding")
    assert shrink(made) is made
