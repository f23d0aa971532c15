"""What blocks of a pattern cost: FLOPs against closed formulas, bytes against what the compiler and the experts count."""

from __future__ import annotations

import itertools
from functools import partial

import pytest
import torch

import meshplan as mp
from meshplan.cost.pattern import balanced_stages, pattern_stress
from meshplan.errors import PlanError
from meshplan.mesh.spec import MeshSpec
from meshplan.models.hybrid import hybrid
from meshplan.ops.experts.cost import Routed, bytes_sent
from meshplan.runtime.comm import AxisGroup
from tests.models.patterns import TP

BATCH, SEQ = 2, 24


def stress(pattern: str, mesh: dict[str, int], *, ep: int = 1, seq: int = SEQ, **sizes: int):
    spec = MeshSpec(tuple(mesh.items()))
    factory = partial(hybrid, pattern, **sizes)
    return pattern_stress(factory, spec, ep=ep, batch=BATCH, seq=seq, dtype=torch.float32)


def test_parameters_and_flops_are_those_of_closed_formulas():
    found = {b.letter: b for b in stress("AEMR", {}, ssm_chunk=8, shared_dim=12).blocks}
    attention, up = 2 * 32 * 32 + 2 * 32 * 16, 3 * 32 * 20
    assert found["A"].parameters == found["A"].active == 32 + attention
    assert found["A"].flops == 2 * attention + 4 * SEQ * 4 * 8  # scores and values over the whole sequence
    assert found["E"].parameters == 32 + 4 * up + 4 * 32 + 3 * 32 * 12
    assert found["E"].active == found["E"].parameters - 2 * up
    assert found["E"].flops == 2 * (2 * up + 4 * 32 + 3 * 32 * 12)
    projections = 32 * (2 * 40 + 2 * 12 + 4) + 40 * 32
    assert found["M"].parameters == 32 + projections + 5 * (40 + 24) + 3 * 4 + 40
    # A chunk of 8 tokens: scores and values within, reading and writing the state, 4 heads of 10 with a state of 6.
    assert found["M"].flops == 2 * projections + 2 * 4 * (8 * 6 + 8 * 10 + 2 * 6 * 10)
    gates = 2 * 28 * 7
    assert found["R"].parameters == 32 + 3 * 32 * 28 + 5 * 28 + gates + 2 * 28 + 28
    assert found["R"].flops == 2 * (3 * 32 * 28 + gates)


def test_only_attention_grows_with_the_sequence():
    short, long = (stress("AEMR", {}, seq=seq, ssm_chunk=256).blocks for seq in (1024, 4096))
    for a, b in zip(short, long, strict=True):
        assert b.flops - a.flops == (4 * (4096 - 1024) * 4 * 8 if a.letter == "A" else 0)


def counted(letter: str, axis: str, n: int) -> dict[str, int]:
    """What the compiler says that a rank sends for the first of two blocks, by phase."""
    place = {"cp": {"cp": mp.S(1)}, "tp": {}, "dp_shard": {"dp": mp.S(0)}}[axis]
    batch = BATCH * n if axis == "dp_shard" else BATCH
    tokens = mp.Input(shape=(batch, SEQ), dtype=torch.int64, place=place)
    options = {}
    if axis == "cp" and letter == "A":
        options["context"] = {"attention": ["layers.*.attention"], "method": "ring", "balance": "contiguous"}
    if axis == "dp_shard":
        options["fsdp"] = {"units": ["layers.*"], "strategy": "zero3"}
    plan = mp.Plan(
        mesh={axis: n},
        inputs={"tokens": tokens, "labels": tokens},
        rules=TP[letter] if axis == "tp" else [],
        **options,
    )
    low = mp.lower(hybrid(2 * letter), plan, world_size=n)
    sent = {"forward": 0, "backward": 0}
    for c in low.to_json()["collectives"]:
        if c["module"].startswith("layers.0") and c["op"] != "recv":
            sent[c["phase"]] += c["wire_bytes"] * c["count"]
    return sent


@pytest.mark.parametrize(
    ("letter", "axis", "n"),
    [("A", "tp", 2), ("M", "tp", 2), ("R", "tp", 4), ("A", "cp", 3), ("M", "cp", 3), ("R", "cp", 4)]
    + [(letter, "dp_shard", 2) for letter in "AMR"],
)
def test_modelled_bytes_are_those_that_the_compiler_counts(letter, axis, n):
    (block,) = stress(letter * 2, {axis: n}).blocks
    said = block.sent[axis]
    assert counted(letter, axis, n) == {"forward": said.forward, "backward": said.backward}
    assert said.forward > 0


