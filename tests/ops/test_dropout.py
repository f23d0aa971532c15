"""Dropout by global element: slices of the one-device mask, keys that a recompute finds again."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from meshplan.errors import PlanError
from meshplan.mesh.streams import keep_mask
from meshplan.ops.dropout import DropoutStreams, block_mask, dropout

SHAPE = (3, 7, 5)


def whole(p=0.3, key=11):
    return dropout(torch.ones(SHAPE, dtype=torch.float64), p, True, key=key, global_shape=SHAPE, offsets=(0, 0, 0))


def test_kept_elements_are_scaled_and_the_rest_is_zero():
    keep = keep_mask(11, SHAPE, (0, 0, 0), SHAPE, 0.3)
    assert 0 < keep.sum() < keep.numel()
    torch.testing.assert_close(whole(), keep.double() / 0.7, rtol=1e-15, atol=0)


@pytest.mark.parametrize(("dim", "sizes"), [(0, (2, 1)), (1, (4, 3)), (2, (2, 2, 1, 0))])
def test_every_shard_drops_what_one_device_drops(dim, sizes):
    parts, start = [], 0
    for size in sizes:
        shape, offsets = list(SHAPE), [0, 0, 0]
        shape[dim], offsets[dim] = size, start
        x = torch.ones(shape, dtype=torch.float64)
        parts.append(dropout(x, 0.3, True, key=11, global_shape=SHAPE, offsets=offsets))
        start += size
    assert torch.equal(torch.cat(parts, dim), whole())


def test_a_zigzag_shard_takes_both_of_its_runs():
    x = torch.ones(3, 4, 5, dtype=torch.float64)
    mine = dropout(x, 0.3, True, key=11, global_shape=SHAPE, offsets=(0, [(1, 2), (5, 2)], 0))
    assert torch.equal(mine, whole()[:, [1, 2, 5, 6]])


def test_the_gradient_goes_through_the_same_mask():
    x = torch.randn(SHAPE, dtype=torch.float64, requires_grad=True)
    dropout(x, 0.3, True, key=11, global_shape=SHAPE, offsets=(0, 0, 0)).sum().backward()
    assert torch.equal(x.grad, whole())


def test_inplace_writes_the_same_numbers_into_its_input():
    x = torch.ones(SHAPE, dtype=torch.float64)
    out = dropout(x, 0.3, True, key=11, global_shape=SHAPE, offsets=(0, 0, 0), inplace=True)
    assert out is x
    assert torch.equal(x, whole())


def test_it_is_the_identity_in_evaluation_and_at_zero_and_nothing_at_one():
    x = torch.randn(2, 3)
    where = {"key": 1, "global_shape": (2, 3), "offsets": (0, 0)}
    assert dropout(x, 0.5, False, **where) is x
    assert dropout(x, 0.0, True, **where) is x
    assert not dropout(x, 1.0, True, **where).any()


def test_a_tensor_key_draws_what_the_int_key_draws():
    assert torch.equal(whole(key=torch.tensor(11)), whole(key=11))
    assert not torch.equal(whole(key=12), whole(key=11))


@pytest.mark.parametrize("p", [-0.1, 1.1, float("nan")])
def test_a_probability_outside_0_to_1_is_refused(p):
    with pytest.raises(PlanError) as refusal:
        dropout(torch.ones(2), p, True, key=1, global_shape=(2,), offsets=(0,))
    assert refusal.value.code == "bad-dropout"


@pytest.mark.parametrize("runs", [[(0, 1)], [], [(0, 1), (6, 2)]])
def test_runs_that_do_not_make_up_the_shard_are_refused(runs):
    with pytest.raises(PlanError) as refusal:
        block_mask(1, 0.5, (7,), (runs,), (3,))
    assert refusal.value.code == "block-outside"


def test_keys_differ_by_seed_step_microbatch_path_and_call_and_nothing_else():
    def keys(seed):
        streams = DropoutStreams(seed)
        found = []
        for _ in range(2):
            streams.begin_step()
            for microbatch in range(2):
                streams.begin_microbatch(microbatch)
                found += [streams.key("a.dropout"), streams.key("a.dropout"), streams.key("b.dropout")]
        return found

    first = keys(0)
    assert len(set(first)) == 12
    assert keys(0) == first
    assert not set(first) & set(keys(1))


def test_the_order_in_which_modules_run_does_not_matter():
    one, other = DropoutStreams(0), DropoutStreams(0)
    a, b = one.key("a"), one.key("b")
    assert (other.key("b"), other.key("a")) == (b, a)


def test_a_resumed_run_continues_with_the_next_step():
    streams = DropoutStreams(5)
    for _ in range(3):
        streams.begin_step()
    resumed = DropoutStreams(0)
    resumed.load_state_dict(streams.state_dict())
    streams.begin_step()
    resumed.begin_step()
    assert resumed.step == 4
    assert resumed.key("a") == streams.key("a")


def test_a_recompute_draws_the_masks_of_its_forward_and_disturbs_nothing():
    streams = DropoutStreams(3)
    drawn = []

    def block(x):
        for _ in range(2):
            drawn.append(streams.key("block.dropout"))
            x = dropout(x, 0.5, True, key=drawn[-1], global_shape=(40,), offsets=(0,)).sin()
        return x

    def loss(x, recompute):
        # The same unit twice in one forward, and a second microbatch before the first one's backward.
        streams.begin_microbatch(0)
        run = (
            (lambda y: checkpoint(block, y, use_reentrant=False, context_fn=streams.recompute_contexts))
            if (recompute)
            else block
        )
        first = run(run(x)).sum()
        streams.begin_microbatch(1)
        return first, run(x).sum()

    grads = {}
    for recompute in (False, True):
        streams = DropoutStreams(3)
        streams.begin_step()
        drawn.clear()
        x = torch.linspace(1, 2, 40, dtype=torch.float64, requires_grad=True)
        first, second = loss(x, recompute)
        assert len(set(drawn)) == 6
        before = streams.key("block.dropout")
        first.backward(retain_graph=True)
        first.backward()  # a kept graph is recomputed twice
        second.backward()
        grads[recompute] = x.grad
        assert (streams.step, streams.microbatch) == (1, 1)
        assert streams.key("block.dropout") not in [*drawn, before]
    assert torch.equal(grads[True], grads[False])
