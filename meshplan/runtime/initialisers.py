"""Which initialiser a module has, and running it on stand-in tensors without a trace in the model or the generators."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from meshplan.compat import TorchDispatchMode, storage_key
from meshplan.errors import PlanError

Init = Callable[[nn.Module], object]

# Path segments that wrappers insert; a wrapped module must draw the same numbers as the bare one.
_WRAPPER_SEGMENTS = {"_checkpoint_wrapped_module", "_orig_mod", "_fsdp_wrapped_module"}


@dataclass(frozen=True, eq=False)
class Initialiser:
    """How one module gets its values.

    Attributes:
        path: the module's dotted path, wrappers left out.
        module: the module.
        default: its own `reset_parameters` (or torch's older `_reset_parameters`), what a constructor runs; or None.
        applied: what the model's author runs over every module after construction; or None.
    """

    path: str
    module: nn.Module
    default: Callable[[], object] | None
    applied: Callable[[], object] | None


@dataclass(frozen=True, eq=False)
class Slot:
    """One name under which a module holds a tensor; a tied tensor has several.

    Attributes:
        table: the `_parameters` or `_buffers` dict that holds it. The dict is used rather than attribute access because
            a parallelised module's class may show another view of the parameter there.
        path: dotted path of the owning module, wrappers left out.
    """

    path: str
    name: str
    table: dict[str, Tensor | None]
    tensor: Tensor

    @property
    def full_name(self) -> str:
        return f"{self.path}.{self.name}" if self.path else self.name


def clean_path(path: str) -> str:
    """`path` without the segments that checkpoint, compile and FSDP wrappers insert."""
    return ".".join(segment for segment in path.split(".") if segment not in _WRAPPER_SEGMENTS)


def parameter_slots(module: nn.Module, path: str = "") -> list[Slot]:
    """Every parameter slot in the subtree of `module` (which lies at `path`), ties included, each module once."""
    return _slots(module, path, "_parameters")


def buffer_slots(module: nn.Module, path: str = "") -> list[Slot]:
    """Every buffer slot in the subtree of `module`, as `parameter_slots`."""
    return _slots(module, path, "_buffers")


def _slots(module: nn.Module, path: str, table: str) -> list[Slot]:
    return [
        Slot(clean_path(name), key, getattr(owner, table), tensor)
        for name, owner in module.named_modules(prefix=path)
        for key, tensor in getattr(owner, table).items()
        if tensor is not None
    ]


def initialisers(root: nn.Module, init: Init | None = None) -> list[Initialiser]:
    """The initialiser of every module, children before parents as `nn.Module.apply` goes, shared modules once.

    `applied` is `init` if given; else the `_init_weights(module)` of the nearest ancestor (the module itself included)
    that has one. This is the convention of transformers, where each sub-model initialises its own part, and of much
    code written after GPT-2. PEFT's low-rank layers initialise their pairs themselves, as their configuration says: the
    model that they were put into would draw B, which starts at zero.
    """
    found: list[Initialiser] = []
    seen: set[nn.Module] = set()
    configurations = getattr(root, "peft_config", None) or {}

    def visit(module: nn.Module, path: str, inherited: Init | None) -> None:
        if module in seen:
            return
        seen.add(module)
        hook = init or _init_weights_of(module) or inherited
        pairs = _low_rank_pairs(module) if init is None else {}
        for name, child in module.named_children():
            if name in pairs:
                seen.update(child.modules())
            visit(child, f"{path}.{name}" if path else name, hook)
        if pairs:
            found.append(Initialiser(clean_path(path), module, _resets(module, pairs, configurations), None))
            return
        default = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
        applied = None if hook is None else _bind(hook, module)
        found.append(Initialiser(clean_path(path), module, default if callable(default) else None, applied))

    visit(root, "", None)
    return found


def _low_rank_pairs(module: nn.Module) -> dict[str, nn.Module]:
    """The children of a PEFT layer that hold its low-rank pairs, by name; none for any other module."""
    if not callable(getattr(module, "reset_lora_parameters", None)):
        return {}
    return {name: child for name, child in module.named_children() if name.startswith("lora_")}


def _resets(module: Any, pairs: dict[str, nn.Module], configurations: Any) -> Callable[[], object]:
    adapters = sorted(
        {name for child in pairs.values() if isinstance(child, nn.ModuleDict | nn.ParameterDict) for name in child}
    )

    def reset() -> None:
        for name in adapters:
            how = getattr(configurations.get(name), "init_lora_weights", True)
            try:
                module.reset_lora_parameters(name, how)
            except ValueError as error:
                raise PlanError(
                    f"the adapter {name!r} starts as {how!r}, which takes the base weights",
                    code="no-initialiser",
                    legal="a model with weights, or init_lora_weights=True or 'gaussian'",
                ) from error

    return reset


def _bind(hook: Init, module: nn.Module) -> Callable[[], object]:
    return lambda: hook(module)


def _init_weights_of(module: nn.Module) -> Init | None:
    """The module's `_init_weights`, if it takes one module (some code gives that name to other things)."""
    method = getattr(module, "_init_weights", None)
    if not callable(method):
        return None
    needed = [
        p
        for p in inspect.signature(method).parameters.values()
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    return method if len(needed) == 1 else None


@contextlib.contextmanager
def drawing(seed: int, path: str, device: torch.device | None = None) -> Iterator[None]:
    """Run a block without gradients, drawing from a stream that depends on (`seed`, `path`) only.

    Torch's default generators (the CPU's, and that of `device`), `random` and numpy's global generator are set to the
    stream and put back to where they were. Initialisers draw from any of them.
    """
    digest = hashlib.blake2b(f"{seed}:{path}".encode(), digest_size=8).digest()
    stream = int.from_bytes(digest, "big") >> 1
    generators = [torch.default_generator]
    if device is not None and device.type not in ("cpu", "meta"):
        module = torch.get_device_module(device)
        module.init()
        index = module.current_device() if device.index is None else device.index
        generators.append(module.default_generators[index])
    states = [generator.get_state() for generator in generators]
    python_state = random.getstate()
    # Not imported here: code that never loaded numpy cannot draw from it.
    numpy = sys.modules.get("numpy")
    numpy_state = numpy.random.get_state() if numpy is not None else None
    try:
        for generator in generators:
            generator.manual_seed(stream)
        random.seed(stream)
        if numpy is not None:
            numpy.random.seed(stream % 2**32)
        with torch.no_grad():
            yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
        random.setstate(python_state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)


@contextlib.contextmanager
def standing_in(slots: list[Slot], stand_ins: dict[int, Tensor]) -> Iterator[None]:
    """Put `stand_ins[id(tensor)]` in each slot for a while.

    A slot that was given another tensor meanwhile (`module.weight = nn.Parameter(...)`) has that one's values copied
    into its stand-in, so that the stand-ins hold the outcome however the initialiser is written.
    """
    slots = [slot for slot in slots if id(slot.tensor) in stand_ins]
    for slot in slots:
        slot.table[slot.name] = stand_ins[id(slot.tensor)]
    try:
        yield
        for slot in slots:
            new, stand_in = slot.table.get(slot.name), stand_ins[id(slot.tensor)]
            if new is not None and new is not stand_in:
                with torch.no_grad():
                    stand_in.copy_(new)
    finally:
        for slot in slots:
            slot.table[slot.name] = slot.tensor


def touched(initialiser: Initialiser, run: Callable[[], object]) -> set[int]:
    """The ids of the parameters that `run` reads or writes.

    A module that alone holds parameters in its subtree touches its own. For others (an attention block that scales
    its output projection, `nn.MultiheadAttention`) `run` is tried on meta stand-ins, which cost nothing, and the
    operators are watched. An initialiser that cannot run on meta is taken to touch its whole subtree.
    """
    slots = parameter_slots(initialiser.module)
    everything = {id(slot.tensor) for slot in slots}
    if all(slot.table is initialiser.module._parameters for slot in slots):
        return everything
    slots += buffer_slots(initialiser.module)
    stand_ins = {id(slot.tensor): _on_meta(slot.tensor) for slot in slots}
    keys = {storage_key(stand_in): original for original, stand_in in stand_ins.items()}
    watch = _Watch()
    try:
        with drawing(0, initialiser.path), watch, standing_in(slots, stand_ins):
            run()
    except Exception:  # whatever it is, the real run will raise it too if it is the initialiser's own
        return everything
    seen = {keys[key] for key in watch.storages if key in keys}
    # `weight.data = ...` leaves the stand-in on another storage.
    seen |= {original for key, original in keys.items() if storage_key(stand_ins[original]) != key}
    return seen & everything


def _on_meta(tensor: Tensor) -> Tensor:
    empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return nn.Parameter(empty, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


class _Watch(TorchDispatchMode):
    """Notes the storage of every tensor argument."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        for leaf in torch.utils._pytree.tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor):
                self.storages.add(storage_key(leaf))
        return func(*args, **kwargs)
