"""`Lowered`: what a user reads of a lowered program, as objects, as a graph, as text and as a dict."""

from __future__ import annotations

import copy
import hashlib
import json
import math
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import networkx as nx
import torch
from torch import nn

from meshplan.compiler.commgraph import Collective, collectives, fsdp_of, local_param_shape
from meshplan.compiler.compile import compile_core
from meshplan.compiler.experts_report import experts_json, rounding
from meshplan.compiler.fsdp_cuts import fsdp_cuts
from meshplan.compiler.gathers import Gather, gathers, kept_bytes
from meshplan.compiler.kinds import user_letter
from meshplan.compiler.lowered import Core
from meshplan.compiler.probes import ids
from meshplan.compiler.skeleton import shared_objects
from meshplan.compiler.symbolic import Counts, symbolic_counts
from meshplan.mesh.spec import MeshSpec
from meshplan.mesh.topology import Topology, warnings
from meshplan.plan.placements import Shard
from meshplan.plan.plan import Plan
from meshplan.plan.shorthands import expand
from meshplan.runtime.comm import chunk_sizes


class Lowered:
    """One plan lowered for one model and world. Attributes are worked out when asked for.

    Attributes:
        core: the compiler's result.
        plan: the plan.
        rank: whose program it is (ranks differ only where shards are uneven).
    """

    def __init__(self, model: nn.Module, core: Core, rank: int = 0, keep: bool = True) -> None:
        self.core, self.rank = core, rank
        self.name = type(model).__name__
        self._model = meta_copy(model) if keep else model

    @property
    def plan(self) -> Plan:
        return self.core.bound.plan

    @property
    def pristine(self) -> nn.Module:
        """The single-device model on meta, for lowering again."""
        return self._model

    @property
    def predicted(self) -> bool:
        """Whether `collectives` is what will run; False only for DTensor regions that could not be rehearsed."""
        return True

    @property
    def collective_ids(self) -> list[str]:
        """A name for each of `collectives`, by which `counts` speaks of it."""
        return ids(self.collectives)

    @cached_property
    def collectives(self) -> list[Collective]:
        """Every collective of one training step, in program order (counted)."""
        return collectives(self._model, self.core, self.rank)

    @cached_property
    def gathers(self) -> list[Gather]:
        """Every sequence gathered at a module's input that backward needs, with what keeping it costs, and what gathering it
        again does (`recompute: {policy: none, gather: regather}`)."""
        return gathers(self.core.program.events)

    @cached_property
    def placements(self) -> list[dict[str, Any]]:
        """For every parameter: name, global shape, this rank's shape between steps, and its layout by axis."""
        cuts = fsdp_cuts(self.core)
        shard = self.core.spec.degree("dp_shard", "cp")
        out = []
        for name, p in self.core.params.items():
            layout = {axis: str(shard) for axis, shard in p.shards}
            shape = list(local_param_shape(p, self.core.spec, self.rank))
            dim = cuts.get(name)
            if dim is not None and shard > 1:
                layout = {a: f"S({dim})" for a in ("dp_shard", "cp") if self.core.spec.degree(a) > 1} | layout
                shape[dim] = chunk_sizes(shape[dim], shard)[self.core.spec.coord(self.rank, "dp_shard", "cp")]
            busy = dict.fromkeys(self.core.spec.parent(a) for a, n in self.core.spec.axes if n > 1)
            layout |= {a: "R" for a in busy if a not in layout}
            out.append({
                "name": name, "shape": list(p.shape), "local_shape": shape, "dtype": p.dtype, "layout": layout,
                "gradient": dict.fromkeys(p.reduce, "partial"),
            })  # fmt: skip
        return out

    @cached_property
    def regions(self) -> dict[str, str]:
        """How each split module subtree runs: all of a lowered program runs on local tensors."""
        split = {p.name.rpartition(".")[0] for p in self.core.params.values() if p.shards}
        return dict.fromkeys(sorted(split), "local")

    @cached_property
    def graph(self) -> nx.DiGraph:
        """Collectives (nodes 0, 1, ... in program order, with their fields) between modules (nodes by path)."""
        graph: nx.DiGraph[Any] = nx.DiGraph()
        previous = None
        for i, c in enumerate(self.collectives):
            graph.add_node(i, kind="collective", **c.to_json())
            graph.add_node(c.module, kind="module")
            graph.add_edge(c.module, i, kind="makes")
            if previous is not None:
                graph.add_edge(previous, i, kind="then")
            previous = i
        return graph

    @cached_property
    def counts(self) -> Counts:
        """Each collective's elements as a sympy expression in `b` (global batch), `s` (sequence) and axis names, by the
        `id` of the collective in `to_json`. Lowers the plan some ten times at other sizes."""
        return symbolic_counts(self._model, self.core)

    def to_json(self, symbolic: bool = False, imbalance: float = 1.0) -> dict[str, Any]:
        """The dict that `meshplan explain --json` prints; see the package documentation for its keys.

        Arguments:
            symbolic: work out `counts` (formulas as text, by collective id), `uncounted` (why one has none) and the
                conditions they rest on; see `Lowered.counts`.
            imbalance: of experts' load, for what ways to dispatch would send; see `experts_json`.
        """
        spec, program = self.core.spec, self.core.program
        units, _ = fsdp_of(self._model, self.core, self.rank)
        return {
            "model": self.name,
            "world_size": spec.world_size,
            "node_size": Topology().node_size,
            "mesh": spec.uncut,
            "sub_axes": spec.sub_axes,
            "context": self._context(),
            "experts": experts_json(self.core, self.rank, imbalance),
            "inputs": {
                name: {"shape": list(key[0][0]), "dtype": key[0][1].removeprefix("torch."), "place": self._place(name)}
                for name, key in program.signature if len(key) == 1 and isinstance(key[0], tuple)
            },
            "placements": self.placements,
            "regions": self.regions,
            "boundaries": [
                {
                    "module": b.site.module, "side": b.site.side, "tensor": b.site.key, "axis": b.move.axis,
                    "from": _shown(b.move.src_kind), "to": _shown(b.move.dst_kind), "where": str(b.where or ""),
                    "implicit": b.implicit,
                }
                for b in program.boundaries
            ],
            "edits": [
                {"module": path, "call": e.func, "ordinal": n, "sizes": e.sized is not None,
                 "operator": e.replacement.name if e.replacement else None, "where": str(e.where or "")}
                for path, edits in program.edits.items() for n, e in sorted(edits.items())
            ],
            "collectives": [{"id": i, **c.to_json()} for i, c in zip(self.collective_ids, self.collectives, strict=True)],
            "predicted": self.predicted,
            "fsdp_units": [
                {"module": u.path, "params": sum(math.prod(p.local_shape) for p in u.params),
                 "bytes": sum(math.prod(p.local_shape) * p.dtype.itemsize for p in u.params)}
                for u in units
            ],
            "gathers": [g.to_json() for g in self.gathers],
            "kept_bytes": kept_bytes(program.events, self._layers()),
            "rules": self._rules(),
            "warnings": [str(w.message) for w in warnings(spec, Topology())],
            "notes": self.notes,
            "conditions": list(self.counts.conditions) if symbolic else self.conditions,
            "counts": {i: str(e) for i, e in self.counts.expressions.items()} if symbolic else {},
            "uncounted": self.counts.unfitted if symbolic else {},
        }  # fmt: skip

    @property
    def notes(self) -> list[str]:
        """What the reader should know that no line of the graph shows."""
        implicit = sum(b.implicit and b.site.side == "call" for b in self.core.program.boundaries)
        found = [f"{implicit} redistributions stand in the middle of a module's code"] if implicit else []
        found += self._skew() + rounding(self.core)
        if any(c.routed for c in self.collectives):
            found.append("what experts exchange is counted for an even routing; a step sends what its own takes")
        return [*found, *(f"not checked by value: {use}" for use in self.core.program.checked.skipped)]

    def _skew(self) -> list[str]:
        """How uneven causal attention is where sequences lie on cp in one run a rank."""
        section, n = self.core.bound.plan.context, self.core.spec.degree("cp")
        if section is None or n == 1 or section.zigzags or section.method == "ulysses":
            return []
        most = f"{(2 * n - 1) / n:.3g} times the mean"
        return [f"contiguous order: under a causal mask the last rank of cp computes {most}; zigzag is even"]

    @property
    def conditions(self) -> list[str]:
        """Divisibility on which this program rests."""
        out = []
        for name, n in self.core.spec.axes:
            if n > 1 and any(a == name for p in self.core.params.values() for a, _ in p.shards):
                out.append(f"sizes of dims split on {name} divide by {n}, or are cut unevenly as listed")
        return out

    def explain(self, verbose: int = 0, width: int = 100, color: bool = False) -> str:
        """The comm graph as text that fits `width` columns."""
        from meshplan.report.text import explain_text

        return explain_text(self.to_json(), verbose=verbose, width=width, color=color)

    def facts(self) -> dict[str, str]:
        """What ranks compare, by topic; only differing topics are named in an error."""
        return self.core.facts()

    def program_hash(self) -> str:
        return hashlib.sha256(json.dumps(self.facts(), sort_keys=True).encode()).hexdigest()

    def _layers(self) -> list[str]:
        """The modules that stand in a list and are called."""
        called = dict.fromkeys(e.module for e in self.core.program.events if e.what == "enter")
        return [path for path in called if path.rpartition(".")[2].isdigit()]

    def _place(self, name: str) -> dict[str, str]:
        item = self.core.bound.inputs.get(name)
        if item is None:
            return {}
        example, axes = self.core.examples.get(name), self.core.program.axes
        dealt = dict(zip(axes, example.leaves[0].kinds, strict=False)) if example and len(example.leaves) == 1 else {}
        return {axis: str(dealt.get(axis, p)) if isinstance(p, Shard) else str(p) for axis, p in item.place.items()}

    def _context(self) -> str | None:
        """How attention sees a sequence that cp splits, in words."""
        section = self.core.bound.plan.context
        return None if section is None or self.core.spec.degree("cp") == 1 else section.title

    def _rules(self) -> list[str]:
        """What each rule says once its shorthand is written out for the first module it matched."""
        out = []
        for rule, paths in self.core.bound.matches:
            shown = expand(rule, self._model.get_submodule(paths[0])) if paths else rule
            said = [f"{name} {_layout(layout)}" for name, layout in shown.params.items()]
            for side, table in (("input", shown.input), ("output", shown.output)):
                said += [f"{side} {key} {_layout(layout)}".replace("  ", " ") for key, layout in table.items()]
            was = f"{rule.use}: " if rule.use else ""
            many = f"{len(paths)} module{'s' if len(paths) != 1 else ''}"
            out.append(f"{rule.at or '(the model)'}: {was}{', '.join(said)}  ({many})")
        return out


