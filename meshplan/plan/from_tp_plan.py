"""A transformers model's own tensor-parallel table, read as explicit rules that mean the same."""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection, Mapping, Set
from typing import Any

from torch import nn

from meshplan.errors import PlanError
from meshplan.plan.names import ModelNames, ParamEntry, names_of
from meshplan.plan.patterns import match, nearest
from meshplan.plan.placements import Placement, R, S, Shard
from meshplan.plan.rules import Rule
from meshplan.plan.source import Source, user_source
from meshplan.plan.values import nearest_word

AXIS = "tp"

COLWISE: dict[str, Placement] = {"colwise": S(-1), "colwise_gather_output": R, "colwise_rep": R}
"""Styles that split a projection's output features, with the layout they return."""
ROWWISE = ("rowwise", "rowwise_split_input", "rowwise_rep")
"""Styles that split a projection's input features and return the sum. They differ in how the input arrives, and that is
for whoever makes it to say."""
PACKED = ("packed_colwise", "packed_rowwise")
"""Styles for a weight that holds two equal parts, gate and up, one after the other."""
REPLICATED = ("replicate", "replicated_with_grad_allreduce")
"""Styles of whole parameters. Whether their gradients are partial is derived, and need not be said."""
SILENT = ("local_params",)
"""Styles that say how a module is run and nothing of layouts."""
OF_EXPERTS = ("moe_tp_experts", "moe_identity_expert", "grouped_gemm", "ep_dispatch_experts", "ep_router")
"""Styles of expert layers, which the `experts` section owns."""
STYLES = (
    *(*COLWISE, *ROWWISE, *PACKED, *REPLICATED, *SILENT),
    *("embedding_rowwise", "embedding_colwise", "sequence_parallel", "mla_kv_a_proj", "all_reduce"),
)


def table_of(model: nn.Module) -> dict[str, str]:
    """The table a transformers model carries: style by path, `*` for a layer's number.

    Raises PlanError `no-tp-plan` for a model that carries none.
    """
    table = dict(getattr(model, "_tp_plan", None) or {})
    if not table:
        base = getattr(getattr(model, "config", None), "base_model_tp_plan", None) or {}
        prefix = getattr(model, "base_model_prefix", "")
        inside = f"{prefix}." if prefix and isinstance(getattr(model, prefix, None), nn.Module) else ""
        table = {inside + path: style for path, style in base.items()}
    if not table:
        raise PlanError(
            f"{type(model).__name__} carries no tensor-parallel plan",
            code="no-tp-plan",
            where=user_source().where,
            legal="a model with `_tp_plan` or `config.base_model_tp_plan`, or a plan of rules",
        )
    return table


def rules_of(model: nn.Module, experts: Collection[str] = ()) -> tuple[Rule, ...]:
    """The table of `model` as explicit rules on tp, in table order.

    An entry reaches a module or a parameter, and `*` in it stands for a number only. Entries that match nothing are
    left out with a warning, as tables are written for families of models; a table of which nothing matches is an error.

    Arguments:
        experts: path patterns of modules that an `experts` section owns; entries at and below them are left to it.

    Raises PlanError: `no-tp-plan`; `unknown-style`; `experts-style` for an entry of experts that no section owns;
    `no-such-module` when nothing matches.
    """
    names, source, table = names_of(model), user_source(), table_of(model)
    owned = {name for pattern in experts for name in match(pattern, names.module_by_name)}
    # Parameters of modules that the table calls experts are theirs, whatever their own style is called.
    expert_paths = [path for path, style in table.items() if style in OF_EXPERTS]
    # An entry for a parameter comes before that of its module.
    named = {name for path in table for name in _reached(path, names.param_by_name)}
    rules, stray = [], []
    for path, style in table.items():
        _check_style(path, style, source)
        modules = _reached(path, names.module_by_name)
        params = _reached(path, names.param_by_name)
        reached = [*modules, *params]
        if not reached:
            stray.append(path)
            continue
        if all(_inside(name, owned) for name in reached):
            continue
        if style in OF_EXPERTS or any(path.startswith(f"{other}.") for other in expert_paths):
            raise _experts_error(path, style, source)
        rules += _module_rules(path, style, modules, names, named, source)
        rules += _param_rules(path, style, params, names, source)
    if len(stray) == len(table):
        raise PlanError(
            f"no entry of the tensor-parallel plan matches a module of {type(model).__name__}",
            code="no-such-module",
            where=source.where,
            legal=nearest(stray[0], names.module_by_name),
        )
    if stray:
        warnings.warn(
            f"entries of the tensor-parallel plan that match nothing in this model: {', '.join(sorted(stray))}",
            stacklevel=3,
        )
    return tuple(rules)


def _check_style(path: str, style: Any, source: Source) -> None:
    if style not in STYLES and style not in OF_EXPERTS:
        raise PlanError(
            f"{path!r} has the style {style!r}, whose meaning is not known{nearest_word(style, STYLES)}",
            code="unknown-style",
            where=source.where,
            legal=list(STYLES),
        )


