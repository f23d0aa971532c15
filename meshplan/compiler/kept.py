"""What a forward leaves behind on its modules: tensors that outlive it must mean outside what they mean on one device.

A buffer that was assigned anew is read whole by the next call; an attribute (an auxiliary loss, a cache) is read by the
user's own code, where nothing is redistributed. Only the model's outputs are.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import Tensor, nn

from meshplan import compat
from meshplan.compiler.kinds import A, I, Kind, Pending, R, replicated, user_letter
from meshplan.errors import PlanError
from meshplan.plan.placements import Shard

if TYPE_CHECKING:
    from meshplan.compiler.propagate import Propagation


def refusal_of_kept(run: Propagation, model: nn.Module) -> PlanError | None:
    """The first tensor that the forward of `model`, a rank's copy, left on a module and that is not whole; `kept-tensor`.

    An attribute may be this data rank's rows, or its share of a mean, as the model's outputs are.
    """
    for path, module in model.named_modules():
        for name, t, buffer in _held(module):
            info = run.infos.get(id(t))
            if info is None:
                continue
            for axis, kind in zip(run.axes, info.kinds, strict=True):
                if isinstance(kind, Pending) and not axis.data:
                    kind.need(I)
                elif not _legal(kind, buffer, axis.data, t.requires_grad):
                    return PlanError(
                        f"{path or 'the model'} keeps {name}, which is {_shown(kind)} on {axis.name}, after its forward",
                        code="kept-tensor", module=path,
                        legal="an output of the model, which is redistributed; or a layout of R in front of where it is made",
                    )  # fmt: skip
    return None


def _shown(kind: Kind) -> str:
    return "P" if kind == A else user_letter(kind)


def _legal(kind: Kind, buffer: bool, data: bool, grad: bool) -> bool:
    if replicated(kind):
        return data or not grad or kind != R
    return data and not buffer and (kind == A or isinstance(kind, Shard))


def _held(module: nn.Module) -> Iterator[tuple[str, Tensor, bool]]:
    """(name, tensor, whether it is a buffer) of what a module holds besides parameters and children."""
    for name, b in module._buffers.items():
        if b is not None:
            yield name, b, True
    for name, value in module.__dict__.items():
        if isinstance(value, Tensor):
            yield name, value, False
        elif type(value) in (list, tuple, dict) and not name.startswith("_"):
            yield from ((name, x, False) for x in compat.flatten(value)[0] if isinstance(x, Tensor))
