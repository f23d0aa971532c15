"""The sections of a plan beside its rules: fsdp, context, experts, pipeline, recompute and compile."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, ClassVar, TypeVar

import torch

from meshplan.errors import PlanError, Where
from meshplan.plan.patterns import match
from meshplan.plan.source import Source, user_source
from meshplan.plan.values import (
    as_bool,
    as_choice,
    as_dtype,
    as_int,
    as_mapping,
    as_paths,
    as_str,
    check_keys,
    dtype_name,
    placed,
    wrong,
)

STRATEGIES = ("ddp", "zero1", "zero2", "zero3")
METHODS = ("ring", "ulysses", "allgather", "hybrid")
BALANCES = ("zigzag", "contiguous")
TRANSPORTS = ("send", "peer")
DISPATCHES = ("auto", "alltoall", "allgather", "twolevel", "fused")
PAYLOADS = ("fp8",)
SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "looped_bfs", "interleaved_zero_bubble", "zbv", "dualpipev")
POLICIES = ("full", "none")
GATHERS = ("save", "regather")


@dataclass(frozen=True)
class Section:
    """What every section shares: its place, and its form as a mapping. Subclasses normalise in `_check`."""

    source: Source = field(default_factory=user_source, compare=False, repr=False, kw_only=True)
    name: ClassVar[str] = ""

    def __post_init__(self) -> None:
        self._check()

    def _check(self) -> None:
        raise NotImplementedError

    @property
    def where(self) -> Where | None:
        """The place the section was written at."""
        return self.source.where

    def to_dict(self) -> dict[str, Any]:
        """The mapping of a plan file: required keys, and what differs from its default."""
        out: dict[str, Any] = {}
        for item in fields(self):
            value = getattr(self, item.name)
            if item.name == "source" or (item.default is not MISSING and value == item.default):
                continue
            if isinstance(value, torch.dtype):
                value = dtype_name(value)
            out[item.name] = list(value) if isinstance(value, tuple) else value
        return out

    def _set(self, key: str, value: Any) -> None:
        object.__setattr__(self, key, value)

    def _at(self, key: str) -> tuple[str, Any, Source]:
        return f"{self.name}.{key}", getattr(self, key), self.source.child(key)

    def _paths(self, key: str) -> None:
        what, value, source = self._at(key)
        self._set(key, as_paths(what, value, source))
        for i, pattern in enumerate(getattr(self, key)):
            with placed(source.child(i)):
                match(pattern, ())

    def _choice(self, key: str, legal: tuple[str, ...]) -> None:
        what, value, source = self._at(key)
        as_choice(what, value, legal, source)

    def _inner(self, key: str, option: str, what: str) -> None:
        """`inner`, a degree, goes with the `option` of `key` and with no other."""
        chosen, inner = self._at(key)[1], self._at("inner")[1]
        if (chosen == option) != (inner is not None):
            raise PlanError(
                f"{self.name}.{key} {chosen!r} {'needs' if chosen == option else 'has no use for'} `inner`",
                code="bad-value",
                where=self.source.child("inner").where,
                legal=f"{key}: {option} together with inner: <{what}>",
            )
        if inner is not None:
            self._degree("inner")

    def _degree(self, key: str) -> None:
        what, value, source = self._at(key)
        as_int(what, value, source)


@dataclass(frozen=True)
class Fsdp(Section):
    """Who shards parameters, gradients and optimizer state on the data axes (dp_shard x cp, flattened).

    Attributes:
        units: modules gathered at once, by path pattern; parameters in none of them belong to the root unit.
        strategy: `ddp` (nothing sharded), `zero1` (optimizer state), `zero2` (and gradients), `zero3` (and parameters).
        param_dtype: dtype of parameters in compute; None keeps theirs.
        reduce_dtype: dtype gradients are reduced in; None is `param_dtype`, or the gradient's own.
        output_dtype: dtype floating outputs of a unit are cast to; None casts nothing.
        reshard_after_forward: None is what the strategy implies (True for zero3).
        shard_dims: tensor dim to shard by parameter path pattern, where dim 0 is a bad choice.
    """

    name: ClassVar[str] = "fsdp"
    units: tuple[str, ...]
    strategy: str = "zero3"
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    reshard_after_forward: bool | None = None
    shard_dims: dict[str, int] | None = None

    def _check(self) -> None:
        self._paths("units")
        self._choice("strategy", STRATEGIES)
        for key in ("param_dtype", "reduce_dtype", "output_dtype"):
            self._set(key, as_dtype(*self._at(key)))
        if self.reshard_after_forward is not None:
            as_bool(*self._at("reshard_after_forward"))
        if self.shard_dims is not None:
            what, value, source = self._at("shard_dims")
            dims = {}
            for pattern, dim in as_mapping(what, value, source).items():
                at = source.child(pattern)
                with placed(at):
                    match(as_str(f"a name in {what}", pattern, at), ())
                dims[pattern] = as_int(f"{what} of {pattern}", dim, at, least=-64)
            self._set("shard_dims", dims or None)


@dataclass(frozen=True)
class Context(Section):
    """How attention sees the whole sequence when cp splits it.

    Attributes:
        attention: the modules whose attention runs over cp.
        method: `ring`, `ulysses`, `allgather`, or `hybrid` (ulysses inside groups of `inner`, ring across them).
        balance: `zigzag` gives each rank an early and a late part of the sequence, `contiguous` one run.
        inner: ranks of one ulysses group; for `hybrid`, and only there.
        transport: how the messages of `ring` travel: `send` from neighbour to neighbour, or `peer`: each rank reads them out of
            the others' memory, on one node.
    """

    name: ClassVar[str] = "context"
    attention: tuple[str, ...]
    method: str = "ring"
    balance: str = "zigzag"
    inner: int | None = None
    transport: str = "send"

    @property
    def zigzags(self) -> bool:
        """Whether sequences are dealt in zigzag order: ulysses has every position of its heads, so it has nothing to balance."""
        return self.balance == "zigzag" and self.method != "ulysses"

    @property
    def title(self) -> str:
        """The method, and the order where there is one to choose: `ring zigzag`, `hybrid 2 contiguous`, `ulysses`."""
        inner = "" if self.inner is None else f" {self.inner}"
        by = "" if self.transport == "send" else f" by {self.transport}"
        return self.method + inner + ("" if self.method == "ulysses" else f" {self.balance}") + by

    def _check(self) -> None:
        self._paths("attention")
        self._choice("method", METHODS)
        self._choice("balance", BALANCES)
        self._choice("transport", TRANSPORTS)
        if self.transport != "send" and self.method != "ring":
            raise PlanError(
                f"context.method {self.method!r} has no transport {self.transport!r}",
                code="bad-value",
                where=self.source.child("transport").where,
                legal="transport: send, or method: ring",
            )
        self._inner("method", "hybrid", "ranks of one ulysses group")


def sequence_pieces(axis: str, ranks: int, context: Context | None) -> int:
    """Equal pieces that `ranks` of an axis cut a dim into: in zigzag order each rank of cp has two of a sequence."""
    return ranks * 2 if axis == "cp" and ranks > 1 and context is not None and context.zigzags else ranks


@dataclass(frozen=True)
class Experts(Section):
    """Which modules route tokens to experts, and over how many ranks.

    Attributes:
        at: the MoE blocks, or their experts modules.
        ep: ranks that share one copy of the experts, borrowed from dp_shard, then cp, then tp.
        etp: ranks that split each expert.
        dispatch: how tokens travel: `auto`, `alltoall`, `allgather`, `twolevel` (to each node once, and on from there) or
            `fused` (through the memory of one node's ranks).
        inner: consecutive ranks of ep on one node; for `twolevel`, and only there.
        payload: `fp8` rounds the rows that experts are given to 8 bits; None leaves them as they are.
        overlap: whether shared experts compute while tokens are under way, where the block calls them after the routed ones.
    """

    name: ClassVar[str] = "experts"
    at: tuple[str, ...]
    ep: int = 1
    etp: int = 1
    dispatch: str = "auto"
    inner: int | None = None
    payload: str | None = None
    overlap: bool = True

    @property
    def title(self) -> str:
        """Degrees and dispatch in a few words: `ep 8 x etp 2 twolevel 4 in fp8`."""
        etp = f" x etp {self.etp}" if self.etp > 1 else ""
        return f"ep {self.ep}{etp} {self.way}"

    @property
    def way(self) -> str:
        """The dispatch: `alltoall`, `twolevel 4 in fp8`."""
        inner = "" if self.inner is None else f" {self.inner}"
        return self.dispatch + inner + ("" if self.payload is None else f" in {self.payload}")

    def _check(self) -> None:
        self._paths("at")
        self._degree("ep")
        self._degree("etp")
        self._choice("dispatch", DISPATCHES)
        if self.payload is not None:
            self._choice("payload", PAYLOADS)
        as_bool(*self._at("overlap"))
        self._inner("dispatch", "twolevel", "ranks of ep on one node")
        if self.dispatch == "fused" and self.payload is not None:
            raise PlanError(
                f"experts.dispatch 'fused' sends rows as they are, and experts.payload is {self.payload!r}",
                code="bad-value",
                where=self.source.child("payload").where,
                legal="no payload, or another dispatch",
            )


@dataclass(frozen=True)
class Pipeline(Section):
    """How layers are cut into stages over pp, and the order their microbatches run in.

    Attributes:
        schedule: one of `SCHEDULES`.
        microbatches: parts a rank's batch is cut into.
        split: `auto`, or the paths of the modules that begin each stage after the first.
        chunks: stages a rank holds; None is what the schedule implies.
    """

    name: ClassVar[str] = "pipeline"
    schedule: str = "1f1b"
    microbatches: int = 1
    split: str | tuple[str, ...] = "auto"
    chunks: int | None = None

    def _check(self) -> None:
        self._choice("schedule", SCHEDULES)
        self._degree("microbatches")
        if isinstance(self.split, str):
            self._choice("split", ("auto",))
        else:
            self._paths("split")
        if self.chunks is not None:
            self._degree("chunks")


@dataclass(frozen=True)
class Recompute(Section):
    """What is computed or gathered again in backward instead of being kept.

    Attributes:
        units: the modules concerned, with all inside them, by path pattern.
        policy: `full` keeps only a unit's inputs, `none` recomputes nothing.
        gather: under `none`, what is kept of a sequence that was gathered at a module's input: `regather` keeps this
            rank's shard and gathers it once more in backward. A recomputed unit gathers again whatever this says.
    """

    name: ClassVar[str] = "recompute"
    units: tuple[str, ...]
    policy: str = "full"
    gather: str = "save"

    def _check(self) -> None:
        self._paths("units")
        self._choice("policy", POLICIES)
        self._choice("gather", GATHERS)
        if self.policy == "none" and self.gather == "save":
            raise PlanError(
                "recompute with policy none and gather save does nothing", code="bad-value",
                where=self.source.child("policy").where, legal="gather: regather, or no recompute section",
            )  # fmt: skip


@dataclass(frozen=True)
class Compile(Section):
    """Which modules run under `torch.compile`.

    Attributes:
        units: the modules compiled, each on its own, by path pattern.
        backend: name of a `torch.compile` backend.
        fullgraph: refuse graph breaks.
    """

    name: ClassVar[str] = "compile"
    units: tuple[str, ...]
    backend: str = "inductor"
    fullgraph: bool = True

    def _check(self) -> None:
        self._paths("units")
        as_str(*self._at("backend"))
        as_bool(*self._at("fullgraph"))


AnySection = TypeVar("AnySection", bound=Section)


def section_from(cls: type[AnySection], value: Any, source: Source) -> AnySection | None:
    """The section `cls` from the mapping of a plan file; an object of it, or None, is returned as it is.

    Raises PlanError: `unknown-key`, `missing-key`, and those of the section's own checks.
    """
    if value is None or isinstance(value, cls):
        return value
    if not isinstance(value, Mapping):
        raise wrong(cls.name, value, source, f"a mapping, or meshplan's {cls.__name__}")
    own = [item for item in fields(cls) if item.name != "source"]
    check_keys(cls.name, value, [item.name for item in own], source)
    for item in own:
        if item.default is MISSING and item.name not in value:
            raise PlanError(
                f"{cls.name} lacks {item.name!r}", code="missing-key", where=source.where, legal=[i.name for i in own]
            )
    return cls(**value, source=source)
