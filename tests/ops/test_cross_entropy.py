"""Split-vocabulary cross entropy is torch's cross entropy of the global batch: value, gradient, and what it sends."""

import pytest
import torch
import torch.nn.functional as F

from meshplan.errors import PlanError
from meshplan.ops.calls import Call
from meshplan.ops.cross_entropy import collectives, cross_entropy
from meshplan.runtime.comm import AxisGroup, chunk_sizes
from tests.ops.simulated import run_ranks

ALONE = AxisGroup("tp", 1, 0)
EXACT = {"rtol": 4e-14, "atol": 2e-15}


def batch(vocab, rows=(6, 3), ignored=((0,), (1, 2)), seed=0, dtype=torch.float64):
    """Logits, targets and class weights; `rows` tokens on each data rank, of which `ignored` do not count."""
    draw = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(sum(rows), vocab, generator=draw, dtype=dtype)
    target = torch.randint(vocab, (sum(rows),), generator=draw)
    for start, which in zip((0, rows[0]), ignored, strict=True):
        target[[start + i for i in which]] = -100
    return logits, target, torch.rand(vocab, generator=draw, dtype=dtype) + 0.1


def split_loss(logits, target, weight, tp, rows, upstream=None, **options):
    """Per rank of (dp 2, tp): the loss, this rank's logits gradient, and its collectives."""

    def rank(groups):
        dp, vocab = groups["dp"], groups["tp"]
        mine = logits.split(rows)[dp.rank].split(chunk_sizes(logits.shape[1], tp), 1)[vocab.rank]
        mine = mine.clone().requires_grad_()
        labels = target.split(rows)[dp.rank]
        loss = cross_entropy(
            mine, labels, weight, vocab_group=vocab, vocab_size=logits.shape[1], count_groups=[dp], **options
        )
        (loss if upstream is None else (loss * upstream.split(rows)[dp.rank]).sum()).backward()
        return loss.detach(), mine.grad, vocab.log

    return run_ranks({"dp": 2, "tp": tp}, rank)


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize(("vocab", "tp"), [(127, 2), (127, 4), (7, 2), (5, 4), (8, 1)])
def test_value_and_gradient_are_those_of_one_device(vocab, tp, reduction, weighted, smoothing):
    rows = [6, 3]
    logits, target, weight = batch(vocab, rows)
    weight = weight if weighted else None
    reference = logits.clone().requires_grad_()
    expected = F.cross_entropy(reference, target, weight, reduction=reduction, label_smoothing=smoothing)
    expected.backward()
    ranks = split_loss(logits, target, weight, tp, rows, reduction=reduction, label_smoothing=smoothing)

    for t in range(1, tp):  # equal, to the bit, on all ranks that hold classes of the same tokens
        assert ranks[t][0] == ranks[0][0]
        assert ranks[tp + t][0] == ranks[tp][0]
    torch.testing.assert_close((ranks[0][0] + ranks[tp][0]) / 2, expected.detach(), **EXACT)
    gathered = torch.cat([torch.cat([ranks[d * tp + t][1] for t in range(tp)], 1) for d in range(2)])
    torch.testing.assert_close(gathered / 2, reference.grad, **EXACT)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("weighted", [False, True])
def test_without_reduction_each_token_has_its_own_unscaled_loss(weighted, smoothing):
    rows = [6, 3]
    logits, target, weight = batch(7, rows)
    weight = weight if weighted else None
    upstream = torch.arange(1.0, 10.0, dtype=torch.float64)
    reference = logits.clone().requires_grad_()
    expected = F.cross_entropy(reference, target, weight, reduction="none", label_smoothing=smoothing)
    (expected * upstream).sum().backward()
    ranks = split_loss(logits, target, weight, 2, rows, upstream, reduction="none", label_smoothing=smoothing)
    torch.testing.assert_close(torch.cat([ranks[0][0], ranks[2][0]]), expected.detach(), **EXACT)
    gathered = torch.cat([torch.cat([ranks[d * 2][1], ranks[d * 2 + 1][1]], 1) for d in range(2)])
    torch.testing.assert_close(gathered, reference.grad, **EXACT)


def test_unequal_valid_tokens_are_weighted_by_tokens_and_not_by_ranks():
    # Two classes with logits (0, log 3): class 0 costs log 4, class 1 costs log 4/3. One valid token against three.
    logits = torch.tensor([0.0, 3.0], dtype=torch.float64).log().nan_to_num(neginf=0.0).expand(8, 2)
    target = torch.tensor([0, -100, -100, -100, 1, 1, 1, -100])
    ranks = split_loss(logits, target, None, 1, [4, 4])
    four = torch.tensor(4.0, dtype=torch.float64).log()
    third = torch.tensor(4 / 3, dtype=torch.float64).log()
    torch.testing.assert_close(ranks[0][0], four * 2 / 4, **EXACT)
    torch.testing.assert_close(ranks[1][0], 3 * third * 2 / 4, **EXACT)


