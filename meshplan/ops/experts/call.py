"""The call of an experts module as one torch call, so that a compiler sees one operator where the module's code may be a loop.

The contract is `forward(tokens [T, H], indices [T, k], weights [T, k]) -> [T, H]` with

    out[t] = sum over j of weights[t, j] expert_(indices[t, j])(tokens[t]).

A `Routed` stands in place of such a module's forward. On its own it computes what the forward does; under a torch function mode
it is `experts_call`, which a rank replaces by `routed_experts` with the module's own forward as the body: on the rows that
arrived, one choice and a weight of one each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function

from meshplan import compat
from meshplan.errors import PlanError


class Early(Protocol):
    """What the block of experts computes while their tokens are under way: see `meshplan.runtime.beside`."""

    def begin(self, tokens: Tensor) -> None: ...

    def meanwhile(self) -> Callable[[], None] | None: ...


class MlpNames(NamedTuple):
    """How an experts module holds the gated MLP that kernels know: names of its packed parameters, as in `grouped_mlp`."""

    up: str
    down: str
    up_bias: str | None
    down_bias: str | None
    interleaved: bool
    clamped: bool
    turned: bool

    def of(self, module: nn.Module) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """The parameters."""
        up, down, up_bias, down_bias = (getattr(module, name) if name is not None else None for name in self[:4])
        assert up is not None and down is not None
        return up, down, up_bias, down_bias


class Routed:
    """A module's forward, called as one operator.

    Arguments:
        module: the experts; its forward is taken as it is now.
        path: where it is in the model, for errors.
        sizes: its attributes that say how many experts the parameters hold; they change with the parameters.
        mlp: how it holds a gated MLP that kernels can compute in its place.

    All are equal to each other: in a recorded call it stands for "the module's own code".
    """

    def __init__(
        self, module: nn.Module, path: str, sizes: tuple[str, ...] = (), mlp: MlpNames | None = None
    ) -> None:
        self.mlp = mlp
        self.module, self.own, self.path, self.sizes = module, module.forward, path, sizes
        self.early: Early | None = None  # what else computes while its tokens are under way

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        tokens, indices, weights = self.told(args, kwargs)
        if self.early is not None:
            self.early.begin(tokens)
        given = (*self.module.parameters(),) if compat.is_fake(tokens) else ()
        out: Tensor = experts_call(self, tokens, indices, weights, *given)
        return out

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Routed)

    def __hash__(self) -> int:
        return hash(Routed)

    def __repr__(self) -> str:
        return "its own forward"

    def told(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
        """The tokens, indices and weights of a call. Raises PlanError `experts-contract` if they are not."""
        given = [*args, *kwargs.values()]
        if len(given) == 3 and all(isinstance(x, Tensor) for x in given):
            tokens, indices, weights = given
            routes = indices.dim() == 2 and indices.dtype in (torch.int64, torch.int32)
            floats = tokens.is_floating_point() and weights.is_floating_point() and tokens.dim() == weights.dim() == 2
            # On a rank, while compiling, each may come in a layout of its own.
            fits = weights.shape == indices.shape and tokens.shape[0] == indices.shape[0]
            if routes and floats and (fits or compat.is_fake(tokens)):
                return tokens, indices, weights
        shown = [f"{list(x.shape)} {x.dtype}" if isinstance(x, Tensor) else type(x).__name__ for x in given]
        raise PlanError(
            f"{self.path or 'the model'} is taken for experts, and is called with {', '.join(shown)}",
            code="experts-contract", module=self.path,
            legal="experts(tokens [T, H], integer indices [T, k], weights [T, k]); name another module in experts.at",
        )  # fmt: skip

    def body(self, held: int, first: int) -> Callable[[Tensor, tuple[int, ...]], Tensor]:
        """The module's own code as the `Body` of a rank.

        Arguments:
            held: experts in the module's parameters on this rank.
            first: the number among them of the first that computes here.
        """

        def run(x: Tensor, counts: tuple[int, ...]) -> Tensor:
            if compat.is_fake(x):
                return opaque(x, tuple(self.module.parameters()))
            # An experts module may return something that does not depend on its parameters where it has no row; a gradient
            # that is zero must not be missing.
            rows = x if x.shape[0] else x.new_zeros((1, x.shape[1]))
            numbers = torch.arange(first, first + len(counts), device=x.device)
            ids = torch.repeat_interleave(numbers, numbers.new_tensor(counts)) if x.shape[0] else numbers[:1]
            with _Sized(self.module, dict.fromkeys(self.sizes, held)):
                y: Tensor = self.own(rows, ids[:, None], rows.new_ones((rows.shape[0], 1)))
            return y[: x.shape[0]]

        return run


def routed_of(module: nn.Module) -> Routed | None:
    """What stands in place of the forward of an experts module, also of one that is lowered; None for other modules."""
    held = module.__dict__.get("_meshplan_forward", module.__dict__.get("forward"))
    return held if isinstance(held, Routed) else None


class _Sized:
    """Attributes of a module with other values for a while."""

    def __init__(self, module: nn.Module, values: dict[str, int]) -> None:
        self.module, self.values, self.held = module, values, {name: getattr(module, name) for name in values}

    def __enter__(self) -> None:
        self.module.__dict__.update(self.values)

    def __exit__(self, *exc: Any) -> None:
        self.module.__dict__.update(self.held)


def experts_call(own: Routed, tokens: Tensor, indices: Tensor, weights: Tensor, *parameters: Tensor) -> Tensor:
    """`own`'s forward. With fake tensors nothing of it runs: the result has the shape of `tokens`, and its gradient reaches
    everything that is floating."""
    if has_torch_function((tokens, indices, weights, *parameters)):
        return handle_torch_function(  # type: ignore[no-any-return]
            experts_call, (tokens, indices, weights, *parameters), own, tokens, indices, weights, *parameters
        )
    if compat.is_fake(tokens):
        return opaque(tokens, (weights, *parameters))
    out: Tensor = own.own(tokens, indices, weights)
    return out


def opaque(x: Tensor, others: Sequence[Tensor]) -> Tensor:
    """Something of the shape of `x` that depends on it and on `others`, for shapes alone."""
    return _Opaque.apply(x, *others)  # type: ignore[no-any-return]


class _Opaque(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *others: Tensor) -> Tensor:
        ctx.save_for_backward(x, *others)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        saved = zip(ctx.saved_tensors, ctx.needs_input_grad, strict=True)
        return tuple(torch.empty_like(t) if needed else None for t, needed in saved)
