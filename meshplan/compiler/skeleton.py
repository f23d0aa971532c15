"""A copy of the user's model on fake tensors: same Python objects' behaviour, no storage, nothing of the user's touched."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor, nn

from meshplan import compat
from meshplan.errors import PlanError

ShapeOf = Callable[[str, Tensor], tuple[int, ...]]

_PREPARE: ContextVar[Callable[[nn.Module, str], None] | None] = ContextVar("prepare", default=None)


@contextmanager
def preparing(prepare: Callable[[nn.Module, str], None] | None) -> Iterator[None]:
    """Every copy made in here is handed to `prepare(copy, its path with a dot)` before it is used."""
    token = _PREPARE.set(prepare)
    try:
        yield
    finally:
        _PREPARE.reset(token)


def fake_copy(
    model: nn.Module,
    mode: torch.utils._python_dispatch.TorchDispatchMode,
    shape_of: ShapeOf | None = None,
    hollow: Mapping[str, nn.Module] | None = None,
    prefix: str = "",
) -> nn.Module:
    """Deep copy of `model` whose parameters and buffers are fake tensors (device cpu, no storage).

    Arguments:
        mode: the FakeTensorMode the copies belong to.
        shape_of: shape of each parameter or buffer by canonical name; None keeps the global shapes.
        hollow: submodules by path that are copied without their parameters and children: equals of a layer that is traced.
        prefix: path of `model` in the whole model, for the names that `shape_of` is asked for.

    Ties and shared modules survive, since the copy maps each tensor once. Hooks are copied, process groups are shared.
    """
    memo: dict[int, object] = {id(m): _shell(m) for m in (hollow or {}).values()}
    inside = {id(t) for m in (hollow or {}).values() for t in (*m.parameters(), *m.buffers())}
    with mode:
        for name, p in model.named_parameters():
            if id(p) not in inside:
                fake = torch.empty(shape_of(prefix + name, p) if shape_of else p.shape, dtype=p.dtype, device="cpu")
                memo[id(p)] = nn.Parameter(fake, requires_grad=p.requires_grad)
        for name, b in model.named_buffers():
            if id(b) not in inside:
                shape = shape_of(prefix + name, b) if shape_of else b.shape
                memo[id(b)] = torch.empty(shape, dtype=b.dtype, device="cpu")
    try:
        made = copy.deepcopy(model, memo | shared_objects(model))
    except RuntimeError as error:
        raise _uncopied(model) or error from error
    prepare = _PREPARE.get()
    if prepare is not None:
        prepare(made, prefix)
    return made


def _uncopied(model: nn.Module) -> PlanError | None:
    """The refusal of a tensor in a plain attribute that was computed from parameters: torch copies no such tensor."""
    for path, module in model.named_modules():
        for name, value in module.__dict__.items():
            if isinstance(value, Tensor) and value.grad_fn is not None:
                return PlanError(
                    f"{path or 'the model'} keeps {name}, a tensor computed from parameters, from one call to the next",
                    code="computed-attribute", module=path,
                    legal="computed in forward, or by torch.nn.utils.parametrize (parametrizations.weight_norm)",
                )  # fmt: skip
    return None


def shared_objects(model: nn.Module) -> dict[int, object]:
    """By identity, what modules hold that a copy shares with the original: process groups, meshes, generators."""
    held = (value for module in model.modules() for value in module.__dict__.values() if type(value) not in _PLAIN)
    return {id(value): value for value in held if isinstance(value, (torch.Generator, *compat.UNCOPYABLE))}


_PLAIN = {int, float, str, bool, type(None), dict, list, tuple, set, OrderedDict}


def _shell(m: nn.Module) -> nn.Module:
    """A module of the same class and attributes without parameters and children: it can be looked at, not run."""
    shell = m.__class__.__new__(m.__class__)
    # Tables of hooks (`_forward_hooks_with_kwargs` among them) are written to when the shell is hooked: it has its own.
    own = {k: v for k, v in m.__dict__.items() if "_hooks" not in k}
    shell.__dict__.update(nn.Module().__dict__ | own | {"_parameters": {}, "_buffers": {}, "_modules": {}})
    return shell


@contextmanager
def fake_world() -> Iterator[torch.utils._python_dispatch.TorchDispatchMode]:
    """A FakeTensorMode in which the model's stray real constants are accepted, and the random state is put back."""
    state = torch.random.get_rng_state()
    try:
        with compat.no_device_context():
            yield compat.fake_tensor_mode()
    finally:
        torch.random.set_rng_state(state)
