"""Two views of the same ranks: the dense one that the mesh names, and the experts' one, folded out of it.

`ep` ranks share one copy of the experts. They are borrowed from dp_shard first (its innermost ranks), then cp, then tp, whole
axes before the next begins; `etp` is the innermost part of tp. What is left holds further copies, or shards, of each expert:

    expert_dp = world / (pp x ep x etp)

    8 ranks, dp_shard 4 x tp 2, ep 2, etp 1     rank        0 1   2 3   4 5   6 7
                                                dp_shard     0     1     2     3
                                                tp          0 1   0 1   0 1   0 1
                                                ep           0     1     0     1       groups 0 2, 1 3, 4 6, 5 7
                                                expert_dp   0 1   0 1   2 3   2 3      groups 0 1 4 5, 2 3 6 7

Pure arithmetic: an axis that is borrowed in part is cut into sub-axes (`MeshSpec.split_axis`), and every rank keeps its place.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from meshplan.errors import PlanError
from meshplan.mesh.spec import DATA_AXES, MeshSpec, divisors

LENDERS = ("dp_shard", "cp", "tp")
"""Axes that `ep` borrows from, in order."""

VIEW = ("expert_dp", "ep", "etp")
"""Axes of the experts' view, within a pipeline stage."""

_NODE = "ep_node"
"""The innermost part of ep, where its ranks are dealt with node by node."""


