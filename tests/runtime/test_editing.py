"""Edits change exactly the call they were made for, and notice code that takes another branch."""

from __future__ import annotations

import pytest
import torch

from meshplan import compat
from meshplan.errors import PlanError
from meshplan.runtime.editing import BoundEdit, Editing, sleeping


def sized(*args: object) -> tuple[tuple[object, ...], object, frozenset[int]]:
    leaves, structure = compat.flatten((args, {}))
    slots = frozenset(i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor))
    return tuple(None if i in slots else x for i, x in enumerate(leaves)), structure, slots


def test_sizes_are_replaced_in_one_call_only():
    x = torch.arange(6.0)
    edit = BoundEdit("view", sized(x, 3, 2), (), None, None)
    with Editing({1: edit}):
        first = x.view(2, 3)
        second = x.view(2, 3)
    assert first.shape == (2, 3) and second.shape == (3, 2)


def test_an_argument_is_converted():
    edit = BoundEdit("add", None, ((1, lambda t: t * 10),), None, None)
    a, b = torch.ones(2), torch.ones(2)
    with Editing({0: edit}):
        out = a + b
    assert out.tolist() == [11.0, 11.0]


def test_questions_about_a_tensor_are_not_calls():
    x = torch.ones(2, 2)
    edit = BoundEdit("mul", None, ((0, lambda t: t + 1),), None, None)
    with Editing({1: edit}):
        y = x + 1
        assert y.shape == (2, 2) and y.dim() == 2 and y.size(0) == 2
        assert (y * 1).tolist() == [[3.0, 3.0], [3.0, 3.0]]


def test_another_branch_is_refused(monkeypatch):
    edit = BoundEdit("view", sized(torch.ones(1), 1), (), None, None)
    edits = {0: edit}
    monkeypatch.setitem(Editing.paths, id(edits), "layers.0")
    two = torch.ones(2)
    with pytest.raises(PlanError) as refused, Editing(edits):
        two + 1
    assert refused.value.code == "other-branch" and refused.value.module == "layers.0"


def test_a_child_is_not_its_callers_code():
    edit = BoundEdit("neg", None, ((0, lambda t: t + 5),), None, None)
    child = sleeping(lambda x: torch.neg(torch.neg(x)))
    one = torch.ones(1)
    with Editing({0: edit}):
        inside = child(one)
        outside = torch.neg(one)
    assert inside.item() == 1.0 and outside.item() == -6.0
