"""Which net finds which fault? Wrong rules are put into the rule book, and lowered programs are damaged, one at a time.

    python -m benchmarks.injected_faults [--json]

Net 1 is lowering itself (a rank's program in step with the single device's), net 2 runs each distinct use of a rule
with numbers, net 3 runs the whole program on simulated ranks beside one device. A damaged program is made after the
first two, so only net 3 can see it. The script fails if any fault passes all three.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshplan as mp
from benchmarks.common import Report, arguments
from meshplan.cli.output import emit
from meshplan.compiler import aten
from meshplan.compiler.compile import compile_core
from meshplan.compiler.edits import Edit
from meshplan.compiler.kinds import A, P, R
from meshplan.compiler.lowered import Boundary, Core
from meshplan.compiler.rules import semantic
from meshplan.compiler.rules.base import Strategy
from meshplan.errors import PlanError
from meshplan.mesh.spec import MeshSpec
from meshplan.models.llama import Llama, LlamaConfig
from meshplan.plan.placements import Shard
from meshplan.plan.plan import Plan
from meshplan.verify.aligned import align

WORLD = 4
Tamper = Callable[[Core], Core]


@dataclass(frozen=True)
class Fault:
    """A fault and what it is put into: a strategy that a rule book gains, or a change of a lowered program.

    Attributes:
        model: builds the single-device model; plan: its plan on `WORLD` ranks.
        book, key, wrong: the rule `book[key]` lists `wrong` too; with `alone`, nothing else.
        tamper: the change of the program.
    """

    name: str
    model: Callable[[], nn.Module]
    plan: Plan
    book: MutableMapping[Any, Any] | None = None
    key: Any = None
    wrong: tuple[Strategy, ...] = ()
    alone: bool = False
    tamper: Tamper | None = None


# -- the models ------------------------------------------------------------------------------------------------------


def llama() -> nn.Module:
    """One block with grouped queries and dropout; on 2 x 2 ranks with a sharded residual stream."""
    return Llama(
        LlamaConfig(dim=32, n_layers=1, n_heads=4, n_kv_heads=2, vocab_size=127, ffn_dim=48, dropout=0.1, tied=False)
    )


def llama_plan() -> Plan:
    seq = {"output": {"tp": mp.S(1)}}
    rules = [
        mp.Rule("tok_embeddings", use="embedding", **seq),
        mp.Rule("layers.*.attention.{wq,wk,wv}", use="colwise"),
        mp.Rule("layers.*.attention.wo", use="rowwise", **seq),
        mp.Rule("layers.*.feed_forward.{w1,w3}", use="colwise"),
        mp.Rule("layers.*.feed_forward.w2", use="rowwise", **seq),
        mp.Rule("layers.*.{attention_norm,ffn_norm}", use="sequence"),
        mp.Rule("norm", use="sequence"),
        mp.Rule("output", use="vocab_head"),
    ]
    rows = mp.Input(shape=(4, 12), dtype=torch.int64, place={"dp": mp.S(0)})
    return Plan(mesh={"dp_shard": 2, "tp": 2}, inputs={"tokens": rows, "labels": rows}, rules=rules)


class Between(nn.Module):
    """A column-split and a row-split projection with a function between them, and a loss of its own."""

    def __init__(self, between: Callable[[Tensor], Tensor], bias: bool, loss: Any, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, width, bias=False), nn.Linear(width, 6, bias=bias)
        self.between, self.loss = between, loss or torch.sum

    def forward(self, x: Tensor) -> Tensor:
        return self.loss(self.down(self.between(self.up(x))))


class Heads(nn.Module):
    """Attention with four query heads over two key heads, of which only the queries are split."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.o = nn.Linear(6, 12, bias=False), nn.Linear(12, 6, bias=False)
        self.kv = nn.Linear(6, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (4, 3)).transpose(1, 2)
        k = self.kv(x).unflatten(-1, (2, 3)).transpose(1, 2)
        out = F.scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=True)
        return self.o(out.transpose(1, 2).flatten(2)).sum()


def small_plan(up: str = "up", down: str = "down") -> Plan:
    x = mp.Input(shape=(4, 5, 6), dtype=torch.float64, place={"dp": mp.S(0)})
    rules = [mp.Rule(up, use="colwise"), mp.Rule(down, use="rowwise")]
    return Plan(mesh={"dp_shard": 2, "tp": 2}, inputs={"x": x}, rules=rules)


# -- faults of rules -------------------------------------------------------------------------------------------------


def rule(
    name: str, book: MutableMapping[Any, Any], key: Any, wrong: Strategy, between: Any = None, *, bias: bool = False,
    loss: Any = None, width: int = 8, model: Any = None, plan: Plan | None = None, alone: bool = False,
) -> Fault:  # fmt: skip
    made = model or (lambda: Between(between or F.gelu, bias, loss, width))
    return Fault(name, made, plan or small_plan(), book, key, (wrong,), alone)


