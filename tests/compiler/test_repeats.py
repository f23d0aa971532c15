"""Equal layers are traced once, and the result is what tracing each of them gives."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor, nn

import meshplan as mp
from meshplan.compiler import compile as compiling
from meshplan.compiler.foldable import foldable
from meshplan.compiler.repeats import equal_layers, moved_path
from meshplan.compiler.skeleton import fake_world
from meshplan.models.llama import Llama, LlamaConfig
from meshplan.verify.aligned import align


def llama(**change: object) -> Llama:
    sizes = {"dim": 24, "n_layers": 4, "n_heads": 6, "n_kv_heads": 2, "ffn_dim": 40, "vocab_size": 31}
    return Llama(LlamaConfig(**{**sizes, **change}))


RULES = [
    mp.Rule("tok_embeddings", use="embedding", output={"tp": mp.S(1)}),
    mp.Rule("layers.*.{attention_norm,ffn_norm}", use="sequence"),
    mp.Rule("layers.*.attention.{wq,wk,wv}", use="colwise"),
    mp.Rule("layers.*.attention.wo", use="rowwise", output={"tp": mp.S(1)}),
    mp.Rule("layers.*.feed_forward.{w1,w3}", use="colwise"),
    mp.Rule("layers.*.feed_forward.w2", use="rowwise", output={"tp": mp.S(1)}),
    mp.Rule("norm", use="sequence"),
    mp.Rule("output", use="vocab_head"),
]


def plan(rules: list[mp.Rule], **sections: object) -> mp.Plan:
    item = mp.Input(shape=(4, 10), dtype=torch.int64, place={"dp": mp.S(0)})
    return mp.Plan(mesh={"dp_shard": 2, "tp": 2}, inputs={"tokens": item, "labels": item}, rules=rules, **sections)


def both_ways(model: nn.Module, p: mp.Plan, monkeypatch: pytest.MonkeyPatch) -> tuple[dict, dict]:
    once = mp.lower(model, p, 4).to_json()
    monkeypatch.setattr(compiling, "foldable", lambda *args: {})
    return once, mp.lower(model, p, 4).to_json()


def unordered(items: list[dict]) -> list[str]:
    return sorted(json.dumps(item, sort_keys=True) for item in items)


@pytest.mark.parametrize("change", [{}, {"dropout": 0.1}, {"qk_norm": True}, {"tied": True}])
def test_one_trace_for_equal_layers_gives_what_all_traces_give(change, monkeypatch):
    sections = {"fsdp": mp.Fsdp(units=["layers.*"]), "recompute": mp.Recompute(units=["layers.*"])}
    once, each = both_ways(llama(**change), plan(RULES, **sections), monkeypatch)
    assert once["collectives"] == each["collectives"] and len(once["collectives"]) > 40
    for key in ("boundaries", "edits", "placements"):
        assert unordered(once[key]) == unordered(each[key])


def test_a_rule_for_one_layer_makes_it_unlike_the_others(monkeypatch):
    one = mp.Rule("layers.2.feed_forward.w2", output={"tp": mp.R}, override=True)
    once, each = both_ways(llama(), plan([*RULES, one]), monkeypatch)
    assert once["collectives"] == each["collectives"]
    ops = [
        (c["module"], c["phase"], c["op"])
        for c in once["collectives"]
        if c["module"] in ("layers.2", "layers.2.feed_forward.w2")
    ]
    # Summed whole, and cut again where it meets the residual stream, whose mate gathers.
    assert ops == [("layers.2.feed_forward.w2", "forward", "all_reduce"), ("layers.2", "backward", "all_gather")]


def test_only_traced_calls_grow_with_distinct_layers(monkeypatch):
    counted = []
    real = compiling.capture

    def counting(*args: object) -> object:
        made = real(*args)
        counted.append(len(made[1].calls))
        return made

    monkeypatch.setattr(compiling, "capture", counting)
    mp.lower(llama(n_layers=2), plan(RULES), 4)
    mp.lower(llama(n_layers=9), plan(RULES), 4)
    assert counted[0] == counted[1]


class Scaled(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor
        self.up = nn.Linear(6, 8, bias=False)
        self.down = nn.Linear(8, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x) * self.factor if self.factor > 1 else self.up(x))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Scaled(1.0), Scaled(1.0), Scaled(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)


def test_an_attribute_that_differs_keeps_layers_apart():
    p = mp.Plan(
        mesh={"tp": 2},
        inputs={"x": mp.Input(shape=(3, 6), dtype=torch.float32, place={})},
        rules=[mp.Rule("blocks.*.up", use="colwise"), mp.Rule("blocks.*.down", use="rowwise")],
    )
    core = mp.lower(Stack(), p, 2).core
    kinds = {name: compiling._param_kinds(core.bound, name, []) for name in core.bound.params}
    equal, numbered = equal_layers(Stack(), core.bound, kinds)
    assert set(equal) == {"blocks.0", "blocks.1"} and not numbered


class Numbered(nn.Module):
    """A layer that knows its place in the list, as transformers' do; `use` is what it does with it."""

    def __init__(self, layer_idx: int, use: str) -> None:
        super().__init__()
        self.layer_idx, self.use = layer_idx, use
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor, kept: list[Tensor] | None = None) -> Tensor:
        h = self.up(x)
        if self.use == "scale":
            h = h / (self.layer_idx + 1)
        if self.use == "branch" and self.layer_idx == 1:
            h = h.relu()
        return x + self.down(h)