def _experts_error(path: str, style: str, source: Source) -> PlanError:
    owner = path.rpartition(".")[0] if style in PACKED + ROWWISE + tuple(COLWISE) else path
    return PlanError(
        f"{path!r} has the style {style!r}, which splits experts",
        code="experts-style",
        where=source.where,
        legal=f"an experts section that owns them: experts={{'at': ['{owner}']}}",
    )


def _reached(path: str, names: Mapping[str, Any]) -> list[str]:
    """The names that are `path` once a number between dots counts as `*`."""
    regex = re.compile(r"\d+".join(map(re.escape, path.split("*"))))
    return [name for name in names if regex.fullmatch(name)]


def _inside(name: str, owners: Collection[str]) -> bool:
    segments = name.split(".")
    return any(".".join(segments[:end]) in owners for end in range(len(segments) + 1))


def _module_rules(
    path: str, style: str, reached: list[str], names: ModelNames, named: Set[str], source: Source
) -> list[Rule]:
    """Rules for the modules `reached`: one at the table's own path where they all read the same."""
    entries = {id(names.module_by_name[name]): names.module_by_name[name] for name in reached}
    each = {}
    for entry in entries.values():
        own = {name: param for name, param in names.params_of(entry).items() if "." not in name}
        unnamed = {name: param for name, param in own.items() if named.isdisjoint(param.plain)}
        each[entry.name] = _module_rule(entry.name, style, unnamed, source)
    return _at_one_path(path, {name: rule for name, rule in each.items() if rule is not None}, names)


def _at_one_path(path: str, each: dict[str, Rule], names: ModelNames) -> list[Rule]:
    """The rules `each`, as a single one at `path` when it says the same of exactly the same modules."""
    if not each:
        return []
    same = len({str(rule.to_dict() | {"at": ""}) for rule in each.values()}) == 1
    if same and {entry.name for entry in names.match(path)} == set(each):
        rule = next(iter(each.values()))
        return [Rule(path, params=rule.params, input=rule.input, output=rule.output, source=rule.source)]
    return list(each.values())


def _module_rule(at: str, style: str, own: Mapping[str, ParamEntry], source: Source) -> Rule | None:
    """The rule of one module with the parameters `own`; None for a style that says nothing of layouts."""
    given: Placement | None = None
    returned: Placement | None = None
    params: dict[str, Placement] = {name: _param(name, style, param) for name, param in own.items()}
    if style in SILENT:
        return None
    if style in COLWISE:
        given, returned = R, COLWISE[style]
    elif style in ROWWISE:
        given, returned = S(-1), R
    elif style == "packed_colwise":
        weight = params.get("weight")
        given, returned = R, S(-1, weight.parts if isinstance(weight, Shard) else None)
    elif style in ("embedding_rowwise", "embedding_colwise"):
        given, returned = R, R
    elif style == "sequence_parallel":
        given, returned = S(1), S(1)
    elif style in ("mla_kv_a_proj", "all_reduce"):
        # The table's own extra reduction, of the rotary part's gradient, is one that ownership of gradients implies.
        returned = R
        params = {} if style == "all_reduce" else params
    if not params and given is None and returned is None:
        return None
    return Rule(
        at,
        params={name: {AXIS: placement} for name, placement in params.items()},
        input={} if given is None else {AXIS: given},
        output={} if returned is None else {AXIS: returned},
        source=source,
    )


def _param_rules(path: str, style: str, reached: list[str], names: ModelNames, source: Source) -> list[Rule]:
    """Rules for an entry that names a bare parameter, such as attention sinks: at the module that owns it."""
    each = {}
    for full in reached:
        owner, _, name = full.rpartition(".")
        placement = _param(name, style, names.param_by_name[full])
        if names.param_by_name[full].param.ndim > 2:
            raise _experts_error(path, style, source)
        each[owner] = Rule(owner, params={name: {AXIS: placement}}, source=source)
    return [] if style in SILENT else _at_one_path(path.rpartition(".")[0], each, names)


def _param(name: str, style: str, entry: ParamEntry) -> Placement:
    """What a style makes of one parameter: dims counted as the table's own code counts them."""
    shape = entry.param.shape
    dims = len(shape)
    if dims == 0:
        return R
    if style in COLWISE or style == "packed_colwise":
        dim = max(dims - 2, 0)
        # A packed bias goes part by part as its weight does.
        return S(dim, _halves(shape[dim]) if style == "packed_colwise" else None)
    if style in ROWWISE:
        return R if name == "bias" else S(dims - 1)
    if style == "packed_rowwise":
        return R if dims == 1 else S(dims - 1, _halves(shape[dims - 1]))
    if style == "embedding_rowwise":
        return S(0)
    return S(1) if style == "embedding_colwise" else R


def _halves(size: int) -> tuple[int, int]:
    return (size - size // 2, size // 2)
