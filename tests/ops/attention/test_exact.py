"""Every method of context attention, on simulated and on gloo ranks, forward and backward, against softmax written out on one
device."""

import itertools

import pytest
import torch

from meshplan.mesh.build import build_groups
from tests.ops.attention.reference import KINDS, TOLD, Case, check, joined, on_rank, reference, simulated, spec_of

METHODS = {"ring": None, "allgather": None, "ulysses": None, "hybrid": 2}
HEADS = ((4, 4), (4, 2), (4, 1))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", METHODS)
def test_four_ranks_are_one_device(method, kind):
    for balance, heads in itertools.product(("zigzag", "contiguous"), HEADS):
        case = Case(kind, *heads)
        check(case, simulated(case, 4, balance, METHODS[method], method=method), balance)


@pytest.mark.parametrize("method", METHODS)
def test_other_sizes_scales_and_degrees(method):
    for n, inner, case in (
        (3, 3, Case("causal", 6, 3, 18, 0.7)),
        (6, 2, Case("band", 6, 6, 36)),
        (1, 1, Case("causal", 3, 1, 23)),
    ):
        if method == "hybrid" and n == 1:
            continue
        check(case, simulated(case, n, "zigzag", inner if method == "hybrid" else None, method=method), "zigzag")


def test_what_was_gathered_may_be_kept():
    case = Case("causal")
    kept, again = (simulated(case, 4, "zigzag", method="allgather", keep_gathered=k) for k in (True, False))
    check(case, kept, "zigzag")
    for one, other in zip(kept, again, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("method", METHODS)
def test_documents_that_each_rank_knows_its_part_of(method):
    case = Case("documents")
    check(case, simulated(case, 4, "zigzag", METHODS[method], method=method, local_docs=True), "zigzag")


@pytest.mark.parametrize("method", METHODS)
def test_reruns_are_the_same_bit_by_bit(method):
    case = Case("causal")
    first, second = (simulated(case, 4, "zigzag", METHODS[method], torch.float32, method=method) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


def _on_gloo(runs: list[tuple[Case, str, str]]) -> list[dict[str, torch.Tensor]]:
    found, built = [], {}
    n = torch.distributed.get_world_size()
    for case, way, balance in runs:
        method, _, transport = way.partition(" ")
        inner = METHODS[method]
        if inner not in built:
            built[inner] = build_groups(spec_of(n, inner), "cpu", [("cp",)])
        told = {"method": method, "transport": transport or "send"}
        found.append(on_rank(case, balance, built[inner].group, torch.float64, told))
    return found


@pytest.mark.parametrize("n", [2, 4])
def test_gloo_ranks_are_one_device(pool, n):
    """Every method, order, mask and ratio of heads, outputs and gradients."""
    kinds = [*KINDS, *(f"tensor {kind}" for kind in TOLD)]
    ways = [*METHODS, "ring peer"] if n > 2 else ["ring", "allgather", "ulysses", "ring peer"]
    runs = [
        (Case(kind, *heads), way, balance)
        for kind, way, balance, heads in itertools.product(kinds, ways, ("zigzag", "contiguous"), HEADS)
    ]
    ranks = pool.run(_on_gloo, runs, world=n)
    for i, (case, _, balance) in enumerate(runs):
        check(case, [r[i] for r in ranks], balance)


@pytest.mark.parametrize("method", METHODS)
def test_rounding_does_not_grow_with_the_ranks(method):
    errors = {}
    case = Case("causal", 8, 2, 256)
    for n in (2, 8):
        ranks = simulated(case, n, "zigzag", 2 if method == "hybrid" else None, torch.bfloat16, method=method)
        found, expected = joined(case, ranks, "zigzag"), reference(case, torch.bfloat16)
        errors[n] = {name: float((found[name].double() - x).norm() / x.norm()) for name, x in expected.items()}
    for name, error in errors[8].items():
        assert error < 0.003 and error < 1.05 * errors[2][name], (name, errors)