@dataclass(frozen=True)
class ExpertView:
    """The experts' axes on a mesh. `expert_view` makes it.

    Attributes:
        spec: the mesh, with the axes that are borrowed in part cut.
        parts: leaves of `spec` behind each axis of `VIEW`, outermost first.
        inner: those of ep whose ranks are on one node, the last of them; see `expert_view`.
    """

    spec: MeshSpec
    parts: tuple[tuple[str, tuple[str, ...]], ...]
    inner: tuple[str, ...] = ()

    def axes(self, name: str) -> tuple[str, ...]:
        """The axes of `spec` that `name`, an axis of `VIEW`, stands for; none if all of its ranks are one."""
        return dict(self.parts)[name]

    @property
    def levels(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The axes of ep between nodes, and those inside one."""
        return tuple(axis for axis in self.axes("ep") if axis not in self.inner), self.inner

    def degree(self, name: str) -> int:
        """Number of ranks along `name`."""
        return self.spec.degree(*self.axes(name))

    def coord(self, rank: int, name: str) -> int:
        """The position of `rank` along `name`: along ep, rank r holds the r-th part of the experts."""
        return self.spec.coord(rank, *self.axes(name))

    def group_of(self, rank: int, name: str) -> tuple[int, ...]:
        """The ranks that differ from `rank` only along `name`, in order."""
        return self.spec.group_of(rank, *self.axes(name))

    def groups(self, name: str) -> tuple[tuple[int, ...], ...]:
        """All groups along `name`, by first rank."""
        return self.spec.groups(*self.axes(name))

    @property
    def borrowed(self) -> dict[str, int]:
        """How many ranks `ep` has of each dense axis that lends it some."""
        found = {
            axis: math.prod(self.spec.degree(p) for p in self.axes("ep") if self.spec.parent(p) == axis)
            for axis in LENDERS
        }
        return {axis: degree for axis, degree in found.items() if degree > 1}

    @property
    def on(self) -> bool:
        """Whether experts are spread or split at all: asked here, once, and nowhere else."""
        return self.degree("ep") > 1 or self.degree("etp") > 1

    @property
    def gradient_divisor(self) -> int:
        """What the sum of an expert's gradient over its expert_dp copies is divided by: the data ranks of the dense view, whose
        losses are averaged. Each copy has summed over its ep ranks' tokens already, so it is not expert_dp."""
        return self.spec.degree(*DATA_AXES)

    def __str__(self) -> str:
        lent = ", ".join(f"{axis} {degree}" for axis, degree in self.borrowed.items()) or "nothing"
        view = " x ".join(f"{name} {self.degree(name)}" for name in VIEW)
        return f"{view} (ep borrows {lent})"


def expert_view(spec: MeshSpec, ep: int, etp: int = 1, inner: int = 1) -> ExpertView:
    """The experts' view of a mesh.

    Arguments:
        spec: the dense view, axes of `AXES`.
        ep: ranks that share one copy of the experts; etp: ranks that split each of them.
        inner: consecutive ranks of ep that are told apart as those of one node.

    Raises:
        PlanError: `expert-fold` where the mesh cannot be folded so, with the degrees that it can.
    """
    tp = spec.degree("tp")
    if etp < 1 or tp % etp:
        raise PlanError(
            f"etp {etp} does not fit into tp {tp}: experts are split over the innermost ranks of tp",
            code="expert-fold",
            legal="etp: " + ", ".join(str(d) for d in divisors(tp)),
        )
    room = {"dp_shard": spec.degree("dp_shard"), "cp": spec.degree("cp"), "tp": tp // etp}
    legal = legal_degrees(spec, etp)
    if ep not in legal:
        raise PlanError(
            f"ep {ep} cannot be folded into {spec}: it takes whole ranks of dp_shard, then of cp, then of tp"
            + (f" outside etp {etp}" if etp > 1 else ""),
            code="expert-fold",
            legal="ep: " + ", ".join(str(d) for d in legal),
        )
    parts: dict[str, list[str]] = {name: [] for name in (*VIEW, _NODE)}
    left, borrowed = ep, {}
    for axis, most in room.items():
        borrowed[axis] = math.gcd(left, most)
        left //= borrowed[axis]
    near = _inside_nodes(borrowed, [axis for axis in spec.uncut if axis in borrowed], inner)
    for axis in spec.uncut:
        if axis == "pp":
            continue
        degree, lent = spec.degree(axis), borrowed.get(axis, 1)
        split = etp if axis == "tp" else 1
        here = near.get(axis, 1)
        sizes = {"expert_dp": degree // lent // split, "ep": lent // here, _NODE: here, "etp": split}
        busy = [name for name, size in sizes.items() if size > 1]
        if len(busy) > 1:
            if axis not in spec.names:
                raise PlanError(
                    f"{axis} is cut into {' x '.join(spec.sub_axes[axis])} already, and experts need another cut",
                    code="expert-fold",
                    legal=f"ep and etp that take all of {axis} or nothing",
                )
            spec = spec.split_axis(axis, {f"{axis}_{name}": sizes[name] for name in busy})
            for name in busy:
                parts[name].append(f"{axis}_{name}")
        elif busy:
            parts[busy[0]] += spec.leaves(axis)
    node = tuple(parts.pop(_NODE))
    parts["ep"] = [axis for axis in spec.names if axis in (*parts["ep"], *node)]
    return ExpertView(spec, tuple((name, tuple(leaves)) for name, leaves in parts.items()), node)


def _inside_nodes(borrowed: dict[str, int], order: list[str], inner: int) -> dict[str, int]:
    """Of the ranks that ep borrows of each axis, `order` from outermost to innermost, how many are on one node: all of the
    innermost axes, and a divisor of the next."""
    found, left = {}, inner
    for axis in reversed(order):
        found[axis] = math.gcd(left, borrowed[axis])
        left //= found[axis]
        if found[axis] < borrowed[axis]:
            break
    if left == 1:
        return found
    legal, whole = {1}, 1
    for axis in reversed(order):
        legal |= {whole * d for d in divisors(borrowed[axis])}
        whole *= borrowed[axis]
    raise PlanError(
        f"ep {whole} has no nodes of {inner} consecutive ranks",
        code="expert-fold",
        legal="inner: " + ", ".join(map(str, sorted(legal))),
    )


def legal_degrees(spec: MeshSpec, etp: int = 1) -> list[int]:
    """Every `ep` that `spec` can be folded to: a divisor of dp_shard, or all of it times one of cp, and so on."""
    found, whole = {1}, 1
    for most in (spec.degree("dp_shard"), spec.degree("cp"), spec.degree("tp") // etp):
        found |= {whole * d for d in divisors(most)}
        whole *= most
    return sorted(found)