def test_experts_send_what_their_dispatch_counts():
    # 12 of 16 tokens for other ranks' experts would be uneven: 48 tokens, 2 of 4 experts each, are not.
    (block,) = stress("E", {"dp_shard": 4}, ep=4).blocks
    routed = Routed.even(BATCH * SEQ, 2, 4, 4, 0, 32, torch.float32, torch.float32)
    counts = 3 * 1 * 8  # a rank also tells each other rank how many rows come: 8 bytes for its one expert
    group = AxisGroup("ep", 4, 0)
    assert block.sent["ep"].forward == bytes_sent("alltoall", routed, group) - counts
    assert block.sent["ep"].backward == bytes_sent("alltoall", routed, group, phase="backward")


def test_experts_are_gathered_over_their_copies_and_the_rest_over_all():
    (block,) = stress("E", {"dp_shard": 4, "cp": 3, "tp": 2}, ep=2, shared_dim=10).blocks
    experts, whole, shared = 4 * 3 * 32 * 20, 32 + 4 * 32, 3 * 32 * 10
    # 24 ranks, 2 of them a copy of the experts: 12 copies of half of the experts; the shared one is split over tp.
    forward = 11 / 12 * (whole + shared / 2) * 4 + 11 / 12 * experts / 2 * 4
    assert block.sent["dp_shard"].forward == pytest.approx(forward, rel=1e-12)
    assert block.sent["dp_shard"].backward == 2 * block.sent["dp_shard"].forward
    assert block.sent["ep"].forward == 2 * BATCH * SEQ / 6 * 2 * 32 * 4 / 2  # tokens of a rank of cp and tp


def test_a_recurrence_could_hand_its_state_on():
    blocks = {b.letter: b.sent["cp"] for b in stress("AEMR", {"cp": 2}).blocks}
    assert blocks["M"].passing == BATCH * 4 * (40 * 6 + 3 * (40 + 24))
    assert blocks["R"].passing == BATCH * 4 * (28 + 3 * 28)
    assert blocks["A"].passing is blocks["E"].passing is None
    assert "whole sequence" in blocks["M"].note and blocks["E"].total == 0


def test_what_tp_cannot_split_stays_whole_and_says_so():
    found = {b.letter: b for b in stress("AEMR", {"dp_shard": 2, "tp": 8}).blocks}
    assert "4 query heads" in found["A"].sent["tp"].note and "2 groups" in found["M"].sent["tp"].note
    assert "4 gate blocks" in found["R"].sent["tp"].note and found["E"].sent["tp"].note
    for block in found.values():
        assert block.sent["tp"].total == 0 and block.most == "dp_shard"
        assert block.sent["dp_shard"].forward == pytest.approx(
            block.parameters * 4 / 2 if block.letter != "E" else (160 * 1 / 2 + 7680 * 15 / 16) * 4
        )
    few = {b.letter: b for b in stress("A", {"tp": 4}).blocks}["A"].sent["tp"]
    assert few.total > 0 and few.note == "each of 2 key heads on 2 ranks"


def test_stages_are_the_best_of_all_cuts():
    work = {"A": 3.0, "E": 5.0, "M": 1.5, "R": 1.0}
    pattern = "AEMEAEMR"
    for stages in range(1, 9):
        found = balanced_stages(pattern, work, stages)
        assert "".join(found) == pattern and all(found) and len(found) == stages
        cuts = itertools.combinations(range(1, 8), stages - 1)
        best = min(max(sum(work[x] for x in pattern[a:b]) for a, b in itertools.pairwise((0, *cut, 8))) for cut in cuts)
        assert max(sum(work[x] for x in stage) for stage in found) == best


def test_a_cut_sends_one_rank_s_part_of_the_stream():
    found = stress("AEMR", {"pp": 2, "cp": 2, "tp": 2})
    assert {b.sent["pp"].forward for b in found.blocks} == {BATCH * SEQ / 4 * 32 * 4}
    assert found.imbalance >= 1 and all(b.most != "pp" for b in found.blocks)


@pytest.mark.parametrize(
    ("mesh", "options", "code"),
    [
        ({"cp": 5}, {}, "bad-value"),
        ({"pp": 5}, {}, "bad-value"),
        ({"dp_shard": 3}, {"ep": 2}, "expert-fold"),
        ({"dp_shard": 8}, {"ep": 8}, "experts-split"),
    ],
)
def test_sizes_that_cannot_be_cut_are_refused(mesh, options, code):
    with pytest.raises(PlanError) as error:
        stress("AEMR", mesh, **options)
    assert error.value.code == code


def test_a_model_without_a_pattern_is_refused():
    with pytest.raises(PlanError) as error:
        pattern_stress(lambda: torch.nn.Linear(2, 2), MeshSpec(()))
    assert error.value.code == "bad-model"