_S0, _S1, _S2 = Shard(0), Shard(1), Shard(2)
_LAST = Strategy((_S2,), (_S2,))
RULES = [
    rule("cumsum along the split dim", aten._RULES, "cumsum", _LAST, lambda x: x.cumsum(-1)),
    rule("cumprod along the split dim", aten._RULES, "cumprod", _LAST, lambda x: x.cumprod(-1)),
    rule("logcumsumexp along the split dim", aten._RULES, "logcumsumexp", _LAST, lambda x: x.logcumsumexp(-1)),
    rule("softmax along the split dim", aten._RULES, "_softmax", _LAST, lambda x: x.softmax(-1)),
    rule("flip along the split dim", aten._RULES, "flip", _LAST, lambda x: x.flip(-1)),
    rule(
        "amax over the split dim as a partial sum", aten._RULES, "amax", Strategy((_S2,), (P,)),
        lambda x: x * x.amax(-1, keepdim=True),
    ),
    rule(
        "layer norm over the split dim by parts", semantic.RULES, F.layer_norm, _LAST,
        lambda x: F.layer_norm(x, (x.shape[-1],)),
    ),
    rule(
        "a row-split linear adds its bias on each rank", semantic.RULES, F.linear, Strategy((_S2, _S1, R), (P,)),
        bias=True,
    ),
    rule(
        "a mean over unequal shards", aten._RULES, "mean", Strategy((_S2,), (A,)),
        lambda x: x * x.mean(-1, keepdim=True), width=7,
    ),
    rule(
        "a transpose that keeps the dim", aten._RULES, "transpose", _LAST,
        lambda x: x.transpose(1, 2).transpose(1, 2),
    ),
    rule(
        "a mean loss as a sum", semantic.RULES, F.mse_loss, Strategy((_S0, _S0), (P,)),
        loss=lambda y: F.mse_loss(y, y * y),
    ),
    rule(
        "grouped attention with whole keys", semantic.RULES, F.scaled_dot_product_attention,
        Strategy((_S1, R, R), (_S1,)), model=Heads, plan=small_plan("q", "o"), alone=True,
    ),
    rule(
        "cross entropy counts its own tokens", semantic.RULES, F.cross_entropy, Strategy((_S0, _S0), (A,)),
        model=llama, plan=replace(llama_plan(), mesh={"dp_shard": 4}, rules=()),
    ),
    rule(
        "embedding rows without masks", semantic.RULES, F.embedding, Strategy((R, _S0), (P,)),
        model=llama, plan=llama_plan(),
    ),
]  # fmt: skip


# -- faults of programs ----------------------------------------------------------------------------------------------


def boundaries(change: Callable[[Boundary], Boundary | None]) -> Tamper:
    """Every boundary changed, or dropped where `change` gives None."""

    def tamper(core: Core) -> Core:
        made = tuple(b for b in map(change, core.program.boundaries) if b is not None)
        assert made != core.program.boundaries, "this fault changes nothing"
        return replace(core, program=replace(core.program, boundaries=made))

    return tamper


def at(path: str, **move: Any) -> Callable[[Boundary], Boundary | None]:
    """The boundary at module `path` with its move changed; without changes, dropped."""

    def change(b: Boundary) -> Boundary | None:
        if b.site.module != path:
            return b
        return replace(b, move=replace(b.move, **move)) if move else None

    return change


def params(path: str, reduce: tuple[str, ...]) -> Tamper:
    """Parameter `path` declared to need its gradient summed over `reduce`."""

    def tamper(core: Core) -> Core:
        return replace(core, params={**core.params, path: replace(core.params[path], reduce=reduce)})

    return tamper


def edits(path: str, change: Callable[[Edit], Edit | None]) -> Tamper:
    """The edits of module `path` changed, or dropped where `change` gives None."""

    def tamper(core: Core) -> Core:
        made = {n: e for n, e in ((n, change(e)) for n, e in core.program.edits[path].items()) if e is not None}
        return replace(core, program=replace(core.program, edits={**core.program.edits, path: made}))

    return tamper


def setting(key: str, value: Any) -> Callable[[Edit], Edit]:
    """The edit's operator with one setting changed; None leaves the setting out."""

    def change(e: Edit) -> Edit:
        assert e.replacement is not None
        kept = tuple((k, v) for k, v in e.replacement.settings if k != key)
        return replace(e, replacement=replace(e.replacement, settings=kept if value is None else (*kept, (key, value))))

    return change