def test_a_rank_whose_tokens_are_all_ignored_gives_zero_and_no_nan():
    logits, target, _ = batch(7, (4, 3), ((0, 1, 2, 3), ()))
    ranks = split_loss(logits, target, None, 2, [4, 3])
    assert ranks[0][0] == 0.0
    assert not ranks[0][1].any()
    torch.testing.assert_close(ranks[2][0] / 2, F.cross_entropy(logits, target), **EXACT)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_all_ignored_is_nan_with_zero_gradient_as_in_torch(smoothing):
    logits, target, _ = batch(7, (2, 2), ((0, 1), (0, 1)))
    reference = logits.clone().requires_grad_()
    expected = F.cross_entropy(reference, target, label_smoothing=smoothing)
    expected.backward()
    assert expected.isnan()
    assert not reference.grad.any()
    for loss, grad, _ in split_loss(logits, target, None, 2, [2, 2], label_smoothing=smoothing):
        assert loss.isnan()
        assert not grad.any()


def test_extra_dims_follow_the_class_dim():
    logits = torch.randn(2, 7, 3, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    target = torch.randint(7, (2, 3, 2), generator=torch.Generator().manual_seed(4))
    weight = torch.linspace(0.5, 2.0, 7, dtype=torch.float64)
    reference = logits.clone().requires_grad_()
    expected = F.cross_entropy(reference, target, weight, ignore_index=2, label_smoothing=0.3)
    expected.backward()

    def rank(groups):
        mine = logits.split([4, 3], 1)[groups["tp"].rank].clone().requires_grad_()
        loss = cross_entropy(
            mine, target, weight, vocab_group=groups["tp"], vocab_size=7, ignore_index=2, label_smoothing=0.3
        )
        loss.backward()
        return loss.detach(), mine.grad

    (loss, left), (_, right) = run_ranks({"tp": 2}, rank)
    torch.testing.assert_close(loss, expected.detach(), **EXACT)
    torch.testing.assert_close(torch.cat([left, right], 1), reference.grad, **EXACT)


def test_unbatched_logits_and_uint8_targets_are_legal_as_in_torch():
    logits = torch.tensor([0.5, -1.0, 2.0, 0.0, 1.0, 0.25, -0.5], dtype=torch.float64)
    target = torch.tensor(5, dtype=torch.uint8)

    def rank(groups):
        mine = logits.split([4, 3])[groups["tp"].rank]
        return cross_entropy(mine, target, vocab_group=groups["tp"], vocab_size=7, reduction="none")

    for loss in run_ranks({"tp": 2}, rank):
        assert loss.shape == ()
        torch.testing.assert_close(loss, F.cross_entropy(logits, target.long()), **EXACT)


def test_large_and_masked_logits_stay_finite():
    logits = torch.tensor([[1e4, -1e4, float("-inf"), 9.999e3], [float("-inf")] * 3 + [-1e4]], dtype=torch.float64)
    target = torch.tensor([3, 3])
    reference = logits.clone().requires_grad_()
    expected = F.cross_entropy(reference, target)
    expected.backward()

    def rank(groups):
        mine = logits.chunk(2, 1)[groups["tp"].rank].clone().requires_grad_()
        loss = cross_entropy(mine, target, vocab_group=groups["tp"], vocab_size=4)
        loss.backward()
        return loss.detach(), mine.grad

    (loss, left), (_, right) = run_ranks({"tp": 2}, rank)
    assert loss.isfinite()
    torch.testing.assert_close(loss, expected.detach(), **EXACT)
    torch.testing.assert_close(torch.cat([left, right], 1), reference.grad, **EXACT)


def test_a_loss_in_sequence_chunks_leaves_the_hidden_gradient_unchanged():
    draw = torch.Generator().manual_seed(5)
    hidden = torch.randn(8, 4, generator=draw, dtype=torch.float64)
    head = torch.randn(7, 4, generator=draw, dtype=torch.float64)
    target = torch.tensor([1, 6, -100, 0, 3, 3, -100, 5])
    reference = hidden.clone().requires_grad_()
    F.cross_entropy(reference @ head.T, target).backward()

    def rank(groups):
        mine = hidden.clone().requires_grad_()
        rows = head.split([4, 3])[groups["tp"].rank]
        for h, t in zip(mine.chunk(4), target.chunk(4), strict=True):
            loss = cross_entropy(h @ rows.T, t, vocab_group=groups["tp"], vocab_size=7, reduction="sum")
            (loss / 6).backward()
        return mine.grad

    left, right = run_ranks({"tp": 2}, rank)  # hidden enters the split head: its gradient is partial on tp
    torch.testing.assert_close(left + right, reference.grad, **EXACT)


def test_bfloat16_is_accumulated_in_float32_and_rounded_once():
    logits, target, _ = batch(127, (40, 23), seed=7, dtype=torch.float32)
    half = logits.bfloat16()
    exact = half.double().requires_grad_()
    expected = F.cross_entropy(exact, target)
    expected.backward()
    ranks = split_loss(half, target, None, 2, [40, 23])
    mean = (ranks[0][0].double() + ranks[2][0].double()) / 2
    assert ranks[0][0].dtype == ranks[0][1].dtype == torch.bfloat16
    assert abs(mean - expected) <= expected * 2.0**-9  # each of the two values is half a unit of 8 bits off at most
    gathered = torch.cat([torch.cat([ranks[d * 2][1], ranks[d * 2 + 1][1]], 1) for d in range(2)]).double() / 2
    torch.testing.assert_close(gathered, exact.grad, rtol=2.0**-8, atol=1e-7)


def test_under_autocast_the_loss_is_float32_as_torch_makes_it():
    logits, target, _ = batch(8, (3, 3), dtype=torch.float32)
    half = logits.bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        expected = F.cross_entropy(half, target)
        loss = cross_entropy(half, target, vocab_group=ALONE, vocab_size=8)
    assert loss.dtype == expected.dtype == torch.float32
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)


