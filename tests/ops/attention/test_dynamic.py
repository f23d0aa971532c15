"""Samples on as many ranks as they need: each row once, loads near the bound, and the attention of one device for each sample."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from meshplan import compat
from meshplan.errors import PlanError
from meshplan.mesh.build import Groups, build_groups
from meshplan.mesh.spec import MeshSpec
from meshplan.ops.attention.dynamic import plan_samples
from meshplan.ops.attention.dynamic_report import balance, report, ways
from meshplan.ops.attention.dynamic_run import groups_for_samples, run_dynamic, split_for_samples
from meshplan.ops.attention.schedule import Schedule, Work, degrees
from meshplan.runtime.simulated import SimulatedGroups, World

H, HKV, D, DV = 4, 2, 5, 3


def test_degrees_nest():
    assert degrees(8) == [1, 2, 4, 8]
    assert degrees(12) == [1, 2, 4, 12]
    assert degrees(1) == [1]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("left", [None, 0, 3, 50])
def test_work_counts_the_pairs_that_see_each_other(causal, left):
    work, length = Work(pair=2.0, token=10.0, causal=causal, left=left), 13
    for start, stop in ((0, 13), (0, 5), (4, 9), (9, 20), (14, 20)):
        seen = [
            (i, j) for i in range(start, min(stop, length)) for j in range(length)
            if (j <= i or not causal) and (left is None or j >= i - left)
        ]  # fmt: skip
        assert work.of(start, stop, length) == 2.0 * len(seen) + 10.0 * max(0, min(stop, length) - start)


def test_long_samples_get_ranks_and_short_ones_stay_local():
    schedule = plan_samples([131072, *[2048] * 8], 8, 20480)
    by_sample = {p.sample: p for p in schedule.pieces}
    assert by_sample[0].degree == 8 and {by_sample[s].degree for s in range(1, 9)} == {1}
    assert sorted(by_sample[s].block for s in range(1, 9)) == list(range(8))
    assert schedule.waves == 1 and {schedule.rows(rank) for rank in range(8)} == {16384 + 2048}


def lengths_of(seed: int, count: int) -> list[int]:
    draw = random.Random(seed)
    return [max(1, min(16000, int(draw.lognormvariate(6.5, 1.3)))) for _ in range(count)]


@pytest.mark.parametrize(("ranks", "count", "most"), [(1, 9, 20000), (4, 30, 5000), (8, 40, 4001), (6, 25, 9000)])
def test_every_row_has_one_place_and_no_rank_too_many(ranks, count, most):
    schedule = plan_samples(lengths_of(ranks, count), ranks, most)
    seen: dict[int, list[int]] = {}
    for wave in range(schedule.waves):
        for rank in range(ranks):
            assert schedule.rows(rank, wave) <= most
            for sample, runs in schedule.runs(rank, wave):
                seen.setdefault(sample, []).extend(i for a, b in runs for i in range(a, b))
    for sample, length in enumerate(schedule.lengths):
        assert sorted(seen[sample])[:length] == list(range(length)) and len(set(seen[sample])) == len(seen[sample])


def test_loads_come_near_the_bound_where_plainer_ways_do_not():
    schedule = plan_samples(lengths_of(5, 300), 8, 32000, work=Work(pair=4 * 32 * 128, token=2e7))
    found = {name: balance(made) for name, made in ways(schedule).items()}
    assert found["dynamic"].work < 1.03 and found["dynamic"].work >= found["dynamic"].bound - 1e-9
    assert found["dynamic"].tokens < 1.05
    assert min(found["by tokens"].work, found["all ranks"].work) > 1.15
    assert found["dynamic"].sent < 0.1 * found["all, zigzag"].sent
    assert found["all ranks"].bound <= found["all ranks"].work


def test_a_sample_that_alone_is_most_of_the_work_is_spread_although_it_would_fit():
    schedule = plan_samples([9000, *[100] * 20], 4, 16000)
    assert {p.degree for p in schedule.pieces if p.sample == 0} == {4}


def test_rows_that_do_not_fit_at_once_make_waves():
    schedule = plan_samples([1000] * 10, 2, 2000)
    assert schedule.waves == 3 and sum(schedule.rows(rank, w) for rank in range(2) for w in range(3)) == 10000


def test_samples_that_fit_nowhere_are_named():
    with pytest.raises(PlanError) as refusal:
        plan_samples([5, 70000, 0, 65536, 65537], 4, 16384)
    assert refusal.value.code == "context-samples"
    assert refusal.value.message.endswith(": 1 (70000 tokens), 2 (0 tokens), 4 (65537 tokens)")
    assert refusal.value.legal == "samples of 1 to 65536 tokens"


def test_the_report_shows_before_and_after():
    lines = report(plan_samples([8192, *[512] * 16], 8, 4096)).splitlines()
    assert lines[0] == "17 samples, 16384 tokens, 8 ranks of 4096, 1 wave   modelled"
    assert [line.split()[0] for line in lines[2:6]] == ["all", "all,", "by", "dynamic"]
    assert lines[5].split() == ["dynamic", "1.000", "1.000", "1.000", "7168", "16", "x", "1,", "1", "x", "8"]


RAGGED = plan_samples([37, 21, 18, 5, 9, 3, 1, 4], 4, 30)
CASES = {
    "ragged": RAGGED,
    "waves": plan_samples([37, 21, 18, 5, 9, 3, 1, 4], 4, 12),
    "window": plan_samples([37, 5, 9, 3], 4, 20, work=Work(left=6), balance="contiguous"),
    "full": plan_samples([30, 5, 9, 3], 4, 20, work=Work(causal=False)),
}


def samples_of(schedule: Schedule) -> dict[str, list[Tensor]]:
    draw = torch.Generator().manual_seed(0)
    shapes = {"q": (H, D), "k": (HKV, D), "v": (HKV, DV), "up": (H, DV)}
    return {
        name: [torch.randn(1, heads, length, width, generator=draw, dtype=torch.float64) for length in schedule.lengths]
        for name, (heads, width) in shapes.items()
    }


def one_device(schedule: Schedule) -> dict[str, list[Tensor]]:
    """Each sample on its own, softmax written out."""
    x = samples_of(schedule)
    found: dict[str, list[Tensor]] = {"out": [], "q": [], "k": [], "v": []}
    for q, k, v, up in zip(*(x[name] for name in ("q", "k", "v", "up")), strict=True):
        q, k, v = (t.requires_grad_() for t in (q, k, v))
        at, to = torch.arange(q.shape[2]).unsqueeze(1), torch.arange(q.shape[2])
        seen = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool)
        seen = seen & (to <= at) if schedule.work.causal else seen
        seen = seen if schedule.work.left is None else seen & (to >= at - schedule.work.left)
        keys, values = (t.repeat_interleave(H // HKV, 1) for t in (k, v))
        weights = torch.where(seen, (q @ keys.transpose(-1, -2) * D**-0.5).exp(), 0.0)
        out = weights / weights.sum(-1, keepdim=True) @ values
        out.backward(up)
        for name, t in (("out", out.detach()), ("q", q.grad), ("k", k.grad), ("v", v.grad)):
            found[name].append(t)
    return found


def on_rank(schedule: Schedule, groups: Any, rank: int) -> list[dict[str, Tensor]]:
    """What a rank gets out of each wave."""
    whole, found = samples_of(schedule), []
    for wave in range(schedule.waves):
        mine = {name: schedule.cut(x, 2, rank, wave) for name, x in whole.items()}
        q, k, v = (mine[name].requires_grad_() for name in "qkv")
        out = run_dynamic(q, k, v, schedule, groups_for_samples(groups), wave)
        out.backward(mine["up"])
        found.append({"out": out.detach(), "q": q.grad, "k": k.grad, "v": v.grad})
    return found


def check(schedule: Schedule, ranks: list[list[dict[str, Tensor]]]) -> None:
    for name, want in one_device(schedule).items():
        whole = schedule.join([[ranks[r][w][name] for r in range(len(ranks))] for w in range(schedule.waves)], 2)
        for found, expected in zip(whole, want, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-13)
    total = sum(float(r[w]["out"].abs().sum()) for r in ranks for w in range(schedule.waves))
    assert total == pytest.approx(sum(float(x.abs().sum()) for x in one_device(schedule)["out"]))  # padding is zero


def test_the_cases_mix_degrees_padding_and_waves():
    assert {p.degree for p in RAGGED.pieces} == {1, 2, 4} and CASES["waves"].waves > 1
    assert any(p.sequence.size > p.length for p in RAGGED.pieces)


@pytest.mark.parametrize("name", CASES)
def test_simulated_ranks_give_each_sample_what_one_device_gives(name):
    schedule, world = CASES[name], World(4)
    spec, _ = split_for_samples(MeshSpec((("cp", 4),)))
    check(schedule, world.run(lambda rank: on_rank(schedule, SimulatedGroups(spec, rank, world=world), rank)))


def test_ranks_send_what_the_report_counts():
    spec, _ = split_for_samples(MeshSpec((("cp", 4),)))
    sent = []
    for rank in range(4):
        told: list[tuple[bool, str, int]] = []
        groups = Groups(spec, rank, lambda op, g, x, told=told: told.append((compat.in_backward(), op, x.numel())))
        on_rank(RAGGED, groups, rank)
        sent.append(sum(n for backward, op, n in told if op == "send" and not backward))
        assert sum(n for backward, op, n in told if op == "send" and backward) == 2 * sent[-1]
    assert max(sent) == balance(RAGGED).sent * HKV * (D + DV)


def _on_gloo(schedule: Schedule) -> list[dict[str, Tensor]]:
    spec, sets = split_for_samples(MeshSpec((("cp", 4),)))
    groups = build_groups(spec, "cpu", sets)
    return on_rank(schedule, groups, groups.rank)


def test_gloo_ranks_give_each_sample_what_one_device_gives(pool):
    check(CASES["waves"], pool.run(_on_gloo, CASES["waves"]))


def test_groups_are_neighbours_of_every_degree():
    spec, sets = split_for_samples(MeshSpec((("dp_shard", 2), ("cp", 12))))
    assert spec.axes == (("dp_shard", 2), ("cp_12", 3), ("cp_4", 2), ("cp_2", 2))
    assert sets == [("cp_4", "cp_2"), ("cp_12", "cp_4", "cp_2")]
    groups = groups_for_samples(Groups(spec, 12 + 7))
    assert {degree: (g.size, g.rank) for degree, g in groups.items()} == {1: (1, 0), 2: (2, 1), 4: (4, 3), 12: (12, 7)}


def test_rows_that_are_not_the_schedules_are_refused():
    q = torch.zeros(1, H, 7, D)
    groups = {4: Groups(MeshSpec((("cp", 4),)), 0).group("cp")}
    with pytest.raises(PlanError) as refusal:
        run_dynamic(q, q, q, RAGGED, groups)
    assert refusal.value.code == "context-shape"
