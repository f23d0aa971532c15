"""Mesh axes and their degrees: coordinates and groups of any rank in closed form, without building a mesh."""

from __future__ import annotations

import difflib
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

from meshplan.errors import PlanError

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""Axes a mesh may name, in the usual order, outermost first."""

DATA_AXES = ("dp_replicate", "dp_shard", "cp")
"""Axes whose ranks hold different tokens: gradients are averaged over them."""

ALIASES = {"dp": ("dp_replicate", "dp_shard")}
"""Names that stand for several axes; legal wherever an axis is asked about, not as an axis of a mesh."""


@dataclass(frozen=True)
class MeshSpec:
    """A mesh as numbers. Rank `r` has row-major coordinates: the last axis varies fastest.

    An axis the spec does not have has degree 1, and every rank is alone on it. Where several axes are asked for at
    once they are flattened in mesh order (outermost first), whatever order they are named in. Asking about an axis
    that was split (`split_axis`) asks about its sub-axes flattened, and `dp` is dp_replicate x dp_shard.

    Attributes:
        axes: (name, degree) pairs, outermost first.
        parents: (sub-axis, axis it was cut from) pairs.
    """

    axes: tuple[tuple[str, int], ...]
    parents: tuple[tuple[str, str], ...] = ()

    @classmethod
    def resolve(cls, mesh: Mapping[str, int], world_size: int) -> MeshSpec:
        """The spec of a plan's `mesh` on `world_size` ranks; one degree may be -1, "whatever is left".

        Raises PlanError: `unknown-axis` for a name not in `AXES`, `bad-degree` for a degree that is neither positive
        nor -1, `mesh-size` when the product of the degrees is not the world size.
        """
        for name, degree in mesh.items():
            if name not in AXES:
                near = difflib.get_close_matches(name, AXES, n=1)
                hint = f"; did you mean {near[0]}?" if near else ""
                raise PlanError(f"{name!r} is not a mesh axis{hint}", code="unknown-axis", legal=list(AXES))
            if isinstance(degree, bool) or not isinstance(degree, int) or (degree < 1 and degree != -1):
                raise PlanError(
                    f"mesh axis {name} has degree {degree!r}",
                    code="bad-degree",
                    legal="a positive integer, or -1 on one axis for whatever is left",
                )
        free = [name for name, degree in mesh.items() if degree == -1]
        fixed = math.prod(degree for degree in mesh.values() if degree != -1)
        if len(free) > 1:
            raise PlanError(
                f"mesh axes {' and '.join(free)} are both -1, which has no single answer for {world_size} ranks",
                code="mesh-size",
                legal="-1 on one axis at most",
            )
        if (free and world_size % fixed) or (not free and fixed != world_size):
            raise _size_error(mesh, fixed, world_size, free)
        return cls(tuple((name, world_size // fixed if degree == -1 else degree) for name, degree in mesh.items()))

    @property
    def world_size(self) -> int:
        """Number of ranks: the product of the degrees."""
        return math.prod(degree for _, degree in self.axes)

    @property
    def names(self) -> tuple[str, ...]:
        """Axis names, outermost first."""
        return tuple(name for name, _ in self.axes)

    @property
    def uncut(self) -> dict[str, int]:
        """Degree by axis, sub-axes under the axis that they were cut from."""
        return {name: self.degree(name) for name in dict.fromkeys(self.parent(name) for name in self.names)}

    @property
    def sub_axes(self) -> dict[str, dict[str, int]]:
        """Degree by sub-axis, outermost first, of each axis that is cut."""
        cut = dict.fromkeys(parent for _, parent in self.parents)
        return {axis: {name: self.degree(name) for name, parent in self.parents if parent == axis} for axis in cut}

    def parent(self, axis: str) -> str:
        """The axis that `axis` was cut from by `split_axis`, or `axis` itself."""
        return dict(self.parents).get(axis, axis)

    def leaves(self, *axes: str) -> tuple[str, ...]:
        """The axes of this spec that `axes` stand for, in mesh order: aliases and split axes are opened, axes the
        spec does not have are left out."""
        wanted = {name for axis in axes for name in ALIASES.get(axis, (axis,))}
        return tuple(name for name in self.names if wanted & self._ancestry(name))

    def degree(self, *axes: str) -> int:
        """Number of ranks along `axes` flattened; 1 for axes the spec does not have."""
        sizes = dict(self.axes)
        return math.prod(sizes[name] for name in self.leaves(*axes))

    def coords(self, rank: int) -> dict[str, int]:
        """The coordinate of `rank` on every axis. Raises PlanError `bad-rank` outside the world."""
        self._check_rank(rank)
        return {name: rank // stride % degree for name, degree, stride in self._strided()}

    def rank_of(self, coords: Mapping[str, int]) -> int:
        """The rank at `coords`; axes left out are at 0. Raises PlanError `bad-rank` for a coordinate off its axis."""
        sizes = dict(self.axes)
        for name, at in coords.items():
            if not 0 <= at < sizes.get(name, 1):
                raise PlanError(
                    f"coordinate {at} is off axis {name}, which has degree {sizes.get(name, 1)}", code="bad-rank"
                )
        return sum(coords.get(name, 0) * stride for name, _, stride in self._strided())

    def coord(self, rank: int, *axes: str) -> int:
        """The position of `rank` in its group over `axes` (flattened)."""
        at, leaves, position = self.coords(rank), self.leaves(*axes), 0
        for name, degree in self.axes:
            if name in leaves:
                position = position * degree + at[name]
        return position

    def group_of(self, rank: int, *axes: str) -> tuple[int, ...]:
        """The ranks that differ from `rank` only on `axes`, ordered by their position. Costs the size of the group."""
        at, leaves = self.coords(rank), self.leaves(*axes)
        base = rank - sum(at[name] * stride for name, _, stride in self._strided() if name in leaves)
        return tuple(base + offset for offset in self.offsets(*axes))

    def groups(self, *axes: str) -> tuple[tuple[int, ...], ...]:
        """All groups over `axes`, by first rank. Together they hold every rank once."""
        leaves, offsets = self.leaves(*axes), self.offsets(*axes)
        others = tuple(name for name in self.names if name not in leaves)
        return tuple(tuple(base + offset for offset in offsets) for base in self.offsets(*others))

    def offsets(self, *axes: str) -> tuple[int, ...]:
        """Members of the group over `axes` relative to its first rank: every group is its first rank plus these."""
        leaves = self.leaves(*axes)
        steps = [range(0, degree * stride, stride) for name, degree, stride in self._strided() if name in leaves]
        return tuple(sum(step) for step in itertools.product(*steps))

    def stride(self, axis: str) -> int:
        """How far apart in rank neighbours on `axis` are (an axis of this spec, not an alias)."""
        return {name: stride for name, _, stride in self._strided()}[axis]

    def split_axis(self, axis: str, parts: Mapping[str, int]) -> MeshSpec:
        """This mesh with `axis` cut into sub-axes, outermost first; ranks keep their places.

        For example `split_axis("tp", {"tp_kv": 2, "tp_rep": 2})`: `tp` still answers, as both flattened.
        Sub-axes carry the parent's name as prefix, so that a reader of a group or a placement sees what it belongs to.

        Raises PlanError `mesh-size` when the parts do not multiply to the degree, `unknown-axis` for an axis the spec
        does not have or a name without the prefix.
        """
        if axis not in self.names:
            raise PlanError(f"this mesh has no axis {axis!r} to split", code="unknown-axis", legal=list(self.names))
        bad = [name for name in parts if not name.startswith(f"{axis}_") or name in self.names]
        if bad or not parts:
            raise PlanError(
                f"{', '.join(bad) or 'nothing'} cannot name a sub-axis of {axis}",
                code="unknown-axis",
                legal=f"new names that begin with {axis}_",
            )
        degree = self.degree(axis)
        if math.prod(parts.values()) != degree or min(parts.values()) < 1:
            sizes = " x ".join(f"{name} {size}" for name, size in parts.items())
            raise PlanError(
                f"{sizes} is not a cut of {axis}, whose degree is {degree}",
                code="mesh-size",
                legal=f"degrees that multiply to {degree}",
            )
        at = self.names.index(axis)
        axes = self.axes[:at] + tuple(parts.items()) + self.axes[at + 1 :]
        return MeshSpec(axes, self.parents + tuple((name, axis) for name in parts))

    def __str__(self) -> str:
        return " x ".join(f"{name} {degree}" for name, degree in self.axes) or "no axes"

    def _strided(self) -> list[tuple[str, int, int]]:
        out, stride = [], 1
        for name, degree in reversed(self.axes):
            out.append((name, degree, stride))
            stride *= degree
        return out[::-1]

    def _ancestry(self, name: str) -> set[str]:
        up, line = dict(self.parents), {name}
        while name in up:
            name = up[name]
            line.add(name)
        return line

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            raise PlanError(
                f"rank {rank} is outside a world of {self.world_size}",
                code="bad-rank",
                legal=f"0 to {self.world_size - 1}",
            )


def _size_error(mesh: Mapping[str, int], fixed: int, world_size: int, free: list[str]) -> PlanError:
    """The error of a mesh that does not fill its world, with what would."""
    shown = " x ".join(f"{name} {degree}" for name, degree in mesh.items() if degree != -1) or "an empty mesh"
    fixes = []
    for name, degree in mesh.items():
        rest = fixed // degree if degree != -1 else 0
        if rest and world_size % rest == 0:
            fixes.append(f"{name}: {world_size // rest}")
    if free:
        below = world_size - world_size % fixed
        sizes = f"{below} or {below + fixed}" if below else f"{fixed}"
        message = f"{shown} needs a multiple of {fixed} ranks, and there are {world_size}"
    else:
        sizes = f"{fixed}"
        message = f"{shown} is {fixed} rank{'s' * (fixed != 1)}, and there are {world_size}"
    if not mesh:
        fixes.append(f"dp_shard: {world_size}")
    return PlanError(message, code="mesh-size", legal=[*fixes, f"a launch with {sizes} ranks"])


def hybrid_axes(axis: str) -> tuple[str, str]:
    """Names of the axes that a hybrid method sees `axis` as: its rings, and the neighbours that exchange heads."""
    return f"{axis}_ring", f"{axis}_heads"


def divisors(n: int) -> list[int]:
    """The numbers of ranks that divide `n`, from 1 on; none for an `n` below 1."""
    return [d for d in range(1, n + 1) if n % d == 0]