def program(name: str, tamper: Tamper) -> Fault:
    return Fault(name, llama, llama_plan(), tamper=tamper)


_DROP = "layers.0.dropout"
PROGRAMS = [
    program("dropped gather before attention", boundaries(at("layers.0.attention"))),
    program("dropped reduction after attention", boundaries(at("layers.0.attention.wo"))),
    program("gathered value owned as invariant", boundaries(at("layers.0.attention", dst="I"))),
    program("gathered value owned as invariant, feed forward", boundaries(at("layers.0.feed_forward", dst="I"))),
    program("head's input owned as invariant", boundaries(at("output", dst="I"))),
    program("scattered along another dim", boundaries(at("layers.0.feed_forward.w2", dim=0, size=2))),
    program("gathered along another dim", boundaries(at("layers.0.feed_forward", dim=2, size=32))),
    program("sliced where it should be summed", boundaries(at("layers.0.attention.wo", src="I"))),
    program("redistributed over another axis", boundaries(at("layers.0.attention.wo", axis="dp_shard"))),
    program("norm's gradient not summed over tp", params("norm.weight", ("dp_shard",))),
    program("norm's gradient not averaged over data", params("norm.weight", ("tp",))),
    program("a shard's gradient summed over tp", params("layers.0.ffn_norm.weight", ())),
    program("dropout left to torch", edits(_DROP, lambda e: None)),
    program("dropout with another module's key", edits(_DROP, setting("module", "layers.1.dropout"))),
    program("one dropout mask for both sequence shards", edits(_DROP, setting("shards", (("dp_shard", mp.S(0)),)))),
    program("one dropout mask for both data ranks", edits(_DROP, setting("shards", (("tp", 1),)))),
    program("embedding rows offset by another axis", edits("tok_embeddings", setting("rows", ("dp_shard",)))),
    program("embedding without its operator", edits("tok_embeddings", lambda e: None)),
    program("valid tokens counted on one data rank", edits("", setting("tokens", None))),
    program("classes not reduced over tp", edits("", setting("classes", ("dp_shard",)))),
]
FAULTS = [*RULES, *PROGRAMS]


# -- nets ------------------------------------------------------------------------------------------------------------


@contextmanager
def injected(fault: Fault) -> Iterator[None]:
    """The rule book with the fault's strategies in it."""
    if fault.book is None:
        yield
        return
    right = fault.book.get(fault.key)

    def wrong(op: Any, n: int) -> list[Strategy]:
        fitting = [s for s in fault.wrong if len(s.ins) == len(op.ins) and _fits(s, op)]
        return fitting + (right(op, n) if right is not None and not fault.alone else [])

    fault.book[fault.key] = wrong
    try:
        yield
    finally:
        if right is None:
            del fault.book[fault.key]
        else:
            fault.book[fault.key] = right


def _fits(s: Strategy, op: Any) -> bool:
    return all(not isinstance(k, Shard) or k.dim < t.dim() for k, t in zip(s.ins, op.ins, strict=True))


def nets(fault: Fault) -> tuple[str, str, str]:
    """What each net says of the fault: an error's code, or "" where it sees nothing; "-" where it cannot look."""
    spec = MeshSpec.resolve(fault.plan.mesh, WORLD)
    with injected(fault), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if fault.tamper is not None:
            return "-", "-", _says(lambda: align(fault.model(), fault.plan, WORLD, tamper=fault.tamper))
        first = _says(lambda: compile_core(fault.model(), fault.plan, spec, check="off", fold=False))
        second = "-" if first else _says(lambda: compile_core(fault.model(), fault.plan, spec))
        third = "-" if first else _says(lambda: align(fault.model(), fault.plan, WORLD))
        return first, second, third


def _says(run: Callable[[], Any]) -> str:
    try:
        run()
    except PlanError as error:
        return error.code
    except (RuntimeError, IndexError, ValueError) as error:
        return type(error).__name__
    return ""


def report() -> Report:
    """One row a fault."""
    rows = []
    for fault in FAULTS:
        said = nets(fault)
        rows.append({"fault": fault.name, "net 1": said[0], "net 2": said[1], "net 3": said[2]})
    missed = [r["fault"] for r in rows if not any(r[f"net {k}"] not in ("", "-") for k in (1, 2, 3))]
    return Report(
        f"Which net finds which of {len(rows)} injected faults?", rows,
        [
            "measured: each fault alone, on four simulated ranks, float64",
            "-: the fault is made after this net, or lowering stopped it"],
        {"faults": len(rows), "missed": ", ".join(missed) or "none"},
    )  # fmt: skip


if __name__ == "__main__":
    made = report()
    emit(made, arguments(__doc__).parse_args().json)
    sys.exit(made.facts["missed"] != "none")
