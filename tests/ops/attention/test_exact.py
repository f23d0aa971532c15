"""Every method of context attention on simulated ranks, forward and backward, against softmax written out on one device."""

import itertools

import pytest

from tests.ops.attention.reference import KINDS, Case, check, simulated

METHODS = ("ring", "allgather")
HEADS = ((4, 4), (4, 2), (4, 1))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", METHODS)
def test_result_and_gradients_are_those_of_one_device(method, kind):
    for n, balance, heads in itertools.product((2, 4), ("zigzag", "contiguous"), HEADS):
        case = Case(kind, *heads)
        check(case, simulated(case, n, balance, method=method), balance)
