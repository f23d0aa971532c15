"""The laws of blocks of experts: tried once for those that are alike, and looked up afterwards, at every step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from meshplan import compat
from meshplan.compiler.experts_kind import PLAIN, alike, kind_of
from meshplan.compiler.experts_trial import Trial
from meshplan.errors import PlanError
from meshplan.ops.experts.block import Law
from meshplan.ops.experts.replay import contract


class Trials:
    """The laws of one block, by what it is called with. Blocks that are alike share what was tried.

    Arguments:
        module: the block, as the user made it; path: where it is; each: its experts' paths inside it.
        known: shared by all blocks.
    """

    def __init__(self, module: nn.Module, path: str, each: tuple[str, ...], known: dict[Any, Law]) -> None:
        self.module, self.path, self.each, self.known = module, path, each, known
        self.kind, self.alike = (kind_of(module), _objects(module)), alike(module)

    def __call__(self, leaves: Sequence[Any], structure: Any) -> Law:
        """See `meshplan.ops.experts.block.Laws`. Raises PlanError `experts-contract`."""
        asked = (repr(structure), tuple(_asked(x) for x in leaves))
        law = self.known.get((self.kind, asked))
        if law is None and not any(isinstance(x, Tensor) and compat.is_fake(x) for x in leaves):
            # A layer that another stood for while compiling.
            law = self.known.get((self.alike, asked))
            if law is None:
                raise contract(self.path, "it is called otherwise than when the model was lowered")
        if law is None:
            with compat.without_fake_mode(), torch.random.fork_rng(devices=[]):
                law = tried(self.module, self.path, self.each, leaves, structure)
            self.known[self.kind, asked] = self.known[self.alike, asked] = law
        return law


def _objects(module: nn.Module) -> tuple[int, ...]:
    """What a forward may ask beside numbers, such as a config, by identity: laws are those of one lowering, in which it lives."""
    found = ((key, v) for m in module.modules() for key, v in sorted(m.__dict__.items()) if not key.startswith("_"))
    return tuple(id(v) for _, v in found if type(v) not in PLAIN and not hasattr(v, "__qualname__"))


def _asked(x: Any) -> Any:
    # No size: on a rank, while compiling, a tensor comes in any layout before it is moved.
    return (x.dim(), x.is_floating_point(), x.dtype == torch.bool) if isinstance(x, Tensor) else repr(x)


def tried(module: nn.Module, path: str, each: tuple[str, ...], leaves: Sequence[Any], structure: Any) -> Law:
    """The law of `module` for calls like that with the flattened arguments `leaves`. Raises PlanError `experts-contract`."""
    worst: PlanError | None = None
    for dtype in (torch.float64, torch.float32):
        try:
            return Trial(module, path, each, leaves, structure, dtype).law()
        except PlanError as error:
            raise worst or error from None
        except (RuntimeError, IndexError, ValueError, TypeError, AssertionError) as error:
            # Some kernels take no float64, and some code makes tensors of torch's default dtype.
            worst = contract(path, f"it fails on made-up tokens: {type(error).__name__}: {error}")
    assert worst is not None
    raise worst
