"""Comparison: errors relative to the right scale, the first difference in words."""

import math

import pytest
import torch

from meshplan.mesh.spec import MeshSpec
from meshplan.runtime.recorder import Collective
from meshplan.verify.compare import (
    FLOORS,
    TOLERANCES,
    distance,
    first_difference,
    first_unequal,
    missing_names,
    worst,
    worst_loss,
)

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("got", "want", "expected"),
    [
        ([1.0, 5.0], [1.5, 3.0], 2.0),
        ([1.0, INF], [0.0, INF], 1.0),  # equal infinities are equal
        ([NAN, 1.0], [NAN, 1.0], 0.0),
        ([NAN, 1.0], [0.0, 1.0], INF),
        ([INF], [-INF], INF),
        ([], [], 0.0),
        ([1.0], [1.0, 1.0], INF),  # another shape, although it would broadcast
    ],
)
def test_distance(got, want, expected):
    assert distance(torch.tensor(got, dtype=torch.float64), torch.tensor(want, dtype=torch.float64)) == expected


def test_errors_are_relative_to_each_tensors_own_size():
    found = worst({"big": 2.0, "small": 0.5}, {"big": 100.0, "small": 1.0})
    assert (found.name, found.error) == ("small", 0.5)


def test_a_tensor_of_rounding_noise_is_measured_against_the_largest():
    # Both sides hold noise around a true zero; against its own size the error would be 2.
    found = worst({"key.bias": 2e-16, "weight": 0.0}, {"key.bias": 1e-16, "weight": 10.0})
    assert found.name == "key.bias"
    assert found.error == pytest.approx(2e-16 / (1e-6 * 10.0))


def test_noise_of_float32_is_measured_against_more_of_the_largest():
    # A key's bias of a float32 model: 7e-9 of noise beside gradients of 1.6, less than one rounding of these.
    found = worst({"key.bias": 7e-9, "weight": 0.0}, {"key.bias": 6e-10, "weight": 1.6}, FLOORS[torch.float32])
    assert found.error < TOLERANCES[torch.float32]
    # A gradient twice too large is found however small the tensor, down to that rounding.
    found = worst({"small": 1e-6, "weight": 0.0}, {"small": 1e-6, "weight": 1.6}, FLOORS[torch.float32])
    assert found.error > TOLERANCES[torch.float32]


def test_a_tensor_that_one_device_lacks_is_infinitely_wrong():
    found = worst({"extra": 0.0, "weight": 1.0}, {"weight": 1.0})
    assert (found.name, found.error) == ("extra", INF)


def test_a_nan_distance_never_passes():
    assert worst({"a": NAN, "b": 1.0}, {"a": 1.0, "b": 1.0}).error == INF


def test_the_loss_of_one_device_is_the_mean_over_ranks_that_have_one():
    # A first pipeline stage has none. Ranks hold 1 and 3 valid tokens: 2.0 and 1.5 average to the true 1.75.
    found = worst_loss([1.75], {0: [None], 1: [2.0], 2: [1.5]})
    assert found.error == 0.0
    wrong = worst_loss([1.75, 1.0], {0: [2.0, 1.0], 1: [1.5, 2.0]})
    assert wrong.error == 0.5
    assert wrong.name == "step 1: 1.5, one device 1"


def test_a_loss_that_is_nan_on_both_sides_agrees_and_on_one_side_does_not():
    assert worst_loss([NAN], {0: [NAN]}).error == 0.0  # all labels ignored, as torch
    assert worst_loss([1.0], {0: [NAN]}).error == INF
    assert worst_loss([NAN], {0: [1.0]}).error == INF
    assert worst_loss([1.0], {0: [None]}).error == INF


def test_the_first_replica_to_drift_is_named():
    equal = {0: {("w", "tp 0"): "a", ("norm", ""): "n"}, 1: {("w", "tp 1"): "b", ("norm", ""): "n"}}
    assert first_unequal(equal) is None
    drifted = {**equal, 3: {("w", "tp 1"): "c", ("norm", ""): "n"}}
    assert first_unequal(drifted) == "w (tp 1) differs between ranks 1 and 3"


def test_names_missing_on_every_rank_or_on_one_device():
    assert missing_names(["a", "b", "c"], [["a"], ["b", "copy"]]) == ["c", "copy"]
    assert missing_names(["a", "b"], [["a"], ["b", "a"]]) == []


SPEC = MeshSpec((("dp_shard", 2), ("tp", 2)))  # rank 3: tp group (2, 3), dp_shard group (1, 3)


def _predicted(**changes):
    base = {"phase": "forward", "op": "all_gather", "axis": "tp", "ranks_per_group": 2, "count": 1, "dtype": "float64"}
    return {**base, "elements": 48, "module": "layers.0.wq", "tensor": "input", **changes}


def _recorded(**changes):
    base = {"sequence": 0, "phase": "forward", "op": "all_gather", "ranks": (2, 3), "axis": None, "dtype": "float64"}
    return Collective(**{**base, "elements": 48, "bytes": 384, **changes})


def test_collectives_that_agree_one_by_one():
    predicted = [_predicted(count=2), _predicted(op="all_reduce", axis="dp_shard+tp", ranks_per_group=4)]
    recorded = [_recorded(), _recorded(), _recorded(op="all_reduce", ranks=(0, 1, 2, 3))]
    assert first_difference(predicted, recorded, SPEC, 3) is None


def test_routed_sizes_and_axes_of_the_expert_view_are_open():
    predicted = [_predicted(op="all_to_all", axis="ep", elements=12) | {"routed": True}]
    assert first_difference(predicted, [_recorded(op="all_to_all", ranks=(1, 3), elements=7)], SPEC, 3) is None
    wrong = first_difference(predicted, [_recorded(op="all_to_all", ranks=(0, 1, 2, 3))], SPEC, 3)
    assert wrong.startswith("rank 3, collective 1: group size differs;")


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"op": "all_reduce"}, "op differs"),
        ({"phase": "backward"}, "phase differs"),
        ({"dtype": "bfloat16"}, "dtype differs"),
        ({"elements": 96}, "elements differs"),
        ({"ranks": (1, 3)}, "group differs"),  # the right size over the wrong axis
        ({"op": "broadcast", "elements": 3}, "op, elements differ"),
    ],
)
def test_the_first_collective_that_differs_is_told(changes, what):
    message = first_difference([_predicted(), _predicted()], [_recorded(), _recorded(**changes)], SPEC, 3)
    assert message.startswith(f"rank 3, collective 2: {what};")
    assert message.endswith("predicted forward all_gather of 48 float64 over tp 2 (layers.0.wq input)")


def test_collectives_too_few_or_too_many():
    two, one = [_predicted(), _predicted(op="all_reduce")], [_recorded()]
    assert first_difference(two, one, SPEC, 3) == (
        "rank 3: 1 recorded, then missing forward all_reduce of 48 float64 over tp 2 (layers.0.wq input)"
    )
    assert first_difference([], one, SPEC, 3) == (
        "rank 3: 0 predicted, then unforeseen forward all_gather of 48 float64 over ranks [2, 3]"
    )
