"""What a checkpoint holds, by the user's names: a model's tensors, an optimizer's state, and small values as JSON."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from meshplan.errors import PlanError

# Wrappers that insert a segment in the names of what they wrap; none is a name that users give.
WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})


def user_name(name: str) -> str:
    """`name` as the plain eager model has it: without the segments that compile and checkpoint wrappers insert."""
    return ".".join(s for s in name.split(".") if s not in WRAPPERS)


def unwrapped(model: nn.Module) -> nn.Module:
    """The user's root module beneath DistributedDataParallel and wrappers."""
    while True:
        inner = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else None
        for wrapper in WRAPPERS:
            inner = inner if inner is not None else model._modules.get(wrapper)
        if inner is None:
            return model
        model = inner


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The live parameters and persistent buffers by user name, tied ones under each of their names.

    Raises PlanError for state that is no tensor (`extra-state`), not held by the module itself (`not-live`) or has no
    memory (`meta-tensor`), and for two tensors of one name (`name-clash`).
    """
    model = unwrapped(model)
    state = model.state_dict(keep_vars=True)  # runs FSDP2's hooks, so that parameters are in their sharded form
    live = {id(t) for m in model.modules() for t in (*m._parameters.values(), *m._buffers.values()) if t is not None}
    out: dict[str, Tensor] = {}
    for raw, value in state.items():
        name = user_name(raw)
        module = name.rpartition(".")[0]
        if not isinstance(value, Tensor) or raw.endswith("_extra_state"):
            if value is None:
                continue
            raise PlanError(
                f"{name} is a {type(value).__name__}, kept by the module's own get_extra_state",
                code="extra-state",
                module=module,
                legal="parameters and buffers; pass other values as extra=",
            )
        if id(value) not in live:
            raise PlanError(
                f"{name} in the state dict is not the module's own tensor: a state-dict hook made it",
                code="not-live",
                module=module,
            )
        if value.device.type == "meta":
            raise PlanError(
                f"{name} is on the meta device: it has no values",
                code="meta-tensor",
                module=module,
                legal="materialise the model first (parallelize does)",
            )
        if name in out and out[name] is not value:
            raise PlanError(f"two tensors are named {name} once wrappers are removed", code="name-clash", module=module)
        out[name] = value
    return out


def tied_names(tensors: Mapping[str, Tensor]) -> list[list[str]]:
    """Groups of two or more names that are one tensor, e.g. `[["head.weight", "embed.weight"]]`, sorted."""
    by_id: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        by_id.setdefault(id(tensor), []).append(name)
    return sorted(sorted(names) for names in by_id.values() if len(names) > 1)


@dataclass(frozen=True)
class OptimizerState:
    """An optimizer's content by parameter name.

    Attributes:
        groups: for each parameter group, `names` of its parameters and its `options` (lr, betas, ...), JSON-encoded.
        tensors: (parameter name, field) -> live state tensor, e.g. ("wq.weight", "exp_avg").
        scalars: parameter name -> field -> JSON value, for state that is no tensor.
        parameters: parameter name -> live parameter.
    """

    groups: list[dict[str, Any]]
    tensors: dict[tuple[str, str], Tensor]
    scalars: dict[str, dict[str, Any]]
    parameters: dict[str, Tensor]


def optimizer_state(optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> OptimizerState:
    """Read `optimizer` without copying; `tensors` are the model's, a tied parameter goes by its first name.

    Raises PlanError `unknown-parameter` for a parameter that is not the model's, and `optimizer-state` for a state
    tensor whose layout cannot be known.
    """
    names: dict[int, str] = {}
    for name, tensor in tensors.items():
        names.setdefault(id(tensor), name)
    out = OptimizerState([], {}, {}, {})
    for number, group in enumerate(optimizer.param_groups):
        for p in group["params"]:
            if id(p) not in names:
                raise PlanError(
                    f"parameter group {number} holds a parameter of shape {list(p.shape)} that the model does not",
                    code="unknown-parameter",
                    legal="make the optimizer after parallelize, from model.parameters()",
                )
            out.parameters[names[id(p)]] = p
        options = {k: v for k, v in group.items() if k not in ("params", "param_names")}
        out.groups.append({"names": [names[id(p)] for p in group["params"]], "options": encode(options, number_of)})
    for name, p in out.parameters.items():
        for field, value in optimizer.state.get(p, {}).items():
            if isinstance(value, Tensor):
                if isinstance(p, DTensor) and not isinstance(value, DTensor) and value.ndim:
                    raise PlanError(
                        f"optimizer state {field} of {name} is a plain tensor {list(value.shape)} although the "
                        f"parameter is sharded as {p.placements}: its layout is unknown",
                        code="optimizer-state",
                        legal="state that is a DTensor, or a 0-dim tensor",
                    )
                out.tensors[name, field] = value
            else:
                out.scalars.setdefault(name, {})[field] = encode(value, number_of)
    return out


def nearest(name: str, names: Iterable[str]) -> str:
    """The closest of `names`, as ` (nearest: x)`, or nothing."""
    close = difflib.get_close_matches(name, list(names), n=1, cutoff=0.5)
    return f" (nearest: {close[0]})" if close else ""


def number_of(tensor: Tensor) -> Any:
    """A one-element tensor, such as a capturable optimizer's learning rate, as a number."""
    if tensor.numel() != 1:
        raise PlanError(f"an option that is a tensor of shape {list(tensor.shape)}", code="optimizer-state")
    return tensor.item()


def encode(value: Any, tensor: Callable[[Tensor], Any]) -> Any:
    """`value` as JSON that `decode` reverses exactly: None, bool, int, float, str, list, tuple, dict; tensors through
    `tensor`. Raises PlanError `not-plain-data` for any other type: reading it back would have to run code."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Tensor):
        return tensor(value)
    if isinstance(value, list):
        return [encode(v, tensor) for v in value]
    if isinstance(value, tuple):
        return {"$tuple": [encode(v, tensor) for v in value]}
    if isinstance(value, dict):
        if all(isinstance(k, str) and not k.startswith("$") for k in value):
            return {k: encode(v, tensor) for k, v in value.items()}
        return {"$dict": [[encode(k, tensor), encode(v, tensor)] for k, v in value.items()]}
    raise PlanError(
        f"a {type(value).__name__} cannot be put in a checkpoint",
        code="not-plain-data",
        legal="None, bool, int, float, str, list, tuple, dict and tensors",
    )


def decode(value: Any, tensor: Callable[[Any], Tensor] | None = None) -> Any:
    """What `encode` was given; `tensor` turns `{"$tensor": key}` back."""
    if isinstance(value, list):
        return [decode(v, tensor) for v in value]
    if isinstance(value, dict):
        if "$tuple" in value:
            return tuple(decode(v, tensor) for v in value["$tuple"])
        if "$dict" in value:
            return {decode(k, tensor): decode(v, tensor) for k, v in value["$dict"]}
        if "$tensor" in value and tensor is not None:
            return tensor(value["$tensor"])
        return {k: decode(v, tensor) for k, v in value.items()}
    return value
