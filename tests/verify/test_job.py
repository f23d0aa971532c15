"""Models and batches of a job: random everywhere, the same bits wherever they are built."""

import pytest
import torch
from torch import nn

from meshplan.errors import PlanError
from meshplan.plan.plan import Plan
from meshplan.verify.job import Job, build, comparable, find_loss, in_dtype, randomise


class _Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(5, 3), nn.Linear(5, 3, bias=False), nn.LayerNorm(3)
        self.b.weight = self.a.weight
        nn.init.zeros_(self.a.bias)
        self.register_buffer("table", torch.arange(3.0))


def _on_meta() -> nn.Module:
    with torch.device("meta"):
        return nn.Linear(4, 3)


def _no_module() -> int:
    return 3


def _job(factory, seed=0, **options):
    return Job(factory, Plan(mesh={"dp_shard": 1}), 1, seed=seed, **options)


def test_no_parameter_is_left_constant_and_ties_stay():
    model = build(_job(_Odd))
    assert all(p.unique().numel() == p.numel() for p in model.parameters())
    assert model.b.weight is model.a.weight
    assert model.a.bias.std() > 0.01
    assert model.norm.weight.mean().item() == pytest.approx(1.0, abs=0.3)  # noise around what it was, not instead of it


def test_a_seed_gives_the_same_bits_and_another_seed_others():
    first, again, other = build(_job(_Odd)), build(_job(_Odd)), build(_job(_Odd, seed=1))
    assert all(torch.equal(p, q) for p, q in zip(first.parameters(), again.parameters(), strict=True))
    assert not any(torch.equal(p, q) for p, q in zip(first.parameters(), other.parameters(), strict=True))


def test_the_noise_of_a_parameter_depends_on_its_name_alone():
    long, short = _Odd(), nn.ModuleDict({"a": nn.Linear(5, 3)})
    with torch.no_grad():
        short["a"].weight.copy_(long.a.weight)
    randomise(long, 3)
    randomise(short, 3)
    assert torch.equal(long.a.weight, short["a"].weight)


def test_parameters_and_buffers_take_the_dtype():
    model = build(_job(_Odd, dtype=torch.float64))
    assert {t.dtype for t in (*model.parameters(), *model.buffers())} == {torch.float64}
    batch = in_dtype({"x": torch.ones(2), "ids": torch.ones(2, dtype=torch.int64), "flag": True}, torch.float64)
    assert (batch["x"].dtype, batch["ids"].dtype, batch["flag"]) == (torch.float64, torch.int64, True)


def test_a_model_on_meta_is_materialised_and_initialised():
    first, again = build(_job(_on_meta)), build(_job(_on_meta))
    assert not first.weight.is_meta
    assert torch.equal(first.weight, again.weight)
    assert first.weight.unique().numel() == 12


def test_a_factory_that_builds_no_module_is_refused():
    with pytest.raises(PlanError) as caught:
        build(_job(_no_module))
    assert caught.value.code == "bad-model"


class _Output:
    def __init__(self, loss):
        self.logits, self.loss = torch.ones(2, 2), loss


@pytest.mark.parametrize(
    "output",
    [
        torch.tensor(3.0),
        (torch.ones(2), torch.tensor(3.0)),
        {"aux": torch.tensor(1.0), "loss": torch.tensor(3.0)},
        [torch.tensor(7), {"nested": torch.tensor(3.0)}],  # a 0-dim integer is a count, not a loss
        _Output(torch.tensor(3.0)),
    ],
)
def test_the_loss_is_found_in_the_output(output):
    assert find_loss(output, {}).item() == 3.0


def test_an_output_without_a_loss_is_refused():
    with pytest.raises(PlanError) as caught:
        find_loss((torch.ones(2), None), {})
    assert caught.value.code == "no-loss"


def test_mixed_precision_and_compile_are_left_out_and_said():
    plan = Plan(
        mesh={"dp_shard": 2},
        fsdp={"units": ["a"], "param_dtype": "bfloat16", "reduce_dtype": "float32"},
        compile={"units": ["a"]},
    )
    bare, notes = comparable(plan)
    assert (bare.fsdp.param_dtype, bare.fsdp.reduce_dtype, bare.compile) == (None, None, None)
    assert bare.fsdp.units == ("a",)
    assert notes[0].startswith("mixed precision (fsdp: param_dtype bfloat16, reduce_dtype float32)")
    assert notes[1].startswith("torch.compile")
    assert comparable(bare) == (bare, ())
