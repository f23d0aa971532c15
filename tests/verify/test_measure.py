"""Timed steps on real ranks: what is measured, counted or refused. No assertion is about speed."""

import dataclasses

import torch

import meshplan as mp
from meshplan.verify import measure as measuring
from meshplan.verify.measure import ONE_DEVICE, PEER, Measured, Task, measure


def task(name: str, mesh: dict[str, int], **sections) -> Task:
    plan = mp.load_plan(f"llama3/{name}")
    inputs = {key: dataclasses.replace(item, shape=(4, 16)) for key, item in plan.inputs.items()}
    return Task("llama-tiny", dataclasses.replace(plan, mesh=mesh, inputs=inputs, **sections), steps=1)


def test_all_ranks_report_the_same_programs_and_the_counted_bytes(pool):
    asked = task("tp_sp", {"tp": 2})
    replies = pool.run(measure, asked, world=2)
    found: Measured = replies[0]
    assert replies[1] == found
    assert found.mesh == {"tp": 2} and found.tokens == 4 * 16 and not found.why_not
    for steps in (found.ours, found.peer, found.single):
        assert min(steps.step_s, steps.host_s) > 0 and steps.peak_bytes > 10**6
    (tp,) = found.axes
    # Residual stream of 64 x 64 floats: 8 collectives in each of 2 blocks and 4 outside; three numbers a token in the
    # loss; five norms' gradients.
    assert tp.bytes == (2 * 8 + 4) * 64 * 64 * 4 + 3 * 64 * 4 + 5 * 64 * 4
    assert tp.collectives == 2 * 8 + 4 + 2 + 1 and tp.seconds > 0


def test_what_has_no_peer_is_not_compared_and_says_so(pool):
    asked = task("fsdp", {"dp_shard": 2}, recompute=mp.Recompute(units=["layers.*"]))
    found = pool.run(measure, asked, world=2)[0]
    assert found.peer is None and found.single is not None
    assert found.why_not == {PEER: "no equivalent of a plan with a section `recompute`"}


def _crowded(asked: Task) -> Measured:
    measuring._free = lambda device: 10**5
    try:
        return measure(asked)
    finally:
        measuring._free = _free


_free = measuring._free


def test_a_model_that_does_not_fit_one_device_is_not_run_there(pool):
    found = pool.run(_crowded, task("ddp", {"dp_replicate": 2}), world=2)[0]
    parameters = 2 * (4 * 64 * 64 - 2 * 32 * 64 + 3 * 64 * 176 + 2 * 64) + 2 * 256 * 64 + 64
    assert found.single is None
    # Four numbers of four bytes each.
    assert found.why_not[ONE_DEVICE].startswith(
        f"does not fit: parameters, gradients and optimizer take {16 * parameters:,}"
    )


def test_parameters_of_an_optimizer_group_share_a_mesh(pool):
    groups = pool.run(_group_sizes, world=1)[0]
    assert groups == [2, 1]


def _group_sizes() -> list[int]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate

    model = torch.nn.Linear(3, 2)
    mesh = init_device_mesh("cpu", (1,))
    model.extra = torch.nn.Parameter(DTensor.from_local(torch.ones(2), mesh, [Replicate()], run_check=False))
    return [len(g["params"]) for g in measuring._groups(model)]
