"""Initialisation that does not know the mesh: values are drawn module by module at full size, a rank keeps its part."""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from meshplan.errors import PlanError
from meshplan.runtime.checkpoint import _parts as parts_of
from meshplan.runtime.extents import Box, Parts, boxes_of, local_part
from meshplan.runtime.initialisers import (
    Init,
    Initialiser,
    Slot,
    drawing,
    initialisers,
    parameter_slots,
    standing_in,
    touched,
)


def init_weights(
    model: nn.Module,
    seed: int = 0,
    init: Init | None = None,
    *,
    device: str | torch.device = "cpu",
    parts: Mapping[str, Parts] | None = None,
) -> None:
    """Give every parameter its initial value, in place: bitwise the same for a seed on any mesh, one rank included.

    Modules are initialised children first. Each one runs `init(module)` if given, else the `_init_weights(module)` of
    the nearest (sub-)model that has one (transformers' convention), else its `reset_parameters()`. Where the first two
    leave values unwritten, `reset_parameters()` goes first, as it does in a constructor. Initialisers see ordinary
    parameters of the full shape, so fans and standard deviations are those of one device; gradients are off.

    The random stream of a module depends on `seed` and on its path alone. Nothing is communicated, and the state of
    torch's default generators does not change. Memory: the parameters of one module at full size at a time, or of the
    modules that one initialiser reaches together.

    A tied parameter is initialised by each of its owners in turn, so the last one's values stay, as with
    `model.apply(init)`; in a transformers model the source of the tie alone counts, as it does there. Only parameters
    are set, and what an initialiser does to ordinary buffers on the way (BatchNorm's running mean).

    Arguments:
        model: on one device, or parallelised, with DTensor parameters of any layout; empty local shards are legal.
        seed: any int.
        init: called with each module, for example `lambda m: nn.init.ones_(m.weight) if ... else None`.
        device: where values are drawn. The CPU gives the same numbers everywhere; an accelerator is faster, and gives
            the same on any mesh of its kind.
        parts: for parameters by name, the mesh axes that split them part by part, with the parts' sizes; None asks the
            plan that the model was lowered under, if it was.

    Raises:
        PlanError: `no-initialiser` for a parameter that nothing initialises (or only in part), `parameter-on-meta` for
            one without storage, `partial-tensor` for a DTensor that is partial on an axis, `shard-extent` for a shard
            of another shape than its layout implies. All but a partly initialised one are found before any change.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # Values written into a gathered parameter would be lost: its shard is what stays.
            module.reshard()
    slots = parameter_slots(model)
    parts = parts_of(model) if parts is None else parts
    by_tensor: dict[int, list[Slot]] = {}
    for slot in slots:
        _check_storage(slot)
        by_tensor.setdefault(id(slot.tensor), []).append(slot)
    boxes = {key: _boxes(named, parts) for key, named in by_tensor.items()}
    order = {key: index for index, key in enumerate(by_tensor)}
    cells = _cells(initialisers(model, init))
    reached = {key for cell in cells for key in cell.parameters}
    for slot in slots:
        if id(slot.tensor) not in reached:
            raise _no_initialiser(slot)
    tied_away = _tied_to_a_source(model, slots)
    with _transformers_flags():
        for cell in cells:
            mine = [slot for key in sorted(cell.parameters, key=order.__getitem__) for slot in by_tensor[key]]
            full = _drawn(cell, mine, seed, torch.device(device), tied_away)
            for key in full:
                _keep(by_tensor[key][0].tensor, full[key], boxes[key])


@dataclass(frozen=True, eq=False)
class _Cell:
    """Initialisers that must run together because they reach common parameters, in order, and those parameters' ids."""

    members: tuple[Initialiser, ...]
    parameters: frozenset[int]


def _cells(found: list[Initialiser]) -> list[_Cell]:
    """Group initialisers whose parameters overlap. Most cells are one module; ties and parents' reach join some."""
    cells: list[_Cell] = []
    for one in found:
        reach: set[int] = set()
        holds = any(p is not None for p in one.module._parameters.values())
        if one.applied is not None:
            reach |= touched(one, one.applied)
        if one.default is not None and (one.applied is None or holds):
            reach |= touched(one, one.default)
        if not reach:
            continue
        joined = [cell for cell in cells if cell.parameters & reach]
        cells = [cell for cell in cells if not cell.parameters & reach]
        members = (*(member for cell in joined for member in cell.members), one)
        cells.append(_Cell(members, frozenset(reach).union(*(cell.parameters for cell in joined))))
    order = {one: index for index, one in enumerate(found)}
    return [_Cell(tuple(sorted(cell.members, key=order.__getitem__)), cell.parameters) for cell in cells]


