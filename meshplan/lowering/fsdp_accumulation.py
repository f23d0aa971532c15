"""Gradient accumulation under FSDP2: what each microbatch reduces, exactly, whatever parameters each of them uses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from meshplan import compat
from meshplan.compiler.fsdp_schedule import MicrobatchFlags, Strategy, microbatch_flags
from meshplan.errors import PlanError


@contextmanager
def accumulate(model: nn.Module, steps: int) -> Iterator[None]:
    """Around `steps` forward/backward pairs of a model that `apply_fsdp` sharded: their gradients add up.

    Under zero1 gradients are reduced at the last microbatch; under zero2 and zero3 they are reduce-scattered at each;
    replicas are averaged at the last in all cases. zero1 and zero2 keep parameters gathered in between. Afterwards,
    also after an exception, every backward is its own step again; an exception discards gradients that are not reduced
    yet (what earlier microbatches have reduced stays in `p.grad`: call `zero_grad`).

    Raises:
        PlanError `fsdp-not-applied`, `accumulate-nested`, `bad-accumulate-steps`; `accumulate-count` when the block
        does not run exactly `steps` backward passes.
    """
    sharded: Sharded | None = getattr(model, "_meshplan_fsdp", None)
    if sharded is None:
        raise PlanError("accumulate needs the model that fsdp was applied to, its root", code="fsdp-not-applied")
    if steps < 1:
        raise PlanError(f"steps={steps}", code="bad-accumulate-steps", legal="steps >= 1")
    if sharded.steps is not None:
        raise PlanError("accumulate inside accumulate", code="accumulate-nested", legal="one block around all pairs")
    sharded.steps, sharded.done = steps, 0
    try:
        yield
        if sharded.done != steps:
            raise _miscounted(sharded.done, steps)
    except BaseException:
        sharded.abandon()
        raise
    finally:
        sharded.steps = None
        sharded.set_flags(MicrobatchFlags(reduce=True, all_reduce=True, reshard=True))


class Sharded:
    """What is kept about a sharded model: its parameter groups, and where an accumulation stands.

    A microbatch is told by its backward. Everything that depends on it is decided in FSDP2's post-backward of a unit,
    so `install` puts `_post_backward` around that method; the first one in a backward sets the flags.
    """

    def __init__(self, root: nn.Module, groups: list[Any], strategy: Strategy) -> None:
        self.root: Any = root
        self.groups, self.strategy = groups, strategy
        self.steps: int | None = None  # of the accumulation that is open
        self.done = 0  # its finished backward passes
        self.running = False  # a backward of it is running
        self.packed: dict[Any, list[Any]] = {}  # group -> parameters whose sum waits for the replicas

    def install(self) -> None:
        """Take part in the groups' post-backward, and be found by `accumulate`."""
        for group in self.groups:
            group.post_backward = _Around(self, group, group.post_backward)
        self.root._meshplan_fsdp = self

    def set_flags(self, flags: MicrobatchFlags) -> None:
        """Tell every unit what to do at the end of its backward."""
        self.root.set_requires_gradient_sync(flags.reduce)
        self.root.set_requires_all_reduce(flags.all_reduce)
        self.root.set_reshard_after_backward(flags.reshard)

    def abandon(self) -> None:
        """Forget a half-done accumulation."""
        self.running = False
        self.packed.clear()
        compat.fsdp_abandon(self.root, self.groups)

    def begin(self) -> None:
        """At the first post-backward of a backward inside `accumulate`."""
        if self.steps is None or self.running:
            return
        if self.done == self.steps:
            raise _miscounted(self.done + 1, self.steps)
        self.running = True
        self.set_flags(microbatch_flags(self.strategy, self.done, self.steps))
        compat.on_backward_end(self._end)

    def before_reduce(self, group: Any) -> list[Any]:
        """Make what `group` is about to reduce uniform; returns the parameters it covers."""
        if group.reduce_grads:
            compat.fsdp_upcast_gradients(group)
        now = compat.fsdp_gradients(group)
        if now and group.reduce_grads and group in self.packed:
            now = compat.fsdp_align_partial(group, self.packed[group], now)
        return now

    def after_reduce(self, group: Any, covered: list[Any]) -> None:
        """Remember what the waiting sum of `group` covers, if there is one."""
        if group._partial_reduce_output is None:
            self.packed.pop(group, None)
        elif covered:
            self.packed[group] = covered

    def _end(self) -> None:
        # Runs after FSDP2's own callback, which the same backward queued earlier.
        if self.done + 1 == self.steps:
            for group in [g for g in self.groups if g in self.packed]:
                compat.fsdp_align_partial(group, self.packed[group], [])
                compat.fsdp_flush_partial(group)
        self.done += 1
        self.running = False


class _Around:
    """A group's `post_backward` with the steps before and after it."""

    def __init__(self, sharded: Sharded, group: Any, inner: Any) -> None:
        self.sharded, self.group, self.inner = sharded, group, inner

    def __call__(self, *unused: Any) -> None:
        self.sharded.begin()
        if not compat.fsdp_was_gathered(self.group):
            return  # never used so far; FSDP2 would look for gradients on parameters that do not exist yet
        covered = self.sharded.before_reduce(self.group)
        self.inner()
        self.sharded.after_reduce(self.group, covered)


def _miscounted(done: int, steps: int) -> PlanError:
    return PlanError(
        f"{done} backward passes inside accumulate(steps={steps})",
        code="accumulate-count",
        legal=f"exactly {steps} forward/backward pairs in the block",
    )
