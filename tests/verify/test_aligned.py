"""Programs on simulated ranks: right ones align to rounding, damaged ones are found where they go wrong."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import meshplan as mp
from benchmarks.injected_faults import PROGRAMS, RULES, Fault, at, boundaries, llama, llama_plan, nets
from meshplan.models.llama import Llama, LlamaConfig
from meshplan.verify.aligned import align

TOLD = [f for f in PROGRAMS if "feed forward" not in f.name and "data" not in f.name]


@pytest.mark.parametrize("mesh", [{"dp_shard": 2, "tp": 2}, {"dp_replicate": 2, "dp_shard": 2}, {"tp": 2}])
def test_a_block_aligns_on_every_mesh(mesh: dict[str, int]) -> None:
    plan = llama_plan()
    plan = replace(plan, mesh=mesh) if "tp" in mesh else replace(plan, mesh=mesh, rules=())
    done = align(llama(), plan, 4 if len(mesh) > 1 else 2)
    assert done.distance < 1e-12
    assert done.parameters == len(list(llama().parameters()))
    assert done.gradients > done.calls / 2


def test_recompute_and_tied_weights_align() -> None:
    model = Llama(LlamaConfig(dim=32, n_layers=2, n_heads=4, n_kv_heads=2, vocab_size=127, ffn_dim=48, tied=True))
    plan = replace(llama_plan(), recompute=mp.Recompute(units=["layers.*"]))
    assert align(model, plan, 4).distance < 1e-12


def test_an_uneven_sequence_aligns() -> None:
    rows = mp.Input(shape=(2, 13), dtype=torch.int64, place={"dp": mp.S(0)})
    plan = replace(llama_plan(), inputs={"tokens": rows, "labels": rows})
    assert align(llama(), plan, 4).distance < 1e-12


def test_the_users_model_is_left_alone() -> None:
    model = llama()
    before = {n: (p.dtype, p.clone(), p.grad) for n, p in model.named_parameters()}
    align(model, llama_plan(), 4)
    assert type(model) is Llama
    for name, p in model.named_parameters():
        dtype, value, grad = before[name]
        assert p.dtype == dtype and torch.equal(p, value) and p.grad is grad


def test_a_value_of_another_layout_is_said_with_both_layouts_and_the_line() -> None:
    dropped = boundaries(at("layers.0.attention.wo", src="I"))
    with pytest.raises(mp.PlanError) as error:
        align(llama(), llama_plan(), 4, tamper=dropped)
    assert error.value.code == "not-aligned"
    assert error.value.where is not None and error.value.where.file.endswith("llama.py")
    assert "as claimed: no layout explains them" in str(error.value)


def test_a_gradient_is_traced_to_the_last_call_it_is_right_at() -> None:
    with pytest.raises(mp.PlanError, match="the gradient of its result does not fit") as error:
        align(llama(), llama_plan(), 4, tamper=boundaries(at("layers.0.feed_forward", dst="I")))
    # Backward passes through the feed-forward first: what precedes it is where the wrong gradient arrives.
    assert error.value.module == "layers.0.ffn_norm"


@pytest.mark.parametrize("fault", TOLD, ids=lambda f: f.name)
def test_a_damaged_program_is_found(fault: Fault) -> None:
    assert nets(fault)[2] not in ("", "-")


@pytest.mark.parametrize("fault", RULES, ids=lambda f: f.name)
def test_a_wrong_rule_is_found_before_the_program_runs_and_again_when_it_does(fault: Fault) -> None:
    first, second, third = nets(fault)
    assert first or (second == "rule-refuted" and third)


class FirstOfSequence(torch.nn.Module):
    """A result that every data rank needs whole: the batch is gathered, and its gradient is one of averaged ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(4, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.up(x).median(0).values.pow(3).sum() + self.up(x).mean().exp()


@pytest.mark.parametrize("axis", ["dp_shard", "dp_replicate"])
def test_whole_values_behind_a_split_batch_align(axis: str) -> None:
    # On a data axis a rank's share of a gradient is kept times the degree, and a whole one is not.
    x = mp.Input(shape=(4, 5, 4), dtype=torch.float64, place={"dp": mp.S(0)})
    assert align(FirstOfSequence(), mp.Plan(mesh={axis: 2}, inputs={"x": x}), 2).distance < 1e-12


class Remembers(nn.Module):
    """Leaves a result of each forward in an attribute, as models with a recurrent state do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.whole, self.state = nn.Linear(6, 4), nn.Linear(6, 6), None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.state = self.whole(x)
        return self.inner(self.state).pow(2).sum()


def test_what_a_forward_leaves_in_an_attribute_is_no_part_of_the_ranks_models() -> None:
    plan = mp.Plan(
        mesh={"tp": 2},
        inputs={"x": mp.Input(shape=(3, 6), dtype=torch.float64)},
        rules=[mp.Rule("inner", params={"weight": {"tp": mp.S(0)}, "bias": {"tp": mp.S(0)}})],
    )
    assert align(Remembers(), plan, 2).parameters == 4
