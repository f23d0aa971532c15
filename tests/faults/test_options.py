"""Misspelt options and axis roles: refused with the legal words, and bound by name, never by position."""

from __future__ import annotations

import pytest
from torch import nn

import meshplan as mp
from tests.faults.check import exact, numbers, plan_of, refused
from tests.faults.test_uneven import Mlp

pytestmark = pytest.mark.usefixtures("pool")

X = {"x": numbers(4, 8, dp=mp.S(0))}


@pytest.mark.parametrize("word", ["no_shard", "zero-3", "full"])
def test_a_misspelt_sharding_strategy_is_refused(word):
    # UniRL#321: an unknown word meant full sharding.
    with pytest.raises(mp.PlanError) as caught:
        mp.Fsdp(units=["up"], strategy=word)
    assert caught.value.code == "unknown-option" and "zero3" in caught.value.legal and caught.value.where.line


@pytest.mark.parametrize(("word", "near"), [("colwize", "colwise"), ("row", "rowwise"), ("sequential", "sequence")])
def test_a_misspelt_shorthand_is_refused(word, near):
    with pytest.raises(mp.PlanError) as caught:
        mp.Rule("up", use=word)
    assert near in str(caught.value.legal) and caught.value.where.line


def test_an_unknown_key_of_a_plan_file_is_refused_at_its_line(tmp_path):
    path = tmp_path / "plan.yaml"
    path.write_text("mesh: {tp: 2}\nrules:\n  - at: up\n    usee: colwise\n")
    with pytest.raises(mp.PlanError) as caught:
        mp.load_plan(path)
    assert (caught.value.code, caught.value.where.line, caught.value.where.column) == ("unknown-key", 4, 5)


def test_an_fsdp_unit_that_matches_nothing_is_refused():
    error = refused(Mlp, plan_of(X, mesh={"dp_shard": 2}, fsdp=mp.Fsdp(units=["layers.*"])), "no-such-module")
    assert error.where.line


@pytest.mark.parametrize("mesh", [{"dp_replicate": 2, "dp_shard": 2}, {"dp_shard": 2, "dp_replicate": 2}])
def test_roles_go_by_name_in_any_order(mesh):
    # pytorch#161776: 8 rows over dp_shard 2 are 4 on each rank, whatever the order of the axes.
    plan = plan_of({"x": numbers(4, 8, dp=mp.S(0))}, mesh=mesh, fsdp=mp.Fsdp(units=["up", "down"]))
    low = mp.lower(Eight(), plan, 4)
    assert {tuple(p["local_shape"]) for p in low.placements if p["name"] == "up.weight"} == {(4, 8)}
    exact(Eight, plan, 4)


def Eight() -> nn.Module:
    return Mlp(hidden=8)


def test_replicas_of_one_shard_still_average_gradients():
    # pytorch#154888: (n, 1) must not become no sharding without the all-reduce.
    exact(Mlp, plan_of(X, mesh={"dp_replicate": 2, "dp_shard": 1}, fsdp=mp.Fsdp(units=["up"])), steps=2)
