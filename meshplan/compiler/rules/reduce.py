"""Aten ops that combine elements along dims: sums, means, extrema, scans, softmax, sorting, indexing."""

from __future__ import annotations

from meshplan.compiler.kinds import A, Kind, P
from meshplan.compiler.rules.base import REP, Op, Rule, Strategy, broadcast, dims_of, is_float, linear_in, same
from meshplan.compiler.rules.views import along_dim
from meshplan.plan.placements import Shard


def _kept(op: Op, dims: tuple[int, ...], keepdim: bool) -> list[Strategy]:
    nd = op.ins[0].dim()
    found = []
    for d in range(nd):
        if d not in dims:
            to = d if keepdim else d - sum(r < d for r in dims)
            found.append(Strategy((Shard(d),), (Shard(to),) * len(op.outs)))
    return found


def total(op: Op, n: int) -> list[Strategy]:
    """sum: over a sharded dim it is a partial sum."""
    dims = dims_of(op.arg(1, "dim"), op.ins[0].dim())
    found = _kept(op, dims, bool(op.arg(2, "keepdim", False)))
    found += [Strategy((Shard(d),), (P,)) for d in dims]
    return found + (linear_in(op, 0) if is_float(op.ins[0]) else [Strategy((P,), (P,))])


def mean(op: Op, n: int) -> list[Strategy]:
    """mean: over an evenly sharded dim it is a partial mean (each rank's mean weighs the same); uneven shards are not."""
    x = op.ins[0]
    dims = dims_of(op.arg(1, "dim"), x.dim())
    found = _kept(op, dims, bool(op.arg(2, "keepdim", False)))
    found += [Strategy((Shard(d),), (A,)) for d in dims if x.shape[d] % n == 0]
    return found + linear_in(op, 0)


def extremum(op: Op, n: int) -> list[Strategy]:
    """amax, max.dim, var, norms, argmax...: any dim that is not reduced may be sharded."""
    x = op.ins[0]
    if op.name in ("max", "min") and len(op.ins) == 2:
        return [Strategy(k, (Shard(d),)) for k, d in broadcast(op.ins, op.outs[0].shape)]
    position = 2 if op.name in ("norm", "linalg_vector_norm") else 1
    dim = op.arg(position, "dim")
    if isinstance(dim, bool):
        return []
    dims = dims_of(dim, x.dim())
    keepdim = len(op.outs) > 0 and op.outs[0].dim() == x.dim()
    return _kept(op, dims, keepdim)


def embedding(op: Op, n: int) -> list[Strategy]:
    """aten.embedding(weight, ids): ids sharded anywhere, or the table's columns; rows need the semantic operator."""
    _, ids = op.ins
    found = [Strategy((REP, Shard(d)), (Shard(d),)) for d in range(ids.dim())]
    return [*found, Strategy((Shard(1), REP), (Shard(ids.dim()),))]


def gather(op: Op, n: int) -> list[Strategy]:
    """gather(x, dim, index): off the dim where x and index have equal extents."""
    x, index = op.ins[0], op.ins[1]
    dim = op.args[1] % max(x.dim(), 1)
    return [same(op, Shard(d)) for d in range(x.dim()) if d != dim and x.shape[d] == index.shape[d]]


def scatter(op: Op, n: int) -> list[Strategy]:
    """scatter(x, dim, index, src): off the dim where all extents are equal."""
    x = op.ins[0]
    dim = op.args[1] % max(x.dim(), 1)
    return [same(op, Shard(d)) for d in range(x.dim()) if d != dim and len({t.shape[d] for t in op.ins}) == 1]


def index_select(op: Op, n: int) -> list[Strategy]:
    x = op.ins[0]
    dim = op.args[1] % max(x.dim(), 1)
    found = [Strategy((Shard(d), REP), (Shard(d),)) for d in range(x.dim()) if d != dim]
    return [*found, Strategy((REP, Shard(0)), (Shard(dim),)), *linear_in(op, 0)]


