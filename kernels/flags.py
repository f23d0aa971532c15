"""Flags in memory that ranks share: set by a release, waited for by an acquire, at system scope.

Flags only grow, and are waited for with >=: a peer that is ahead may have set the next one already. A barrier of the program
stands on both sides, since Triton before 3.9 puts none before a release. Everything is ordered by streams; no rank waits on
the host.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def await_flag(flag, epoch):
    """Wait until `flag` is `epoch` or more; what was written before it was set can be read after."""
    seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
    while seen < epoch:
        seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
    tl.debug_barrier()


@triton.jit
def await_all(flags, epoch, mask):
    """The same for a block of flags, those where `mask` is."""
    least = _least(flags, epoch, mask)
    while least < epoch:
        least = _least(flags, epoch, mask)
    tl.debug_barrier()


@triton.jit
def _least(flags, epoch, mask):
    return tl.min(tl.where(mask, tl.atomic_add(flags, 0, mask=mask, sem="acquire", scope="sys"), epoch), 0)


@triton.jit
def set_flag(flag, epoch):
    """Set `flag`: what this program wrote before can be read by whoever waits for it."""
    tl.debug_barrier()
    tl.atomic_xchg(flag, epoch, sem="release", scope="sys")
