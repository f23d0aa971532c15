"""The value check of a lowering: what it asks once, what it refuses and where, and the way out."""

import linecache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshplan as mp
from meshplan.compiler import check
from meshplan.compiler.kinds import R
from meshplan.compiler.rules import semantic
from meshplan.compiler.rules.base import Op, Strategy
from meshplan.plan.placements import Shard


class Two(nn.Module):
    """Two equal blocks of a column-split and a row-split projection."""

    def __init__(self) -> None:
        super().__init__()
        self.ups = nn.ModuleList(nn.Linear(6, 10, bias=False) for _ in range(2))
        self.downs = nn.ModuleList(nn.Linear(10, 6) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for up, down in zip(self.ups, self.downs, strict=True):
            x = down(F.gelu(up(x)))
        return x.sum()


def plan() -> mp.Plan:
    return mp.Plan(
        mesh={"tp": 2},
        inputs={"x": mp.Input(shape=(4, 6), dtype=torch.float32)},
        rules=[mp.Rule("ups.*", use="colwise"), mp.Rule("downs.*", use="rowwise")],
    )


@pytest.fixture
def bias_on_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule book in which a row-split linear adds its bias once a rank."""
    right = semantic.RULES[F.linear]

    def wrong(op: Op, n: int) -> list[Strategy]:
        lie = [Strategy((Shard(1), Shard(1), R), (semantic.P,))] if len(op.ins) == 3 else []
        return lie + right(op, n)

    monkeypatch.setitem(semantic.RULES, F.linear, wrong)


def test_each_distinct_use_is_asked_once() -> None:
    checked = mp.lower(Two(), plan(), 2).core.program.checked
    # gelu, the column-split linear (its first input wants no gradient, its second does), and the row-split one.
    assert checked.uses == 4
    assert checked.skipped == () and checked.how == "values"


def test_a_verdict_is_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    mp.lower(Two(), plan(), 2)
    monkeypatch.setattr(check, "refute", lambda use: pytest.fail(f"{use.name} was run again"))
    mp.lower(Two(), plan(), 2)


@pytest.mark.usefixtures("bias_on_every_rank")
def test_a_wrong_rule_is_refused_with_the_users_line() -> None:
    with pytest.raises(mp.PlanError) as error:
        mp.lower(Two(), plan(), 2)
    assert error.value.code == "rule-refuted"
    assert error.value.module == "downs.0"
    where = error.value.where
    assert where is not None and where.line is not None
    assert linecache.getline(where.file, where.line).strip() == "x = down(F.gelu(up(x)))"
    assert "linear([4, 10]: S(1), [6, 10]: S(1), [6]: R) -> P over 2 ranks on tp" in str(error.value)


@pytest.mark.usefixtures("bias_on_every_rank")
def test_the_check_can_be_turned_off() -> None:
    assert mp.lower(Two(), plan(), 2, check="off").core.program.checked.how == "off"


def test_another_word_than_the_known_ones_is_refused() -> None:
    with pytest.raises(mp.PlanError, match="bad-check"):
        mp.lower(Two(), plan(), 2, check="maybe")


class Crossing(nn.Module):
    """A reshape whose factors cross, so that no shorter relative of it is known, of 2.4 million elements."""

    def forward(self, x: Tensor) -> Tensor:
        return x.view(3000, 800).sum()


def test_what_is_too_large_to_run_is_said() -> None:
    x = mp.Input(shape=(2400, 1000), dtype=torch.float32, place={"dp": mp.S(0)})
    low = mp.lower(Crossing(), mp.Plan(mesh={"dp_replicate": 2}, inputs={"x": x}), 2)
    (skipped,) = low.core.program.checked.skipped
    assert skipped.startswith("view([2400, 1000]: S(0)) -> S(0) over 2 ranks on dp_replicate")
    assert f"not checked by value: {skipped}" in low.notes
