"""A block's forward in two runs, so that its experts can compute on other ranks what its loop asks of them one by one.

    first run     every expert only notes the rows that it is called with, and returns them as they came
    in between    the rows of all experts travel to the ranks of these, and their results home
    second run    every expert returns the results for the rows that it noted

The rows keep the graph of the first run, all else that of the second, so that gradients are those of one run: what the block
returns depends on its tokens through the results, whose rows the first run made, and directly. A row of the second run has to be
the row of the first: it must not depend on what an expert returned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from meshplan import compat
from meshplan.errors import PlanError

Run = Callable[[], Any]


class Replay:
    """One call of a block.

    Attributes:
        numbers: the expert of each noted row, in order; called: the experts that were called, with a row or none.
        hidden: whether one was called where autograd does not follow, or where backward would call it again.

    Arguments:
        experts: the modules that are its experts; path: of the block, for errors.
    """

    def __init__(self, experts: Sequence[nn.Module], path: str) -> None:
        self.experts, self.path = experts, path
        self._noted: list[tuple[int, Tensor]] = []
        self._apart: list[Tensor] = []
        self.hidden = False

    @property
    def numbers(self) -> list[int]:
        return [e for e, x in self._noted for _ in range(_rows(x))]

    @property
    def called(self) -> set[int]:
        return {e for e, _ in self._noted}

    def rows(self) -> Tensor | None:
        """[N, H] that experts are called with, in the order of calls; None where none was called.

        Raises PlanError `experts-contract` where they are not of one width."""
        if not self._noted:
            return None
        if len({(x.shape[-1], x.dtype) for _, x in self._noted}) > 1:
            raise contract(self.path, "its experts are called with rows of several widths or dtypes")
        return torch.cat([x.reshape(-1, x.shape[-1]) for _, x in self._noted])

    def first(self, run: Run) -> Any:
        """What `run`, the block's forward, returns while experts note their rows. Nobody has computed anything on these yet."""

        def note(number: int, x: Tensor) -> Tensor:
            self._noted.append((number, x))
            self.hidden |= compat.in_checkpoint() or not torch.is_grad_enabled()
            return x.detach().clone()

        with self._standing_in(note):
            return run()

    def second(self, run: Run, results: Tensor) -> Any:
        """What `run` returns with `results` [N, H] for the noted rows.

        Raises PlanError `experts-contract` where experts are called otherwise than in the first run."""
        left = list(self._noted)
        at = 0

        def answer(number: int, x: Tensor) -> Tensor:
            nonlocal at
            if not left or left[0][0] != number or left[0][1].shape != x.shape:
                raise self._other()
            noted = left.pop(0)[1]
            # Asked of the device, and read once. What is not a number equals nothing, itself included.
            self._apart.append(((noted != x) & (noted == noted)).any())
            at, start = at + _rows(x), at
            # The block may write into it, and into no other's.
            return results.narrow(0, start, at - start).reshape(x.shape).clone()

        with self._standing_in(answer):
            out = run()
        if left or (self._apart and bool(torch.stack(self._apart).any())):
            raise self._other()
        return out

    def _other(self) -> PlanError:
        return contract(self.path, "what an expert is called with depends on what another returned, or on a second run")

    @contextmanager
    def _standing_in(self, stand_in: Callable[[int, Tensor], Tensor]) -> Iterator[None]:
        held = [e.__dict__.get("forward") for e in self.experts]
        for number, e in enumerate(self.experts):
            e.__dict__["forward"] = self._forward(number, stand_in)
        try:
            yield
        finally:
            for e, own in zip(self.experts, held, strict=True):
                del e.__dict__["forward"]
                if own is not None:
                    e.__dict__["forward"] = own

    def _forward(self, number: int, stand_in: Callable[[int, Tensor], Tensor]) -> Callable[..., Tensor]:
        def forward(*args: Any, **kwargs: Any) -> Tensor:
            given = [*args, *kwargs.values()]
            if len(given) != 1 or not isinstance(given[0], Tensor) or not given[0].is_floating_point():
                raise contract(self.path, "an expert is called with something else than rows [n, H]")
            return stand_in(number, given[0])

        return forward


def _rows(x: Tensor) -> int:
    return x[..., 0].numel()


def contract(path: str, what: str) -> PlanError:
    """The refusal of a block of experts that does not keep the contract."""
    return PlanError(
        f"{path or 'the model'} is taken for a block of experts, and ranks could not run it on their own tokens: {what}",
        code="experts-contract", module=path,
        legal="a block that gives each token a function of that token alone, calls its experts with rows [n, H] and draws no "
        "random numbers; what looks at several tokens in front of it or behind it; or the block left out of experts.at",
    )  # fmt: skip


class Buffers:
    """Buffers of a block that its forward changes, so that two runs leave what one does.

    Arguments:
        module: the block; names: of the buffers that may change.
    """

    def __init__(self, module: nn.Module, names: Sequence[str]) -> None:
        self._at = []
        for name in names:
            path, _, last = name.rpartition(".")
            holder = module.get_submodule(path)
            b = holder._buffers[last]
            assert b is not None
            self._at.append((holder, last, b, b.detach().clone()))

    def added(self) -> list[Tensor]:
        """What has been added to each since."""
        now = [holder._buffers[name] for holder, name, _, _ in self._at]
        return [b.detach() - old for b, (*_, old) in zip(now, self._at, strict=True) if b is not None]

    def put_back(self) -> None:
        """Each as it was."""
        self.add([torch.zeros_like(old) for *_, old in self._at])

    @torch.no_grad()
    def add(self, deltas: Sequence[Tensor]) -> None:
        """Each as it was, and `deltas`."""
        for (holder, name, b, old), delta in zip(self._at, deltas, strict=True):
            if holder._buffers[name] is not b and delta.any():  # assigned anew, where another may keep the old one
                holder._buffers[name] = old + delta
                continue
            holder._buffers[name] = b
            if not torch.equal(b, want := old + delta):
                b.copy_(want)
