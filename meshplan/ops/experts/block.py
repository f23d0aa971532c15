"""A block that loops over its experts in its own forward, as one torch call.

The contract is weaker than that of an experts module (see `call.py`) and asks nothing of how tokens are routed: whatever the
block returns is, for each token, a function of that token alone. A `Law` says how what it returns lies along the tokens; it is
found by trying (`meshplan.compiler.experts_trial`). A rank runs `block_run.run_block` in place of `block_call`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function

from meshplan import compat
from meshplan.errors import PlanError

Dim = int | tuple[int, int]
"""A dim of a result: its size, or (i, j) where the dims i to j - 1 of the tokens are flattened into it."""


@dataclass(frozen=True)
class Made:
    """One tensor that a block returns for tokens [*lead, H].

    Attributes:
        dims: in order; the dims of `lead` are all among them, and in order.
        dtype: None for that of the tokens.
        grad: whether it has a gradient.
        routed: whether experts have a part in it.
    """

    dims: tuple[Dim, ...]
    dtype: torch.dtype | None
    grad: bool
    routed: bool

    def shape(self, lead: Sequence[int]) -> tuple[int, ...]:
        """Its shape for tokens of these leading sizes."""
        return tuple(d if isinstance(d, int) else math.prod(lead[slice(*d)]) for d in self.dims)

    def apart(self, lead: Sequence[int]) -> tuple[int, ...]:
        """The same with the dims of the tokens next to each other instead of flattened."""
        return tuple(n for d in self.dims for n in ((d,) if isinstance(d, int) else lead[slice(*d)]))

    def place(self, dim: int) -> int:
        """The dim that is dim number `dim` of the tokens, once they are `apart`."""
        at = 0
        for d in self.dims:
            if isinstance(d, tuple) and d[0] <= dim < d[1]:
                return at + dim - d[0]
            at += 1 if isinstance(d, int) else d[1] - d[0]
        raise AssertionError("every dim of the tokens is in every result")

    def split(self, dim: int, even: bool) -> int | None:
        """The dim that is split where dim number `dim` of the tokens is, `even` or not; None where no shard is one stretch of it:
        of dims that are flattened only the outermost splits into stretches, and into those of `torch.chunk` if even."""
        for at, d in enumerate(self.dims):
            if isinstance(d, tuple) and d[0] <= dim < d[1]:
                return at if d == (dim, dim + 1) or (d[0] == dim and even) else None
        raise AssertionError("every dim of the tokens is in every result")


@dataclass(frozen=True)
class Law:
    """What a block returns.

    Attributes:
        made: the tensors.
        leaves, structure: the flattened result, None where a tensor stands.
        width: numbers in a row that experts are called with; 0 where it has no experts of its own that ranks could share.
        rows: such rows for each token.
        idle: whether an expert without a row is called; its gradients are zeros then, and otherwise missing.
        summed: its buffers that count tokens: what a call adds is the sum of what its parts would add.
        counted: its buffers to which a call adds the same for any tokens, with what it adds.
    """

    made: tuple[Made, ...]
    leaves: tuple[Any, ...]
    structure: Any
    width: int
    rows: int
    idle: bool
    summed: tuple[str, ...]
    counted: tuple[tuple[str, Tensor], ...] = field(default=(), compare=False)

    def packed(self, made: Sequence[Tensor]) -> Any:
        """What the block returns, of its tensors."""
        tensors, places = iter(made), iter(self.leaves)
        return compat.unflatten([next(tensors) if x is TENSOR else x for x in places], self.structure)


TENSOR: Any = type("TensorHere", (), {"__repr__": lambda self: "<a tensor>"})()
"""Stands for a tensor among the leaves of a result."""

Laws = Callable[[Sequence[Any], Any], Law]
"""`laws(leaves, structure)`: the law for a call with such flattened (args, kwargs)."""


class Block:
    """A block's forward, called as one operator.

    Arguments:
        module: the block; its forward is taken as it is now.
        path: where it is in the model, for errors.
        each: the paths of its experts inside it, in order.
        laws: what it returns.

    All are equal to each other: in a recorded call it stands for "the module's own code".
    """

    def __init__(self, module: nn.Module, path: str, each: tuple[str, ...], laws: Laws) -> None:
        self.module, self.own, self.path, self.each, self.laws = module, module.forward, path, each, laws

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, structure = compat.flatten((args, kwargs))
        tokens_of(leaves, self.path)
        given = tuple(self.module.parameters()) if any(map(_fake, leaves)) else ()
        made = block_call(self, args, kwargs, given)
        return self.laws(leaves, structure).packed(made)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Block)

    def __hash__(self) -> int:
        return hash(Block)

    def __repr__(self) -> str:
        return "its own forward"

    def experts(self) -> list[nn.Module]:
        """Its experts, in order."""
        return [self.module.get_submodule(path) for path in self.each]


def tokens_of(leaves: Sequence[Any], path: str) -> Tensor:
    """The tokens [*lead, H] of a call's arguments, the first floating tensor. Raises PlanError `experts-contract` where there are
    none, or another tensor does not begin with `lead`."""
    tensors = [x for x in leaves if isinstance(x, Tensor)]
    tokens = next((x for x in tensors if x.is_floating_point() and x.dim() > 1), None)
    # On a rank, while compiling, each may come in a layout of its own.
    if tokens is not None and (compat.is_fake(tokens) or all(_beside(x, tokens) for x in tensors)):
        return tokens
    shown = [f"{list(x.shape)} {x.dtype}" for x in tensors]
    raise PlanError(
        f"{path or 'the model'} is taken for a block of experts, and is called with {', '.join(shown) or 'no tensor'}",
        code="experts-contract", module=path,
        legal="block(tokens [..., H], ...), other tensors with the same leading dims; name another module in experts.at",
    )  # fmt: skip


def _beside(x: Tensor, tokens: Tensor) -> bool:
    return x.shape[: tokens.dim() - 1] == tokens.shape[:-1]


def _fake(x: Any) -> bool:
    return isinstance(x, Tensor) and compat.is_fake(x)


def block_call(
    own: Block, args: tuple[Any, ...], kwargs: dict[str, Any], parameters: tuple[Tensor, ...]
) -> list[Tensor]:
    """The tensors that `own`'s forward returns. With fake tensors nothing of it runs: shapes follow its law, and gradients reach
    everything that is floating."""
    leaves, structure = compat.flatten((args, kwargs))
    tensors = [x for x in leaves if isinstance(x, Tensor)]
    if has_torch_function((*tensors, *parameters)):
        return handle_torch_function(  # type: ignore[no-any-return]
            block_call, (*tensors, *parameters), own, args, kwargs, parameters
        )
    if any(map(compat.is_fake, tensors)):
        refuse_hooks(own)
        return opaque_results(own.laws(leaves, structure), tokens_of(leaves, own.path), parameters)
    return [x for x in compat.flatten(own.own(*args, **kwargs))[0] if isinstance(x, Tensor)]


def refuse_hooks(own: Block) -> None:
    """Raises PlanError `experts-contract` if somebody listens to a module inside: what runs there on a rank, and how often, is
    not what runs on one device. A module of a copy that is traced has one hook of each kind, the trace's."""
    for name, m in own.module.named_modules():
        if name and (len(m._forward_hooks) > 1 or len(m._forward_pre_hooks) > 1):
            raise PlanError(
                f"a hook listens to {own.path}.{name}, which is inside a block of experts that runs as one operator",
                code="experts-contract", module=own.path, legal="what the hook takes as a result of the block itself",
            )  # fmt: skip


def opaque_results(law: Law, tokens: Tensor, others: Sequence[Tensor]) -> list[Tensor]:
    """Tensors as a block with `law` returns for `tokens` [*lead, H], that depend on these and `others`, for shapes alone."""
    lead = tokens.shape[:-1]
    kinds = tuple((m.shape(lead), m.dtype or tokens.dtype, m.grad) for m in law.made)
    return list(_Results.apply(kinds, tokens, *others))


class _Results(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kinds: Any, tokens: Tensor, *others: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(tokens, *others)
        made = tuple(tokens.new_empty(shape, dtype=dtype) for shape, dtype, _ in kinds)
        ctx.mark_non_differentiable(*(t for t, (_, _, grad) in zip(made, kinds, strict=True) if not grad))
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        saved = zip(ctx.saved_tensors, ctx.needs_input_grad[1:], strict=True)
        return None, *(torch.empty_like(t) if needed else None for t, needed in saved)
