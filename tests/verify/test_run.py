"""Verification end to end, with plain FSDP2 and deliberately broken programs standing in for meshplan's own."""

import os

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from meshplan.errors import PlanError
from meshplan.plan.placements import S
from meshplan.plan.plan import Input, Plan
from meshplan.plan.rules import Rule
from meshplan.verify.rank import Program
from meshplan.verify.run import verify

PLAN = Plan(
    mesh={"dp_shard": -1},
    inputs={
        "x": Input((4, 5), torch.float32, {"dp": S(0)}),
        "labels": Input((4,), torch.int64, {"dp": S(0)}),
    },
)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3)
        self.dropout = nn.Dropout(0.0)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.down(self.dropout(self.norm(torch.tanh(self.up(x)))))
        return F.cross_entropy(logits, labels.clamp(min=0), reduction="mean")


class CountsLocally(Net):
    """Divides by the valid labels it sees, which on a rank are the rank's own."""

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.down(self.norm(torch.tanh(self.up(x)))), labels)


class RaisesOnRank(Net):
    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if dist.is_initialized() and dist.get_world_size() == 2 and dist.get_rank() == 1:
            raise ValueError("no such luck")
        return super().forward(x, labels)


def _rows(batch: dict) -> dict:
    n, r = dist.get_world_size(), dist.get_rank()
    return {name: value.chunk(n)[r].clone() for name, value in batch.items()}


def _entry(phase: str, op: str, elements: int) -> dict:
    return {
        "phase": phase, "op": op, "axis": "dp_shard", "ranks_per_group": 2, "count": 1, "dtype": "float64",
        "elements": elements, "module": "", "tensor": "parameters",
    }  # fmt: skip


def _fsdp_collectives() -> list[dict]:
    # One unit: rows padded to 2 ranks, up 8 x 5 + 8, norm 8 + 8, down 4 x 7 + 4. The root stays gathered.
    return [_entry("forward", "all_gather", 96), _entry("backward", "reduce_scatter", 96)]


def fsdp(model: nn.Module, plan: Plan, batch: dict) -> Program:
    fully_shard(model, mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",)))
    return Program(model, _rows, _fsdp_collectives)


def no_reduction(model: nn.Module, plan: Plan, batch: dict) -> Program:
    """Every rank trains on its own rows: replicas drift."""
    return Program(model, _rows, list)


def sum_not_mean(model: nn.Module, plan: Plan, batch: dict) -> Program:
    """Adds gradients over the ranks and forgets to divide; AdamW hides it, the gradients show it."""
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad))
    sizes = [p.numel() for p in reversed(list(model.parameters()))]
    return Program(model, _rows, lambda: [_entry("backward", "all_reduce", n) for n in sizes])


def wrong_rows(model: nn.Module, plan: Plan, batch: dict) -> Program:
    """Gives ranks of one tp group different rows."""
    return Program(model, _rows, list)


def optimistic(model: nn.Module, plan: Plan, batch: dict) -> Program:
    """Forgets in its graph that gradients are reduced."""
    made = fsdp(model, plan, batch)
    return Program(made.model, made.shard, lambda: made.predicted()[:1])


def untied(model: nn.Module, plan: Plan, batch: dict) -> Program:
    made = fsdp(model, plan, batch)
    made.model.extra = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    return made


def _verify(factory, program, plan=PLAN, **options):
    return verify(factory, plan, nproc=2, program=program, **options)


@pytest.fixture(autouse=True)
def _ranks(pool):
    """verify borrows the session's pool."""


def test_a_right_program_passes_every_check():
    receipt = _verify(Net, fsdp, steps=3)
    assert receipt.passed, str(receipt)
    assert {c.name for c in receipt.checks} == {
        "loss", "gradients", "parameters", "replicas", "inputs", "collectives", "initialisation",
    }  # fmt: skip
    assert receipt.check("gradients").error < 1e-13
    assert receipt.check("collectives").detail == "2 a step and rank, as predicted, one by one"
    assert (receipt.composition, receipt.model) == ("dp_shard 2", "Net")
    assert receipt.inputs == {"x": "float64[4, 5]", "labels": "int64[4]"}


