"""Where FSDP cuts each parameter, given how the other axes split it; small ones that it cannot cut stay whole."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from meshplan.compiler.lowered import Core, ParamPlan
from meshplan.errors import PlanError
from meshplan.mesh.spec import DATA_AXES, MeshSpec
from meshplan.plan.plan import Plan
from meshplan.runtime.comm import chunk_sizes


def sharded_by_fsdp(core: Core) -> bool:
    """Whether the plan's FSDP section does anything on this world: it names a sharding strategy and there are data ranks."""
    return shards_parameters(core.bound.plan, core.spec)


def shards_parameters(plan: Plan, spec: MeshSpec) -> bool:
    """As `sharded_by_fsdp`, before there is a core."""
    return plan.fsdp is not None and plan.fsdp.strategy != "ddp" and spec.degree(*DATA_AXES) > 1


def fsdp_cuts(core: Core) -> dict[str, int | None]:
    """The dim FSDP cuts each parameter along, by name; None for one that every data rank keeps whole.

    A dim that another axis splits unevenly or part by part does not count: its length differs between ranks, or a
    DTensor could not say which rows a rank holds. A parameter of one dim or none that has no other stays whole, as does
    one of which another axis leaves some rank nothing, and its gradient is averaged with the replicated ones. Empty without FSDP.

    Raises PlanError: `fsdp-no-dim` for a matrix without a dim to cut, or where `fsdp.shard_dims` asks for one of these.
    """
    # Asked for every parameter, so worked out once a core; a core never changes.
    if "_fsdp_cuts" not in core.__dict__:
        n = core.spec.degree("dp_shard", "cp")
        core.__dict__["_fsdp_cuts"] = (
            {p.name: _cut(p, core, n) for p in core.params.values()} if sharded_by_fsdp(core) else {}
        )
    cuts: dict[str, int | None] = core.__dict__["_fsdp_cuts"]
    return cuts


def expert_axes(core: Core) -> tuple[str, ...]:
    """The axes over which FSDP shards experts: those of their copies on dp_shard and cp. None where one of these lies inside an
    axis of ep: FSDP's axes have to be outside those that a parameter is split on already. Experts are whole then."""
    spec = core.spec
    if core.experts is None or not sharded_by_fsdp(core):
        return ()
    split = core.experts.view.axes("ep")
    axes = tuple(a for a in spec.leaves("dp_shard", "cp") if a not in split and spec.degree(a) > 1)
    outside = not split or all(spec.names.index(a) < spec.names.index(split[0]) for a in axes)
    return axes if outside else ()


def sharded_experts(core: Core) -> tuple[str, ...]:
    """Paths of the experts modules that are FSDP units of their own, over `expert_axes`."""
    if core.experts is None or not sharded_by_fsdp(core):
        return ()
    cuts = fsdp_cuts(core)
    return tuple(
        path
        for path, found in core.experts.modules.items()
        if found.packed and all(core.params[p].routed and cuts[p] is not None for p in found.packed)
    )


def fsdp_paths(core: Core) -> tuple[str, ...]:
    """Paths of all FSDP units but the root: the plan's, and experts modules."""
    return (*core.bound.fsdp_units, *(p for p in sharded_experts(core) if p not in core.bound.fsdp_units))


def kept_whole(core: Core) -> frozenset[str]:
    """Names of the parameters that FSDP leaves alone."""
    return frozenset(name for name, dim in fsdp_cuts(core).items() if dim is None)


class Reduce(NamedTuple):
    """What happens to a gradient after backward: it is summed over each of `sums`, then over the ranks of all of `data`
    together, and divided by `divisor`."""

    sums: tuple[str, ...]
    data: tuple[str, ...]
    divisor: int


def reduce_of(core: Core, p: ParamPlan) -> Reduce:
    """What we do to the gradient of `p`: where nobody else averages it over the data ranks, and it differs between them, that
    too. That of an expert is summed over its copies, and is a sum over the tokens of all ranks of ep already; the losses are a
    mean over all data ranks, whatever the number of copies."""
    spec = core.spec
    sums = tuple(a for a in p.reduce if spec.parent(a) not in DATA_AXES)
    means = any(spec.parent(a) in DATA_AXES for a in p.reduce)
    if p.routed and fsdp_cuts(core).get(p.name) is not None:
        return Reduce(sums, (), 1)
    if p.routed:
        split = [axis for axis, _ in p.shards]
        data = tuple(a for a in spec.leaves(*DATA_AXES) if a not in split and spec.degree(a) > 1)
        return Reduce(sums, data, spec.degree(*DATA_AXES))
    if means and (not sharded_by_fsdp(core) or fsdp_cuts(core)[p.name] is None):
        return Reduce(sums, DATA_AXES, spec.degree(*DATA_AXES))
    return Reduce(sums, (), 1)


