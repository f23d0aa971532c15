"""Row-split embedding: summands add up to torch's lookup, and each rank's gradient is its rows of torch's."""

import pytest
import torch
import torch.nn.functional as F

from meshplan.errors import PlanError
from meshplan.ops.embedding import collectives, embedding
from meshplan.runtime.comm import AxisGroup, chunk_sizes
from tests.ops.simulated import run_ranks


@pytest.mark.parametrize("padding", [None, 0, 6, -1])
@pytest.mark.parametrize(("vocab", "tp"), [(7, 2), (8, 2), (7, 4), (5, 4), (7, 1)])
def test_output_and_gradient_are_bitwise_those_of_one_device(vocab, tp, padding):
    if padding is not None and padding >= vocab:
        padding = vocab - 1
    draw = torch.Generator().manual_seed(vocab)
    table = torch.randn(vocab, 3, generator=draw, dtype=torch.float64, requires_grad=True)
    ids = torch.randint(vocab, (4, 5), generator=draw)
    ids[0, 0] = (padding or 0) % vocab
    upstream = torch.randn(4, 5, 3, generator=draw, dtype=torch.float64)
    expected = F.embedding(ids, table, padding_idx=padding)
    expected.backward(upstream)

    def rank(groups):
        group = groups["tp"]
        mine = table.detach().split(chunk_sizes(vocab, tp))[group.rank].clone().requires_grad_()
        out = embedding(ids, mine, group=group, vocab_size=vocab, padding_idx=padding)
        out.backward(upstream)
        assert group.log == collectives() == []
        return out.detach(), mine.grad

    ranks = run_ranks({"tp": tp}, rank)
    assert torch.equal(sum(out for out, _ in ranks), expected.detach())
    assert torch.equal(torch.cat([grad for _, grad in ranks]), table.grad)


def test_two_tables_and_two_calls_own_their_masks():
    first, second = torch.arange(32.0).view(8, 4), 100 + torch.arange(48.0).view(8, 6)
    low, high = torch.tensor([0, 3]), torch.tensor([7, 1])

    def rank(groups):
        group, rows = groups["tp"], slice(4 * groups["tp"].rank, 4 * groups["tp"].rank + 4)
        a, b = first[rows].clone().requires_grad_(), second[rows].clone().requires_grad_()
        outs = [embedding(ids, a, group=group, vocab_size=8) for ids in (low, high)]
        outs.append(embedding(high, b, group=group, vocab_size=8))
        sum(out.sum() for out in outs).backward()
        return [out.detach() for out in outs], a.grad[:, 0], b.grad[:, 0]

    (outs0, a0, b0), (outs1, a1, b1) = run_ranks({"tp": 2}, rank)
    for out0, out1, expected in zip(outs0, outs1, (first[low], first[high], second[high]), strict=True):
        assert torch.equal(out0 + out1, expected)
    assert torch.cat([a0, a1]).tolist() == [1, 1, 0, 1, 0, 0, 0, 1]
    assert torch.cat([b0, b1]).tolist() == [0, 1, 0, 0, 0, 0, 0, 1]


def test_nan_in_a_row_held_elsewhere_does_not_leak_through_the_mask():
    grad = torch.tensor([[float("nan")], [1.0]])
    table = torch.ones(2, 1, requires_grad=True)
    embedding(torch.tensor([3, 1]), table, group=AxisGroup("tp", 2, 0), vocab_size=4).backward(grad)
    assert table.grad.tolist() == [[0.0], [1.0]]


@pytest.mark.parametrize("bad", [8, -1])
def test_an_id_out_of_range_raises_as_torch_does(bad):
    ids, table = torch.tensor([[0, bad]]), torch.zeros(4, 2)
    with pytest.raises(IndexError, match="index out of range in self"):
        F.embedding(ids, torch.zeros(8, 2))
    for rank in range(2):
        with pytest.raises(IndexError, match="index out of range in self"):
            embedding(ids, table, group=AxisGroup("tp", 2, rank), vocab_size=8)


@pytest.mark.parametrize(
    ("code", "change"),
    [
        ("embedding-option", {"max_norm": 1.0}),
        ("embedding-option", {"scale_grad_by_freq": True}),
        ("embedding-option", {"sparse": True}),
        ("vocab-shard-size", {"vocab_size": 9}),
        ("padding-idx", {"padding_idx": 8}),
    ],
)
def test_what_cannot_be_exact_is_refused(code, change):
    call = {"ids": torch.tensor([0]), "weight_local": torch.zeros(4, 2), "vocab_size": 8}
    call["group"] = AxisGroup("tp", 2, 0)
    embedding(**call)
    with pytest.raises(PlanError) as refusal:
        embedding(**call | change)
    assert refusal.value.code == code
    assert refusal.value.legal


def test_it_runs_on_shapes_alone():
    with torch.device("meta"):
        table = torch.empty(3, 2, requires_grad=True)
        out = embedding(torch.empty(4, 5, dtype=torch.int64), table, group=AxisGroup("tp", 2, 1), vocab_size=7)
        out.sum().backward()
    assert out.shape == (4, 5, 2)
    assert table.grad.shape == (3, 2)
