"""After a refusal little by little more stays whole, around what it named; what nothing could mend is said at once."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import meshplan as mp
from meshplan.compiler.skeleton import fake_world
from meshplan.errors import PlanError
from meshplan.mesh.spec import MeshSpec
from meshplan.plan.placements import Shard
from meshplan.search.attempts import Search
from meshplan.search.auto import derive
from meshplan.search.axis import Limits
from meshplan.search.stricter import stricter
from meshplan.search.trace import traced
from tests.search.test_units import Own
from tests.search.test_units import batch as small


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(24), nn.Linear(24, 40), nn.Linear(40, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Looks(nn.Module):
    """Takes the last positions of what its blocks return, where these return them all."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.norm = nn.ModuleList(Block() for _ in range(2)), nn.LayerNorm(24)
        self.head = nn.Linear(24, 33)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x
        for block in self.blocks:
            h = block(h)
        h = self.norm(h)
        if h.shape[1] == x.shape[1]:
            h = h[:, -5:, :]
        return self.head(h).square().mean()


def inputs() -> dict[str, torch.Tensor]:
    return {"x": torch.linspace(-1, 1, 3 * 14 * 24).sin().reshape(3, 14, 24)}


def test_what_code_looked_at_is_whole_and_everything_else_is_split(pool) -> None:
    found = derive(Looks(), {"tp": 2}, inputs(), sequence=True)
    placed = {name: p.placements.get("tp") for name, p in found.lowered.core.bound.params.items() if "norm" not in name}
    assert all(isinstance(p, Shard) for name, p in placed.items() if name.endswith("weight")), placed
    assert any(isinstance(m.want, Shard) for m in found.choice.moves)  # between the blocks the sequence is cut
    receipt = mp.verify(Looks, found.plan, nproc=2, inputs=inputs())
    assert receipt.passed, str(receipt)


def test_every_step_holds_more_of_the_program_and_the_last_one_is_no_step() -> None:
    with fake_world() as mode:
        spec = MeshSpec.resolve({"tp": 2}, 2)
        program = traced(Looks(), mp.Plan(mesh={"tp": 2}), inputs(), mode, spec).program
    error = PlanError("refused", code="diverged", module="blocks.1.norm")
    limits, steps = Limits(), 0
    while (held := stricter(program, limits, error)) is not None:
        assert (held.calls, held.values) > (limits.calls, limits.values)
        assert limits.calls <= held.calls and limits.values <= held.values
        limits, steps = held, steps + 1
    inside = {n for n, node in enumerate(program.nodes) if node.call.module.startswith("blocks.")}
    assert limits.calls == inside and steps == 4


def test_no_choice_is_tried_against_what_no_choice_can_mend(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []
    lowered = Search._lowered
    monkeypatch.setattr(Search, "_lowered", lambda self, choice: tried.append(choice) or lowered(self, choice))
    with pytest.raises(PlanError) as error:
        derive(Own(), {"dp_shard": 2, "tp": 2}, small(), fsdp={"units": ["layers.*"]})
    assert error.value.code == "tied-across-units" and len(tried) == 1
