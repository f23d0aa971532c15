"""Models on the meta device: built with their buffers computed for real, and given storage without untying anything.

`torch.device("meta")` forgets how a buffer was computed, and `to_empty` turns such buffers into raw memory and unties
weights. Parameters are what is large; so `build_on_meta` puts only those on meta, and the trouble never starts.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakTensorKeyDictionary

from meshplan.errors import PlanError
from meshplan.runtime.initialisers import (
    Initialiser,
    buffer_slots,
    drawing,
    initialisers,
    parameter_slots,
    standing_in,
)

_CURE = "build the model with mp.meta(factory), which computes buffers for real and puts only parameters on meta"


def build_on_meta(factory: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """Run `factory` so that parameters end on the meta device and everything else is computed as usual, on the CPU.

    Each parameter goes to meta when a module registers it, before its initialiser runs: memory is bounded by one
    parameter (and a `torch.empty` that nobody wrote to takes none). Ties are kept. Buffers, and tensors kept in plain
    attributes, have their true values. Values that the factory gives to parameters (loaded weights) are not kept.

    Arguments:
        factory: builds the single-device model.
        seed: of the stream that random buffers are drawn from, so that every rank draws the same ones; the default
            generators are left as they were.

    Raises:
        PlanError: `reads-parameter-on-meta` if the factory needs the value of a parameter.
    """
    replaced = WeakTensorKeyDictionary()
    thread = threading.get_ident()

    def to_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta or isinstance(parameter, DTensor) or is_lazy(parameter):
            return None
        if threading.get_ident() != thread:
            return None  # the hook is torch-wide; another thread's models are not ours
        if parameter not in replaced:
            # Remembered, for a parameter that the factory made once and registers in two modules.
            replaced[parameter] = _like(parameter, torch.empty_like(parameter, device="meta"))
        return replaced[parameter]

    handle = register_module_parameter_registration_hook(to_meta)  # type: ignore[arg-type]
    try:
        with drawing(seed, "build"), torch.enable_grad():
            return factory()
    except (NotImplementedError, RuntimeError, TypeError) as error:
        # Torch has no class for it: reading a value, numpy, and mixing with real tensors each say "meta" in words.
        if not re.search(r"\bmeta\b", str(error)):
            raise
        raise PlanError(
            f"the model's constructor needs the value of a parameter, and on meta it has none: {_first_line(error)}",
            code="reads-parameter-on-meta",
            legal="a constructor that leaves parameter values to initialisers, or building the model on the CPU",
        ) from error
    finally:
        handle.remove()


def materialise(model: nn.Module, device: str | torch.device, *, loading: bool = False) -> nn.Module:
    """Give a meta model storage on `device`, in place: `materialise_buffers`, then `materialise_parameters`.

    Nothing is changed if a buffer cannot be recovered. Follow it by `init_weights` or by loading a checkpoint.
    """
    materialise_buffers(model, device, loading=loading)
    materialise_parameters(model, device)
    return model


def materialise_parameters(model: nn.Module, device: str | torch.device) -> None:
    """Give every meta parameter uninitialised storage on `device`; a parameter that has storage stays as it is.

    Ties stay ties; names, layouts, `requires_grad` and attributes stay. DTensor parameters keep their placements, and
    empty local shards are legal. Until initialised or loaded, floating values are NaN, so that a forgotten one shows.
    Optimizers made before hold the old parameters: make them afterwards.
    """
    device = torch.device(device)
    fresh: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is None or parameter.device.type != "meta":
                continue
            if id(parameter) not in fresh:
                fresh[id(parameter)] = _materialised(parameter, device)
            # Through setattr, not the dict: some modules (LSTM) keep lists of their parameters up to date there.
            setattr(module, name, fresh[id(parameter)])


def materialise_buffers(model: nn.Module, device: str | torch.device, *, loading: bool = False) -> None:
    """Put every buffer on `device` with its right value, or refuse before anything is changed.

    Buffers with storage are moved. A buffer on meta is recomputed by its module's initialiser (the `_init_weights` of
    the model, or `reset_parameters()`), and believed only if two runs, over different old contents and with different
    random streams, give the same bits and no NaN: then it owes nothing to what was there before. Parameters are not
    touched. Ties between buffers are kept, also with a plain attribute of the same module.

    Arguments:
        loading: a checkpoint will be loaded next. Buffers that it holds (persistent ones) and that cannot be
            recomputed then get storage full of NaN instead of being refused.

    Raises:
        PlanError: `buffer-on-meta` for a buffer, or a tensor in a plain attribute, that cannot be recomputed.
    """
    device = torch.device(device)
    values: dict[int, Tensor] = {}
    for one in initialisers(model):
        lost = {name: b for name, b in one.module._buffers.items() if b is not None and b.device.type == "meta"}
        lost = {name: buffer for name, buffer in lost.items() if id(buffer) not in values}
        for run in (one.applied, one.default):
            if lost and run is not None:
                values |= _recomputed(one, run, lost)
                lost = {name: buffer for name, buffer in lost.items() if id(buffer) not in values}
        for name, buffer in lost.items():
            if not loading or name in one.module._non_persistent_buffers_set:
                raise _lost(one.path, name, "buffer")
            values[id(buffer)] = _filled(buffer, 0)
    # A real buffer may lie in several slots: moved once, found by the old one's id from then on.
    for slot in buffer_slots(model):
        if id(slot.tensor) not in values:
            values[id(slot.tensor)] = slot.tensor
    moved = {key: value.to(device) for key, value in values.items()}
    aliases = _aliases(model, moved)
    for slot in buffer_slots(model):
        slot.table[slot.name] = moved[id(slot.tensor)]
    for attributes, name, key in aliases:
        attributes[name] = moved[key]


def _recomputed(one: Initialiser, run: Callable[[], object], lost: dict[str, Tensor]) -> dict[int, Tensor]:
    """Those of the `lost` buffers that `run` computes from nothing, as id of the old one -> value on the CPU."""
    parameters, buffers = parameter_slots(one.module), buffer_slots(one.module)
    outcomes = []
    for attempt in (0, 1):
        stand_ins: dict[int, Tensor] = {}
        for slot in parameters:
            # Parameters are not to change here: initialisers write to shadows without storage.
            stand_ins[id(slot.tensor)] = nn.Parameter(
                torch.empty(slot.tensor.shape, dtype=slot.tensor.dtype, device="meta"),
                requires_grad=slot.tensor.requires_grad,
            )
        for slot in buffers:
            is_lost = slot.tensor.device.type == "meta"
            stand_ins[id(slot.tensor)] = _filled(slot.tensor, attempt) if is_lost else slot.tensor.clone()
        try:
            with drawing(attempt, one.path), standing_in(parameters + buffers, stand_ins):
                run()
        except Exception:  # it needs values that are not there: no certainty, and the caller refuses with the cure
            return {}
        outcomes.append(stand_ins)
    first, second = outcomes
    return {
        id(buffer): first[id(buffer)]
        for buffer in lost.values()
        # `torch.equal` is false for NaN, which is what an element nobody wrote holds in the first run.
        if torch.equal(first[id(buffer)], second[id(buffer)])
    }


def _filled(like: Tensor, attempt: int) -> Tensor:
    """CPU storage for `like`, full of something no initialiser computes; of something else on another attempt."""
    dtype = like.dtype
    value: float | int | bool
    if dtype.is_floating_point or dtype.is_complex:
        value = (float("nan"), 7.25)[attempt]
    elif dtype == torch.bool:
        value = bool(attempt)
    else:
        value = (torch.iinfo(dtype).max, torch.iinfo(dtype).max - 1)[attempt]
    return torch.full(like.shape, value, dtype=dtype, device="cpu")


def _aliases(model: nn.Module, moved: dict[int, Tensor]) -> list[tuple[dict[str, object], str, int]]:
    """Plain attributes that are one of the model's buffers, as (attributes, name, key in `moved`); meta tensors in
    attributes that are none of them are refused."""
    found: list[tuple[dict[str, object], str, int]] = []
    for path, module in model.named_modules():
        attributes = vars(module)
        for name, value in attributes.items():
            if name in ("_parameters", "_buffers", "_modules"):
                continue
            if id(value) in moved:
                found.append((attributes, name, id(value)))
                continue
            held = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
            for tensor in held:
                if isinstance(tensor, Tensor) and not isinstance(tensor, nn.Parameter) and tensor.device.type == "meta":
                    raise _lost(path, name, "plain attribute")
    return found


def _materialised(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    data = torch.empty_like(local.detach(), device=device)
    if data.dtype.is_floating_point or data.dtype.is_complex:
        data.fill_(float("nan"))
    if isinstance(parameter, DTensor):
        # The global shape cannot be inferred from uneven or empty shards: it is given.
        data = DTensor.from_local(
            data,
            parameter.device_mesh,
            parameter.placements,
            run_check=False,
            shape=parameter.shape,
            stride=parameter.stride(),
        )
    return _like(parameter, data)


def _like(parameter: nn.Parameter, data: Tensor) -> nn.Parameter:
    """A parameter over `data` with the class and the attributes of `parameter`."""
    new = nn.Parameter(data.detach(), requires_grad=parameter.requires_grad)
    if not isinstance(parameter, DTensor) and type(parameter) is not nn.Parameter:
        new.__class__ = type(parameter)
    # A DTensor's own fields are attributes too: those of the new one stay.
    new.__dict__.update({name: value for name, value in vars(parameter).items() if name not in vars(new)})
    return new


def _lost(path: str, name: str, kind: str) -> PlanError:
    full_name = f"{path}.{name}" if path else name
    return PlanError(
        f"the {kind} {full_name} is on the meta device, and nothing recomputes its value",
        code="buffer-on-meta",
        module=path,
        legal=f"{_CURE}; or a reset_parameters() on its module that fills it",
    )


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0]