def _drawn(
    cell: _Cell, mine: list[Slot], seed: int, device: torch.device, tied_away: set[tuple[int, str]]
) -> dict[int, Tensor]:
    """The cell's parameters (those in slots `mine`) drawn at full size, every element written, by id."""
    full: dict[int, Tensor] = {id(slot.tensor): _unwritten(slot.tensor, device) for slot in mine}

    def run(with_default: set[int]) -> list[Slot]:
        for tensor in full.values():
            tensor.data.fill_(_poison(tensor.dtype))
        with standing_in(mine, full):
            # Defaults before anything applied, as constructors run before `model.apply(init)`.
            for one in cell.members:
                if one.default and (one.applied is None or id(one.module._parameters) in with_default):
                    _run(one, one.default, seed, device, tied_away)
            for one in cell.members:
                if one.applied:
                    _run(one, one.applied, seed, device, tied_away)
        return [slot for slot in mine if _has_poison(full[id(slot.tensor)])]

    missing = run(set())
    if missing:
        missing = run({id(slot.table) for slot in missing})
    if missing:
        raise _no_initialiser(missing[0])
    return full


def _run(
    one: Initialiser, what: Callable[[], object], seed: int, device: torch.device, tied_away: set[tuple[int, str]]
) -> None:
    table = one.module._parameters
    flagged = [p for name, p in table.items() if p is not None and (id(table), name) in tied_away]
    for parameter in flagged:
        parameter._is_hf_initialized = True  # type: ignore[attr-defined]
    try:
        with drawing(seed, one.path, device):
            what()
    finally:
        for parameter in flagged:
            del parameter._is_hf_initialized  # type: ignore[attr-defined]


def _boxes(named: list[Slot], parts: Mapping[str, Parts]) -> list[Box]:
    """Where this rank's part of one parameter, known by the names `named`, lies in the full one."""
    names = [slot.full_name for slot in named]
    return boxes_of(names[0], named[0].tensor, next((parts[name] for name in names if name in parts), None))


def _keep(parameter: Tensor, full: Tensor, boxes: list[Box]) -> None:
    local = local_part(parameter)
    with torch.no_grad():
        for box in boxes:
            part = full
            for dim, (first, length) in enumerate(zip(box.offset, box.size, strict=True)):
                part = part.narrow(dim, first, length)
            box.of(local).copy_(part)


def _unwritten(like: Tensor, device: torch.device) -> nn.Parameter:
    # `like.shape` of a DTensor is its global shape.
    return nn.Parameter(torch.empty(like.shape, dtype=like.dtype, device=device), requires_grad=like.requires_grad)


def _poison(dtype: torch.dtype) -> float | int | bool:
    """A value no initialiser writes: NaN, or the lowest integer."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return False if dtype == torch.bool else torch.iinfo(dtype).min


def _has_poison(tensor: Tensor) -> bool:
    if tensor.dtype.is_floating_point or tensor.dtype.is_complex:
        # Eight-bit floats have few operators of their own.
        return bool((tensor.float() if tensor.dtype.itemsize == 1 else tensor).isnan().any())
    # In narrow integers every value is a likely one; such parameters (quantised weights) are loaded, not drawn.
    return tensor.dtype.itemsize >= 4 and bool((tensor == _poison(tensor.dtype)).any())


def _check_storage(slot: Slot) -> None:
    if slot.tensor.device.type == "meta":
        raise PlanError(
            f"{slot.full_name} is on the meta device and has no storage to initialise",
            code="parameter-on-meta",
            module=slot.path,
            legal="meshplan.runtime.meta.materialise(model, device) before init_weights",
        )


def _no_initialiser(slot: Slot) -> PlanError:
    return PlanError(
        f"nothing initialises all of {slot.full_name} {list(slot.tensor.shape)}",
        code="no-initialiser",
        module=slot.path,
        legal="a reset_parameters() on that module's class, an _init_weights(module) on the model that handles it, "
        "or init= with a function that does",
    )


def _tied_to_a_source(model: nn.Module, slots: list[Slot]) -> set[tuple[int, str]]:
    """The slots, as (id of table, name), that a transformers model ties to another parameter: initialisation there
    happens before tying, and the value of the source is the one that stays."""
    targets: set[str] = set()
    for path, module in model.named_modules():
        keys = getattr(module, "all_tied_weights_keys", None)
        if isinstance(keys, dict):
            targets |= {f"{path}.{key}" if path else key for key in keys}
    shared = Counter(id(slot.tensor) for slot in slots)
    return {(id(slot.table), slot.name) for slot in slots if slot.full_name in targets and shared[id(slot.tensor)] > 1}


@contextlib.contextmanager
def _transformers_flags() -> Iterator[None]:
    """Let torch's `nn.init` functions honour `_is_hf_initialized` as transformers' own do (its guard since 5.0)."""
    if "transformers" not in sys.modules:
        yield
        return
    try:
        guard = importlib.import_module("transformers.initialization").guard_torch_init_functions
    except (ImportError, AttributeError):  # older than 5: its functions ignore the flag
        guard = contextlib.nullcontext
    with guard():
        yield