def _layout(layout: Mapping[str, object]) -> str:
    return "{" + ", ".join(f"{axis}: {placement}" for axis, placement in layout.items()) + "}"


def _shown(kind: Any) -> str:
    return user_letter(kind) if str(kind) != "I" else "R"


def meta_copy(model: nn.Module) -> nn.Module:
    """A deep copy of `model` on the meta device: no storage, ties and shared modules kept."""
    memo: dict[int, object] = {}
    for p in model.parameters():
        memo[id(p)] = nn.Parameter(torch.empty_like(p, device="meta"), requires_grad=p.requires_grad)
    for b in model.buffers():
        memo[id(b)] = torch.empty_like(b, device="meta")
    return copy.deepcopy(model, memo | shared_objects(model))


def lower(
    model: nn.Module, plan: Plan, world_size: int, inputs: Any = None, *, rank: int = 0, check: str = "values"
) -> Lowered:
    """Lower `plan` for `world_size` ranks: anywhere, without a process group or a GPU; `model` may be on meta and is not
    changed.

    Arguments:
        inputs: global example inputs that add to the plan's, by name or in order.
        rank: whose program to derive.
        check: "values" or "off", see `meshplan.compiler.check`.

    Raises PlanError with the user's line; see `meshplan.compiler.compile.compile_core` and
    `meshplan.compiler.fsdp_units.owned_parameters`.
    """
    spec = MeshSpec.resolve(plan.mesh, world_size)
    core = compile_core(model, plan, spec, inputs, rank, check=check)
    fsdp_of(model, core, rank)  # refuses units that cannot own what they hold
    return Lowered(model, core, rank, keep=False)
