"""Layouts as a user writes them: one placement per mesh axis, for one tensor or for several by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from meshplan.errors import PlanError
from meshplan.plan.placements import Partial, Placement, Replicate, Shard, parse_placement
from meshplan.plan.source import Source
from meshplan.plan.values import as_int, nearest_word, placed, wrong

Layout = dict[str, Placement]
"""Placement by mesh axis. Axes left out are inferred."""

AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
"""Axes a mesh may have, in their usual order, outermost first."""
INPUT_AXES = ("dp", "dp_replicate", "dp_shard", "cp", "tp")
"""Axes that may place an input of the model; `dp` is dp_replicate x dp_shard."""
BOUNDARY_AXES = ("dp_replicate", "dp_shard", "cp", "tp")
"""Axes on which a rule may place a module's input or output."""
PARAM_AXES = ("tp",)
"""Axes on which a rule may shard a parameter; on the data axes the `fsdp` section owns it, on pp its stage does."""

_ELSEWHERE = {
    "dp": "`dp` stands for dp_replicate x dp_shard and is legal in an input's `place` only",
    "ep": "the `experts` section owns the axis ep",
    "etp": "the `experts` section owns the axis etp",
    "pp": "the `pipeline` section owns the axis pp",
}


def as_placement(value: Any, source: Source) -> Placement:
    """A placement, or its notation as a string. Raises PlanError `bad-placement`."""
    if isinstance(value, Shard | Replicate | Partial):
        return value
    if isinstance(value, str):
        with placed(source):
            return parse_placement(value)
    raise PlanError(f"{value!r} is not a placement", code="bad-placement", where=source.where, legal="S(<dim>), R or P")


def as_layout(what: str, value: Any, source: Source, axes: Iterable[str]) -> Layout:
    """`{axis: placement}` in normal form. `parts` beside the axis belongs to the one axis that shards.

    Raises PlanError: `unknown-axis` for an axis not in `axes`, `bad-placement`, `bad-parts`, `bad-value`.
    """
    if not isinstance(value, Mapping):
        raise wrong(what, value, source, "a mapping from mesh axis to placement, such as {tp: S(0)}")
    legal, layout = list(axes), {}
    for axis, placement in value.items():
        if axis == "parts":
            continue
        if axis not in legal:
            hint = f"; {_ELSEWHERE[axis]}" if axis in _ELSEWHERE else nearest_word(axis, legal)
            raise PlanError(
                f"{what} cannot be placed on axis {axis!r}{hint}",
                code="unknown-axis",
                where=source.child(axis).key_where,
                legal=legal,
            )
        layout[axis] = as_placement(placement, source.child(axis))
    return _with_parts(what, layout, value["parts"], source) if "parts" in value else layout


def as_param_layout(what: str, value: Any, source: Source) -> Layout:
    """The layout of a parameter: as `as_layout`, sharded on tp only. R on another axis is what holds anyway, and legal.

    Raises PlanError `partial-parameter` for P: a parameter is a value, not a sum in waiting.
    """
    layout = as_layout(what, value, source, BOUNDARY_AXES)
    for axis, placement in layout.items():
        where = source.child(axis).where
        if isinstance(placement, Partial):
            raise PlanError(
                f"{what} cannot be P on {axis}: a parameter is stored, and a partial sum is not a stored value",
                code="partial-parameter",
                where=where,
                legal="S(<dim>) or R",
            )
        if isinstance(placement, Shard) and axis not in PARAM_AXES:
            raise PlanError(
                f"{what} cannot be sharded on {axis} by a rule: the fsdp section owns parameters on the data axes",
                code="unknown-axis",
                where=where,
                legal=[*PARAM_AXES, "fsdp: {units: [...], shard_dims: {...}}"],
            )
    return layout


def as_layouts(what: str, value: Any, source: Source) -> dict[str, Layout]:
    """Layouts of a module's inputs or outputs by tensor, from either `{axis: placement}` (kept under the key `""`) or
    `{name, index or key path: {axis: placement}}`. None is no layout at all.

    Raises PlanError `bad-value` when the two forms are mixed.
    """
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise wrong(what, value, source, "{axis: placement}, or {name or index: {axis: placement}}")
    named = [key for key, layout in value.items() if isinstance(layout, Mapping)]
    if not named:
        layout = as_layout(what, value, source, BOUNDARY_AXES)
        return {"": layout} if layout else {}
    if len(named) != len(value) or (len(value) > 1 and "" in value):
        plain = next(key for key in value if key not in named or key == "")
        raise PlanError(
            f"{what} names {named[-1]!r} and also has the bare entry {plain!r}",
            code="bad-value",
            where=source.child(plain).key_where,
            legal="either {axis: placement}, or every layout under its tensor's name or index",
        )
    layouts = {}
    for key, layout in value.items():
        if isinstance(key, bool) or not isinstance(key, str | int) or (isinstance(key, int) and key < 0):
            raise wrong(f"a tensor's name in {what}", key, source.child(key), "a name, an index from 0, or a key path")
        layouts[str(key)] = as_layout(f"{what} {key!r}", layout, source.child(key), BOUNDARY_AXES)
    return layouts


def layout_dict(layout: Layout) -> dict[str, str]:
    """A layout as plain strings by axis: the form of YAML, JSON and messages."""
    return {axis: str(placement) for axis, placement in layout.items()}


def layouts_dict(layouts: dict[str, Layout]) -> dict[str, Any]:
    """The inverse of `as_layouts`: the bare form where the only key is `""`."""
    if set(layouts) == {""}:
        return layout_dict(layouts[""])
    return {key: layout_dict(layout) for key, layout in layouts.items()}


def _with_parts(what: str, layout: Layout, parts: Any, source: Source) -> Layout:
    here = source.child("parts")
    if not isinstance(parts, list | tuple) or not parts:
        raise wrong(f"parts of {what}", parts, here, "a list of sizes, such as [8, 8, 8]")
    sizes = tuple(as_int(f"parts[{i}] of {what}", size, here.child(i)) for i, size in enumerate(parts))
    sharded = [axis for axis, placement in layout.items() if isinstance(placement, Shard)]
    if len(sharded) != 1 or layout[sharded[0]] != Shard(layout[sharded[0]].dim):  # type: ignore[union-attr]
        raise PlanError(
            f"parts of {what} belong to one sharded axis, and this layout has {len(sharded) or 'none'}",
            code="bad-parts",
            where=here.key_where,
            legal="parts beside exactly one S(<dim>), or written inside it: S(0, parts=[8, 8])",
        )
    axis = sharded[0]
    shard = layout[axis]
    assert isinstance(shard, Shard)
    return layout | {axis: replace(shard, parts=sizes)}
