"""The name of a composition says degrees, and only what differs from the usual."""

import pytest

from meshplan.mesh.spec import MeshSpec
from meshplan.plan.placements import R, S
from meshplan.plan.plan import Plan, Rule
from meshplan.verify.composition import composition

SP = Rule("layers.*.wo", use="rowwise", output={"tp": S(1)})
TP = Rule("layers.*.wo", use="rowwise", output={"tp": R})


@pytest.mark.parametrize(
    ("mesh", "world", "sections", "expected"),
    [
        ({"dp_shard": -1, "tp": 2}, 4, {"rules": [SP], "fsdp": {"units": ["layers.*"]}}, "dp_shard 2 x tp 2 + sp"),
        ({"tp": 2}, 2, {"rules": [TP]}, "tp 2"),
        ({"tp": 2}, 2, {"rules": [Rule("norm", use="sequence")]}, "tp 2 + sp"),
        ({"tp": 1, "dp_shard": -1}, 1, {"rules": [SP]}, "1 rank"),
        ({"dp_shard": 2}, 2, {"fsdp": {"units": [], "strategy": "zero2"}}, "dp_shard 2 + zero2"),
        ({"cp": 2}, 2, {"context": {"attention": ["a"], "method": "ulysses"}}, "cp 2 + ulysses"),
        ({"cp": 4}, 4, {"context": {"attention": ["a"], "method": "hybrid", "inner": 2}}, "cp 4 + hybrid 2 zigzag"),
        ({"dp_shard": 4}, 4, {"experts": {"at": ["moe"], "ep": 2, "etp": 2}}, "dp_shard 4 + ep 2 x etp 2 auto"),
        ({"pp": 2}, 2, {"pipeline": {"microbatches": 4}}, "pp 2 + 1f1b 4 microbatches"),
        ({"tp": 2}, 2, {"recompute": {"units": ["layers.*"]}, "regions": "dtensor"},
         "tp 2 + recompute full + regions dtensor"),
        ({"tp": 2}, 2, {"recompute": {"units": ["a"], "policy": "none", "gather": "regather"}}, "tp 2 + regather"),
    ],
)  # fmt: skip
def test_composition(mesh, world, sections, expected):
    plan = Plan(mesh=mesh, **sections)
    assert composition(plan, MeshSpec.resolve(plan.mesh, world)) == expected