def test_tokens_split_on_a_summed_axis_are_counted_but_not_scaled_by_it():
    logits, target, _ = batch(7, (6, 3))

    def rank(groups):
        tokens = slice(0, 6) if groups["tp"].rank == 0 else slice(6, 9)
        return cross_entropy(
            logits[tokens], target[tokens], vocab_group=ALONE, vocab_size=7, count_groups=[groups["tp"]], data_ranks=1
        )

    torch.testing.assert_close(sum(run_ranks({"tp": 2}, rank)), F.cross_entropy(logits, target), **EXACT)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_it_sends_what_it_says_and_the_abstract_run_is_told_the_same(reduction, smoothing):
    rows = [6, 3]
    logits, target, _ = batch(7, rows)
    upstream = torch.ones(9, dtype=torch.float64) if reduction == "none" else None
    ranks = split_loss(logits, target, None, 2, rows, upstream, reduction=reduction, label_smoothing=smoothing)
    expected = [Call("all_reduce", "tp", 6), Call("all_reduce", "tp", 18 if smoothing else 12)]
    expected += [Call("all_reduce", "dp", 1)] if reduction == "mean" else []
    assert ranks[0][2] == expected

    told = []
    groups = [AxisGroup(a, 2, 0, on_call=lambda op, g, x: told.append(Call(op, g.axis, x.numel()))) for a in ("dp", "tp")]
    with torch.device("meta"):
        mine = torch.empty(6, 4, requires_grad=True)
        options = {"vocab_group": groups[1], "count_groups": groups[:1], "reduction": reduction}
        options["label_smoothing"] = smoothing
        cross_entropy(mine, torch.empty(6, dtype=torch.int64), vocab_size=7, **options).sum().backward()
    assert mine.grad.shape == (6, 4)
    assert told == expected
    assert collectives(6, **options) == expected


def test_a_target_out_of_range_raises_on_every_rank_with_torchs_message():
    logits = torch.zeros(2, 4)

    def rank(groups):
        with pytest.raises(IndexError, match="Target 8 is out of bounds"):
            cross_entropy(logits, torch.tensor([1, 8]), vocab_group=groups["tp"], vocab_size=8)
        return True

    assert run_ranks({"tp": 2}, rank) == [True, True]
    with pytest.raises(IndexError, match="Target 8 is out of bounds"):
        F.cross_entropy(torch.zeros(2, 8), torch.tensor([1, 8]))


@pytest.mark.parametrize(
    ("code", "change"),
    [
        ("vocab-shard-size", {"logits_local": torch.zeros(3, 8)}),
        ("class-probabilities", {"target": torch.zeros(3, 4)}),
        ("target-shape", {"target": torch.zeros(2, dtype=torch.int64)}),
        ("class-weight", {"weight": torch.ones(4)}),
        ("class-weight", {"weight": torch.ones(8, requires_grad=True)}),
        ("reduction", {"reduction": "batchmean"}),
        ("label-smoothing", {"label_smoothing": 1.5}),
    ],
)
def test_what_cannot_be_exact_is_refused(code, change):
    call = {"logits_local": torch.zeros(3, 4), "target": torch.zeros(3, dtype=torch.int64)}
    call |= {"vocab_group": AxisGroup("tp", 2, 0), "vocab_size": 8}
    cross_entropy(**call)
    with pytest.raises(PlanError) as refusal:
        cross_entropy(**call | change)
    assert refusal.value.code == code
    assert refusal.value.legal


def test_a_second_derivative_is_refused_rather_than_wrong():
    logits = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    loss = cross_entropy(logits, torch.tensor([0, 1, 2]), vocab_group=ALONE, vocab_size=4)
    with pytest.raises(PlanError) as refusal:
        torch.autograd.grad(loss, logits, create_graph=True)
    assert refusal.value.code == "second-derivative"