class Shouts(nn.Module):
    """A loss in the millions, and a bias of whose gradient, which is zero, only rounding is left."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(6, 4), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seen = (self.query(x) @ self.key(x).transpose(-1, -2)).softmax(-1) @ x
        return seen.pow(2).mean() * 1e7


def test_rounding_beside_large_gradients_is_no_difference():
    plan = Plan(
        mesh={"tp": 2},
        inputs={"x": Input((2, 5, 6), torch.float32)},
        rules=(Rule("query", use="colwise"), Rule("key", use="colwise")),
    )
    receipt = verify(Shouts, plan, nproc=2)
    assert receipt.passed, receipt.checks


def test_float32_passes_at_its_own_tolerance():
    receipt = _verify(Net, no_reduction, dtype=torch.float32, inputs=_same_rows)
    assert receipt.check("loss").tolerance == 1e-5
    assert receipt.check("gradients").passed and receipt.check("replicas").passed


def _same_rows() -> dict:
    # Both ranks hold equal rows, so that their own gradients are the global ones.
    x = torch.linspace(-1, 1, 10, dtype=torch.float64).view(2, 5)
    return {"x": torch.cat([x, x]), "labels": torch.tensor([1, 2, 1, 2])}


def test_missing_reductions_are_seen_in_gradients_and_replicas():
    receipt = _verify(Net, no_reduction)
    wrong = {c.name for c in receipt.checks if not c.passed}
    assert wrong == {"loss", "gradients", "parameters", "replicas"}
    assert receipt.check("loss").detail.startswith("step 1")  # the first step starts from equal parameters
    assert receipt.check("replicas").detail == "up.weight differs between ranks 0 and 1"
    assert receipt.check("gradients").error > 0.05


def test_a_sum_that_should_be_a_mean_is_seen_in_the_gradients():
    gradients = _verify(Net, sum_not_mean, steps=1).check("gradients")
    assert gradients.error == pytest.approx(1.0)  # twice the true gradient


def test_a_mean_of_means_is_seen_because_label_counts_differ():
    receipt = _verify(CountsLocally, fsdp)
    assert not receipt.check("loss").passed
    assert not receipt.check("gradients").passed
    assert receipt.check("collectives").passed


def test_an_incomplete_graph_is_told_by_its_first_difference():
    collectives = _verify(Net, optimistic).check("collectives")
    assert not collectives.passed
    assert collectives.detail == (
        "step 0, rank 0: 1 predicted, then unforeseen backward reduce_scatter of 96 float64 over ranks [0, 1]"
    )


def test_ranks_beside_each_other_on_tp_must_hold_the_same_inputs():
    plan = Plan(mesh={"tp": 2}, inputs={name: Input(i.shape, i.dtype) for name, i in PLAN.inputs.items()})
    inputs = _verify(Net, wrong_rows, plan).check("inputs")
    assert not inputs.passed
    assert inputs.detail == "x differs between ranks 0 and 1"


def test_a_parameter_that_one_device_lacks_is_named():
    parameters = _verify(Net, untied).check("parameters")
    assert not parameters.passed
    assert parameters.detail == "names differ from one device: extra"


def _by_rank() -> dict:
    generator = torch.Generator().manual_seed(int(os.environ["RANK"]))
    return {"x": torch.randn(4, 5, generator=generator), "labels": torch.ones(4, dtype=torch.int64)}


def test_a_batch_that_depends_on_the_rank_is_refused():
    with pytest.raises(PlanError, match="rank 1 was given another global batch") as caught:
        _verify(Net, fsdp, inputs=_by_rank)
    assert caught.value.code == "inputs-differ"


def test_an_error_on_one_rank_reaches_the_caller():
    with pytest.raises(ValueError, match="no such luck"):
        _verify(RaisesOnRank, fsdp)


def test_a_mesh_that_does_not_fit_is_refused_before_anything_starts():
    with pytest.raises(PlanError) as caught:
        _verify(Net, fsdp, Plan(mesh={"dp_shard": 3}))
    assert caught.value.code == "mesh-size"


@pytest.mark.parametrize("options", [{"steps": 0}, {"dtype": torch.int64}])
def test_options_that_compare_nothing_are_refused(options):
    with pytest.raises(PlanError) as caught:
        _verify(Net, fsdp, **options)
    assert caught.value.code == "bad-value"
