"""The plan's inputs: names of the signature, and sizes that the data axes divide."""

import pytest
from torch import nn

from meshplan.compiler.bind_inputs import bind_inputs
from meshplan.compiler.signature import arguments_of
from meshplan.errors import PlanError
from meshplan.plan.placements import S
from meshplan.plan.plan import Input, Plan


class Model(nn.Module):
    def forward(self, tokens, *, labels, mask=None):
        return tokens


ARGUMENTS = arguments_of(Model())


def bound(inputs, mesh=None, known=None, given=("labels", "tokens"), **sections):
    plan = Plan(mesh or {"dp_replicate": 2, "dp_shard": 3, "cp": 2}, inputs=inputs, **sections)
    return bind_inputs(plan, ARGUMENTS, plan.mesh if known is None else known, given)


def code(*args, **kwargs):
    with pytest.raises(PlanError) as error:
        bound(*args, **kwargs)
    return error.value.code


def test_dims_count_from_the_front_once_the_shape_is_known():
    assert bound({"tokens": Input((6, 4), "int64", {"cp": S(-1)})})["tokens"].place == {"cp": S(1)}
    assert bound({"tokens": Input(place={"cp": S(-1)})})["tokens"].place == {"cp": S(-1)}


def test_inputs_may_be_named_by_index_or_by_a_path_into_an_argument():
    assert set(bound({"0": Input(), "mask.causal": Input()})) == {"tokens", "mask.causal"}
    assert code({"0": Input(), "tokens": Input()}) == "two-layouts"


def test_a_name_forward_does_not_have_is_refused():
    assert code({"token": Input()}) == "no-such-argument"
    assert code({"1": Input()}) == "more-layouts-than-inputs"


def test_an_argument_that_forward_needs_may_not_be_left_out_of_the_inputs():
    assert code({"tokens": Input()}, given=()) == "missing-input"
    assert set(bound({"tokens": Input()}, given=("labels",))) == {"tokens"}
    assert bound({}, given=()) == {}


@pytest.mark.parametrize(("size", "legal"), [(6, True), (12, True), (3, False), (8, False), (9, False)])
def test_dp_is_replicas_times_shards(size, legal):
    inputs = {"tokens": Input((size, 5), "int64", {"dp": S(0)})}
    assert bound(inputs) if legal else code(inputs) == "input-not-divisible"


def test_axes_that_meet_on_one_dim_multiply():
    place = {"dp_shard": S(0), "cp": S(0)}
    assert bound({"tokens": Input((12,), "int64", place)})
    assert code({"tokens": Input((9,), "int64", place)}) == "input-not-divisible"


@pytest.mark.parametrize(
    ("context", "size", "legal"),
    [
        (None, 6, True),
        ({"attention": "a", "balance": "contiguous"}, 6, True),
        ({"attention": "a"}, 6, False),
        ({"attention": "a"}, 8, True),
        ({"attention": "a", "method": "ulysses"}, 6, True),
    ],
)
def test_a_balanced_sequence_has_two_pieces_for_each_rank(context, size, legal):
    inputs = {"tokens": Input((1, size), "int64", {"cp": S(1)})}
    assert bound(inputs, context=context) if legal else code(inputs, context=context) == "input-not-divisible"


def test_a_degree_that_is_not_resolved_yet_is_not_checked():
    inputs = {"tokens": Input((7,), "int64", {"dp": S(0)})}
    assert bound(inputs, mesh={"dp_shard": -1}, known={})
    assert code(inputs, mesh={"dp_shard": -1}, known={"dp_shard": 2}) == "input-not-divisible"


def test_an_axis_the_mesh_does_not_have_divides_everything():
    assert bound({"tokens": Input((7, 5), "int64", {"dp": S(0), "cp": S(1)})}, mesh={"tp": 2})


def test_a_dim_the_input_does_not_have_is_refused():
    assert code({"tokens": Input((6,), "int64", {"cp": S(1)})}) == "dim-out-of-range"
    assert code({"tokens": Input((), "int64", {"cp": S(0)})}) == "dim-out-of-range"


def test_offsets_are_of_another_input_by_whichever_name():
    offsets = Input((3,), "int32", offsets="0")
    assert bound({"tokens": Input((6, 4), "int64"), "mask": offsets})["mask"].offsets == "tokens"
    assert code({"tokens": Input((6, 4), "int64"), "mask": Input((3,), "int32", offsets="mask")}) == "no-such-input"
    assert code({"mask": offsets}) == "no-such-input"
