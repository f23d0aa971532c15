"""One set of moves and edits for all calls of a module, or a refusal that says how they differ."""

import pytest

from meshplan.compiler.edits import Edit
from meshplan.compiler.frames import Frame
from meshplan.compiler.invocations import Invocations, once
from meshplan.compiler.kinds import I, N, R
from meshplan.compiler.sites import Move, Site
from meshplan.errors import PlanError, Where
from meshplan.plan.placements import Shard

WHERE = Where("model.py", 7)
LETTERS = {"I": I, "R": R, "N": N, "S": Shard(0)}


def moved(src, dst, key="x", path="norm"):
    return Site("input", path, key), Move("tp", src, dst, 0, 4, LETTERS[src], LETTERS[dst]), WHERE


def called(*calls, silent=()):
    """Invocations of `norm` whose calls have (moves, inputs without gradient), and all their moves; those numbered in
    `silent`, from 1, were made with gradients off."""
    found, moves = Invocations(), []
    for serial, (made, quiet) in enumerate(calls, 1):
        start = len(moves)
        moves += made
        found.owners += [None] * len(made)
        found.entered(Frame("norm", serial), start, quiet, serial in silent)
    return found, moves


def test_equal_calls_move_once():
    found, moves = called(([moved("I", "R")], ()), ([moved("I", "R")], ()))
    assert once(found, moves) == ([moved("I", "R")], {})


def test_a_call_without_a_move_that_another_needs_is_refused_with_its_place():
    found, moves = called(([moved("I", "R")], ()), ([], ()))
    with pytest.raises(PlanError, match="one needs input x I -> R on tp, another none") as caught:
        once(found, moves)
    assert (caught.value.code, caught.value.module, caught.value.where) == ("calls-differ", "norm", WHERE)


def test_what_backward_is_owed_does_not_matter_to_an_input_without_gradient():
    found, moves = called(([moved("N", "S")], ("x",)), ([moved("I", "S"), moved("I", "R", "y")], ()))
    with pytest.raises(PlanError):
        once(found, moves)
    found, moves = called(([moved("N", "S")], ("x", "y")), ([moved("I", "S"), moved("I", "R", "y")], ()))
    assert once(found, moves)[0] == [moved("I", "S"), moved("I", "R", "y")]


def test_a_call_with_gradients_off_repeats_one_with_gradients_on():
    off, on = [moved("N", "S")], [moved("I", "R", "y"), moved("I", "S")]
    found, moves = called((off, ()), (on, ()), silent={1})
    convert = Edit(2, "add", None, ((0, moved("I", "R")[1]),), None, WHERE)
    found.edits.append((2, "norm", convert))
    assert once(found, moves) == (on, {"norm": {2: convert}})
    with pytest.raises(PlanError):  # with gradients on, the first call owes what it does not do
        once(*called((off, ()), (on, ())))
    with pytest.raises(PlanError):  # a shard is no owner of a gradient
        once(*called(([moved("N", "R")], ()), (on, ()), silent={1}))


def test_an_edit_that_one_call_lacks_is_refused():
    found, moves = called(([], ()), ([], ()))
    edit = Edit(3, "view", ((None, 2, 4), None, frozenset({0})), (), None, WHERE)
    found.edits.append((2, "norm", edit))
    with pytest.raises(PlanError, match="view runs differently") as caught:
        once(found, moves)
    assert caught.value.where == WHERE
    found.edits.append((1, "norm", edit))
    assert once(found, moves)[1] == {"norm": {3: edit}}


def test_a_running_call_is_the_innermost_and_else_the_last():
    found, _ = called(([], ()), ([], ()))
    assert found.current("norm", [Frame("norm", 1), Frame("other", 5)]) == 1
    assert found.current("norm", []) == 2 and found.current("never", []) is None