def by_reduction(core: Core) -> dict[Reduce, list[ParamPlan]]:
    """Parameters whose gradients are worked on after backward, by what is done. The run and its prediction both pack their
    buckets from this."""
    found: dict[Reduce, list[ParamPlan]] = {}
    for p in core.params.values():
        how = reduce_of(core, p)
        if p.requires_grad and how != Reduce((), (), 1):
            found.setdefault(how, []).append(p)
    return found


def reached_apart(core: Core, plans: Iterable[ParamPlan]) -> list[ParamPlan]:
    """Of `plans`, those that a backward may reach on one rank and not on another: of experts that have their own."""
    return [p for p in plans if p.requires_grad and core.experts is not None and p.name in core.experts.listed]


def _cut(p: ParamPlan, core: Core, n: int) -> int | None:
    if core.experts is not None and p.name in core.experts.listed:
        return None
    if core.experts is not None and p.routed:
        n = core.spec.degree(*expert_axes(core))
        # Its data ranks are those of its copies. What cannot be cut evenly stays whole with the experts beside it.
        beside = [core.params[name] for name in core.experts.packed[p.name].packed]
        dims = [_even(b, core, n) for b in beside] if n > 1 else [None]
        return None if None in dims else dims[beside.index(p)]
    if any(0 in chunk_sizes(p.shape[s.dim], core.spec.degree(axis) // s.copies) for axis, s in p.shards):
        return None  # FSDP takes no parameter of which a rank holds nothing
    sizes = _countable(p, core.spec)
    legal = [d for d, size in enumerate(sizes) if size is not None and (d == 0 or size % n == 0)]
    asked = core.bound.shard_dims.get(p.name)
    if asked is not None:
        if sizes[asked] is None:
            raise _no_dim(p, core, f"fsdp.shard_dims cuts dim {asked} of {p.name}, which {_splitter(p, asked)} splits "
                                   "unevenly or part by part", legal)  # fmt: skip
        return asked
    even = [d for d in legal if (sizes[d] or 0) % n == 0]
    if even or legal:
        return (even or legal)[0]
    if len(sizes) < 2:
        return None
    raise _no_dim(p, core, f"{p.name} {list(p.shape)} has no dim that fsdp could cut over {n} ranks: a dim that another axis "
                           "splits unevenly or part by part does not count, and only dim 0 may be padded", legal)  # fmt: skip


def _even(p: ParamPlan, core: Core, n: int) -> int | None:
    """The dim of a parameter of experts that `n` ranks cut evenly: the one that the plan asks for, or the first."""
    legal = [d for d, size in enumerate(_countable(p, core.spec)) if size and size % n == 0]
    asked = core.bound.shard_dims.get(p.name)
    if asked is not None and asked not in legal:
        raise _no_dim(p, core, f"fsdp.shard_dims cuts dim {asked} of {p.name}, of which the {n} ranks that hold the same experts "
                               "get no equal parts", legal)  # fmt: skip
    return asked if asked is not None else next(iter(legal), None)


def _countable(p: ParamPlan, spec: MeshSpec) -> list[int | None]:
    """The length of each dim after the other axes' splits, None where it does not count."""
    sizes: list[int | None] = list(p.shape)
    for axis, shard in p.shards:
        size, degree = sizes[shard.dim], spec.degree(axis) // shard.copies
        sizes[shard.dim] = None if shard.parts or size is None or size % degree else size // degree
    return sizes


def _splitter(p: ParamPlan, dim: int) -> str:
    return next(axis for axis, shard in p.shards if shard.dim == dim)


def _no_dim(p: ParamPlan, core: Core, what: str, legal: list[int]) -> PlanError:
    section = core.bound.plan.fsdp
    return PlanError(
        what, code="fsdp-no-dim", where=section.source.where if section else None, module=p.name.rpartition(".")[0],
        legal=[f"fsdp.shard_dims: {{{p.name}: {d}}}" for d in legal] or "another degree, or strategy: ddp",
    )  # fmt: skip