class Places(nn.Module):
    def __init__(self, use: str) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Numbered(i, use) for i in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize(
    ("use", "alike"),
    [("nothing", [[0, 1, 2, 3]]), ("scale", []), ("branch", [[0, 2, 3]])],
    ids=["nothing", "scale", "branch"],
)
def test_layers_that_know_their_place_are_equal_when_their_calls_are(use, alike):
    p = mp.Plan(
        mesh={"tp": 2},
        inputs={"x": mp.Input(shape=(3, 6), dtype=torch.float32, place={})},
        rules=[mp.Rule("blocks.*.up", use="colwise"), mp.Rule("blocks.*.down", use="rowwise")],
    )
    model = Places(use)
    core = mp.lower(model, p, 2).core
    kinds = {name: compiling._param_kinds(core.bound, name, []) for name in core.bound.params}
    with fake_world() as mode, mode:
        groups = foldable(model, mode, core.bound, kinds, {"x": torch.empty(3, 6, requires_grad=True)})
    found: dict[int, list[int]] = {}
    for path, number in groups.items():
        found.setdefault(number, []).append(int(path.split(".")[1]))
    assert list(found.values()) == alike


class Cache:
    """Holds what each layer hands it, as a cache of keys and values does."""

    def __init__(self) -> None:
        self.held: list[Tensor] = []


class Writing(Numbered):
    def forward(self, x: Tensor, kept: Cache | None = None) -> Tensor:
        h = self.up(x)
        if kept is not None:
            kept.held.append(h)
        return x + self.down(h)


class Writes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Writing(i, "nothing") for i in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        kept = Cache()
        for block in self.blocks:
            x = block(x, kept)
        return torch.stack([h.sum() for h in kept.held]).sum() + x.sum()


def test_layers_that_write_into_an_object_are_each_traced():
    p = mp.Plan(
        mesh={"tp": 2},
        inputs={"x": mp.Input(shape=(3, 6), dtype=torch.float64, place={})},
        rules=[mp.Rule("blocks.*.up", use="colwise"), mp.Rule("blocks.*.down", use="rowwise")],
    )
    core = mp.lower(Writes().double(), p, 2).core
    sums = [d for d in core.program.decided if d.call.name == "sum" and d.call.module == ""]
    assert len(sums) == 5


def test_moved_path_moves_only_what_lies_under_the_prefix():
    assert moved_path("layers.1.wq", "layers.1", "layers.7") == "layers.7.wq"
    assert moved_path("layers.1", "layers.1", "layers.7") == "layers.7"
    assert moved_path("layers.12.wq", "layers.1", "layers.7") is None


class Fan(nn.Module):
    """One tensor, handed to a module that the plan moves it for and to equal ones that it does not."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.rest = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = x.tanh()
        return torch.stack([self.first(x), *(layer(x) for layer in self.rest)]).square().mean()


@pytest.mark.parametrize(("dim", "place"), [(1, mp.S(2)), (0, mp.R)])
def test_equal_layers_that_share_a_redistribution_with_another_module(dim, place):
    # The first of them found the moved tensor inside itself, and the others were taken to do without the move.
    h = {"tp": mp.S(1)} if place == mp.R else {}
    fan = mp.Plan(
        mesh={"tp": 2}, inputs={"x": mp.Input((3, 6, 8), torch.float64, h)},
        rules=[
            mp.Rule("first", input={"input": {"tp": place}}, params={"weight": {"tp": mp.S(dim)}}),
            mp.Rule("rest.*", params={"weight": {"tp": mp.S(dim)}}),
        ],
    )  # fmt: skip
    align(Fan().double(), fan, 2)
    moved = {b.site.module for b in mp.lower(Fan().double(), fan, 2).core.program.boundaries if b.site.side == "input"}
    assert moved >= {"first", "rest.0", "rest.1", "rest.2"}