def index(op: Op, n: int) -> list[Strategy]:
    """x[i, j, :]: dims that are not indexed, and the index's own dims when x is replicated there."""
    x, indices = op.ins[0], op.args[1]
    at = [k for k, i in enumerate(indices) if i is not None]
    if not at or any(i.dtype.is_floating_point is False and str(i.dtype) == "torch.bool" for i in op.ins[1:]):
        return []
    shape = [
        max(s)
        for s in zip(
            *[[1] * (max(i.dim() for i in op.ins[1:]) - i.dim()) + list(i.shape) for i in op.ins[1:]], strict=True
        )
    ]
    adjacent = at == list(range(at[0], at[-1] + 1))
    start = at[0] if adjacent else 0
    found: list[Strategy] = []
    for d in range(x.dim()):
        if d in at:
            continue
        before = sum(1 for e in range(d) if e not in at)
        to = before + (len(shape) if d > start or not adjacent else 0)
        found.append(Strategy((Shard(d), *(REP,) * (len(op.ins) - 1)), (Shard(to),)))
    for kinds, d in broadcast(op.ins[1:], shape):
        found.append(Strategy((REP, *kinds), (Shard(start + d),)))
    return found + linear_in(op, 0)


def index_put(op: Op, n: int) -> list[Strategy]:
    """x[mask] = v with one mask over leading dims of x: on those, x and mask alike; on the others, v where it has the dim.
    x[i, :] = v with numbers: off the indexed dims, for a v that is one number."""
    x, indices = op.ins[0], op.args[1]
    given = [i for i in indices if i is not None]
    number = len(op.ins) == 1 + len(given) or op.ins[-1].numel() == 1
    rest = (REP,) * (len(op.ins) - 1 - len(given))
    if len(given) == 1 and indices[0] is not None and str(given[0].dtype) == "torch.bool":
        covered = given[0].dim()
        found = [Strategy((Shard(d), Shard(d), *rest), (Shard(d),)) for d in range(covered) if number]
        return found + [Strategy((Shard(d), REP, *rest), (Shard(d),)) for d in range(covered, x.dim()) if number]
    if any(str(i.dtype) == "torch.bool" for i in given) or not number:
        return []
    at = {k for k, i in enumerate(indices) if i is not None}
    return [Strategy((Shard(d), *(REP,) * len(given), *rest), (Shard(d),)) for d in range(x.dim()) if d not in at]


def index_add(op: Op, n: int) -> list[Strategy]:
    """index_add and index_copy(x, dim, index, src): off the dim."""
    x = op.ins[0]
    dim = op.args[1] % max(x.dim(), 1)
    return [Strategy((Shard(d), REP, Shard(d)), (Shard(d),)) for d in range(x.dim()) if d != dim]


def bucketize(op: Op, n: int) -> list[Strategy]:
    """bucketize(x, boundaries): each element on its own."""
    return [Strategy((Shard(d), REP), (Shard(d),)) for d in range(op.ins[0].dim())] if len(op.ins) == 2 else []


def matmul2d(op: Op, n: int) -> list[Strategy]:
    """mm and bmm, addmm and baddbmm: batch, rows, columns, or the contracted dim (which leaves a partial sum)."""
    biased = op.name in ("addmm", "baddbmm")
    nd = op.ins[-2].dim()
    rows: list[tuple[tuple[Kind, ...], Shard]] = [
        ((Shard(nd - 2), REP), Shard(nd - 2)),
        ((REP, Shard(nd - 1)), Shard(nd - 1)),
    ]
    if nd == 3:
        rows.append(((Shard(0), Shard(0)), Shard(0)))
    found = []
    for ins, out in rows:
        if biased:
            bias = op.ins[0]
            own = out.dim - (nd - bias.dim())
            ins = (Shard(own) if own >= 0 and bias.shape[own] != 1 else REP, *ins)
        found.append(Strategy(ins, (out,)))
    # A bias is added to the partial sum once: it too is a partial value (rank 0's copy and zeros).
    found.append(Strategy((*((P,) * biased), Shard(nd - 1), Shard(nd - 2)), (P,)))
    if not biased:
        found += linear_in(op, 0) + linear_in(op, 1)
    return found


RULES: dict[str, Rule] = {
    "sum": total,
    "mean": mean,
    **dict.fromkeys(
        "amax amin max min var std var_mean std_mean argmax argmin norm linalg_vector_norm logsumexp prod any all".split(),
        extremum,
    ),
    **dict.fromkeys(
        "cumsum cumprod logcumsumexp cummax cummin sort topk _softmax _log_softmax softmax log_softmax glu unfold".split(),
        along_dim,
    ),
    "embedding": embedding,
    "gather": gather,
    **dict.fromkeys("scatter scatter_add scatter_ scatter_add_ scatter_reduce".split(), scatter),
    "index_select": index_select,
    "index": index,
    **dict.fromkeys(("index_put", "index_put_"), index_put),
    **dict.fromkeys("index_add index_add_ index_copy index_copy_".split(), index_add),
    "bucketize": bucketize,
    **dict.fromkeys("mm bmm addmm baddbmm".split(), matmul2d),
}
