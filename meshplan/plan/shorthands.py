"""Shorthands: `colwise`, `rowwise`, `embedding`, `vocab_head` and `sequence`, written out against a module's shapes."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor, nn

from meshplan.errors import PlanError
from meshplan.plan.layouts import Layout
from meshplan.plan.placements import Placement, R, S, Shard
from meshplan.plan.rules import Rule

AXIS = "tp"
"""Every shorthand speaks of this axis."""

_OUT_ATTRIBUTES = ("out_features", "nf")
_IN_ATTRIBUTES = ("in_features", "nx")


def expand(rule: Rule, module: nn.Module) -> Rule:
    """`rule` without its `use`: what the shorthand stands for on this module, under what the rule says itself.

    | shorthand    | weight             | bias | input   | output                  |
    |--------------|--------------------|------|---------|-------------------------|
    | `colwise`    | split on its output dim | S(0) | R  | left out, so inferred   |
    | `vocab_head` | split on its output dim | S(0) | R  | S(-1)                   |
    | `rowwise`    | split on its input dim  | R    | S(-1) | R                     |
    | `embedding`  | S(0), the vocabulary    |      | left out | R                  |
    | `sequence`   | every parameter R       | R    | S(1) | S(1)                   |

    all on axis tp. A bias follows the `parts` the rule gives the weight. A bias the module does not have is left out.

    Raises PlanError: `adapter-moved` where an adapter took the weight away, `shorthand-misfit` for a module that the
    shorthand does not fit, `shorthand-unclear` where shapes do not tell the weight's output dim from its input dim.
    """
    if rule.use is None:
        return rule
    params: dict[str, Placement]
    if rule.use == "sequence":
        params = {name: R for name, _ in module.named_parameters()}
        return _explicit(rule, params, given=S(1), returned=S(1))
    weight = _weight(rule, module)
    said = rule.params.get("weight", {}).get(AXIS)
    if rule.use == "embedding":
        if hasattr(module, "in_features") or hasattr(module, "nf"):
            raise _misfit(rule, "a projection, not a table of rows to look up", "colwise or rowwise")
        return _explicit(rule, {"weight": S(0)}, returned=R)
    out_dim = output_dim(rule, module, weight)
    if rule.use == "rowwise":
        if hasattr(module, "num_embeddings"):
            raise _misfit(rule, "a table of rows to look up, whose input cannot be split", "embedding")
        params = {"weight": S(1 - out_dim), "bias": R}
        returned: Placement | None = R
        given: Placement = S(-1)
    else:
        parts = said.parts if isinstance(said, Shard) and said.dim % 2 == out_dim else None
        params = {"weight": S(out_dim), "bias": S(0, parts)}
        returned = S(-1) if rule.use == "vocab_head" else None
        given = R
    own = {name for name, _ in module.named_parameters(recurse=False)}
    return _explicit(rule, {name: p for name, p in params.items() if name in own}, given, returned)


def _explicit(
    rule: Rule, params: dict[str, Placement], given: Placement | None = None, returned: Placement | None = None
) -> Rule:
    """`rule` with the shorthand's placements put beneath its own."""
    layouts = {name: dict(layout) for name, layout in rule.params.items()}
    for name, placement in params.items():
        layouts.setdefault(name, {}).setdefault(AXIS, placement)
    return replace(
        rule,
        use=None,
        params=layouts,
        input=_beneath(rule.input, given, first="0"),
        output=_beneath(rule.output, returned, first=next(iter(rule.output), "")),
    )


def _beneath(said: dict[str, Layout], placement: Placement | None, first: str) -> dict[str, Layout]:
    """The boundary layouts `said`, with the shorthand's `placement` for the tensor under `first` where none is said."""
    if placement is None or any(AXIS in layout for layout in said.values()):
        return said
    key = "" if set(said) <= {""} else first
    return {**said, key: {**said.get(key, {}), AXIS: placement}}


def _weight(rule: Rule, module: nn.Module) -> Tensor:
    own = dict(module.named_parameters(recurse=False))
    if "weight" not in own:
        below = [name for name, _ in module.named_parameters() if name.rpartition(".")[2] == "weight"]
        if any(name.startswith("base_layer.") for name in below):
            raise PlanError(
                f"an adapter wraps the module that `use: {rule.use}` is for: its weight is now base_layer.weight",
                code="adapter-moved",
                where=rule.where,
                legal=f"the rule at '{rule.at}.base_layer', or explicit params under this one",
            )
        raise _misfit(rule, "without a weight of its own", below or "an explicit params: for its parameters")
    if own["weight"].ndim != 2:
        raise _misfit(rule, f"with a weight of {own['weight'].ndim} dims", "explicit params: and input:")
    return own["weight"]


def output_dim(rule: Rule, module: nn.Module, weight: Tensor) -> int:
    """Which dim of a 2-D weight counts output features: 0 as in nn.Linear, 1 as in nn.Embedding and transposed linears.

    Attributes decide, and shapes must agree with them. `nf` and `nx` name the features of a transposed weight
    [in, out], which matters where both sizes are equal.
    """
    if hasattr(module, "embedding_dim"):
        return 1
    rows, columns = weight.shape
    out = next((getattr(module, name) for name in _OUT_ATTRIBUTES if hasattr(module, name)), None)
    inside = next((getattr(module, name) for name in _IN_ATTRIBUTES if hasattr(module, name)), None)
    bias = getattr(module, "bias", None)
    if out is None and isinstance(bias, Tensor) and bias.ndim == 1:
        out = bias.shape[0]
    fits = [
        dim
        for dim, (o, i) in enumerate([(rows, columns), (columns, rows)])
        if (out is not None or inside is not None) and out in (None, o) and inside in (None, i)
    ]
    if len(fits) == 2 and hasattr(module, "out_features"):
        return 0
    if len(fits) == 2 and hasattr(module, "nf"):
        return 1
    if len(fits) != 1:
        raise PlanError(
            f"the weight {[rows, columns]} does not tell which of its dims is the output",
            code="shorthand-unclear",
            where=rule.where,
            legal="explicit params: {weight: {tp: S(<dim>)}} in place of the shorthand",
        )
    return fits[0]


def _misfit(rule: Rule, what: str, legal: str | list[str]) -> PlanError:
    return PlanError(
        f"`use: {rule.use}` does not fit a module {what}", code="shorthand-misfit", where=rule.where, legal=legal
    )
