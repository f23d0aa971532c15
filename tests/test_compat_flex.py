"""What meshplan.compat.flex relies on: if torch moves these functions, or gives them a closure, flex_attention is not seen."""

from __future__ import annotations

import inspect
import threading

import pytest
import torch
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, create_block_mask, create_mask, flex_attention

from meshplan import compat

compiled = torch.compile(flex_attention)
NOBODY = {"flex_attention": lambda *a, **k: ("taken", len(a), sorted(k)), "create_block_mask": lambda *a, **k: "taken"}


def test_both_are_plain_functions_without_a_closure():
    for function in (flex_attention, create_block_mask):
        assert inspect.isfunction(function) and not function.__code__.co_freevars
        assert function.__module__ == "torch.nn.attention.flex_attention"
    asked = inspect.signature(flex_attention).parameters
    named = "query key value score_mod block_mask scale enable_gqa return_lse kernel_options return_aux".split()
    assert list(asked) == named
    assert list(inspect.signature(create_block_mask).parameters)[:5] == ["mask_mod", "B", "H", "Q_LEN", "KV_LEN"]
    assert list(inspect.signature(create_mask).parameters) == ["mod_fn", "B", "H", "Q_LEN", "KV_LEN", "device"]
    assert AuxRequest._fields == ("lse", "max_scores") and isinstance(BlockMask.shape, property)


def test_calls_are_taken_by_whatever_name_and_given_back():
    q = torch.randn(1, 1, 4, 3)
    own = flex_attention.__code__
    with compat.taking_flex(NOBODY):
        assert flex_attention(q, q, value=q) == ("taken", 2, ["value"])
        assert compiled(q, q, q) == ("taken", 3, [])
        assert create_block_mask(None, 1, 1, 4, 4) == "taken"
        assert torch.allclose(compat.own_flex(q, q, q), torch.nn.functional.scaled_dot_product_attention(q, q, q))
    assert flex_attention.__code__ is own and compat.flex_takers() is None
    assert flex_attention(q, q, q).shape == q.shape


def test_another_threads_calls_are_torchs_own():
    q, found = torch.randn(1, 1, 4, 3), []
    with compat.taking_flex(NOBODY):
        thread = threading.Thread(target=lambda: found.append(flex_attention(q, q, q)))
        thread.start()
        thread.join()
    assert found[0].shape == q.shape


def test_an_error_inside_gives_them_back():
    own = create_block_mask.__code__
    with pytest.raises(ValueError, match="inside"), compat.taking_flex(NOBODY), compat.taking_flex(NOBODY):
        raise ValueError("inside")
    assert create_block_mask.__code__ is own


def test_the_missing_backward_on_cpus_is_told_from_other_refusals():
    q = torch.randn(1, 1, 4, 3, requires_grad=True)
    with pytest.raises(NotImplementedError) as caught:
        flex_attention(q, q, q)
    assert compat.lacks_flex_backward(caught.value)
    with pytest.raises(NotImplementedError) as other:
        raise NotImplementedError("FlexAttention does not support backward on CPU")
    assert not compat.lacks_flex_backward(other.value)


def test_blocks_of_threads_that_overlap_leave_the_compiler_as_it_was():
    import torch._dynamo

    first, second = threading.Event(), threading.Event()

    def one() -> None:
        with compat.without_compiling():
            first.set()
            second.wait(20)

    thread = threading.Thread(target=one)
    thread.start()
    first.wait(20)
    block = compat.without_compiling()
    block.__enter__()
    second.set()
    thread.join()  # who came first leaves first
    assert torch._dynamo.eval_frame._stance.stance == "force_eager"
    block.__exit__(None, None, None)
    assert torch._dynamo.eval_frame._stance.stance == "default"
