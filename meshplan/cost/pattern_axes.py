"""What one block of a pattern sends on each mesh axis, and where an axis cannot split it (modelled).

Bytes that one rank sends for one block, forward (backward alike unless said), n ranks on the axis, b sequences of S tokens on a
data rank, T = b S / cp of them on a rank, H wide, w bytes a number, w* those of float32 at least:

    tp        2 (n-1)/n T H w          A, M, R and a shared expert, with sequence parallelism: one all_gather and one
                                       reduce_scatter each way (Korthikanti et al. 2022, section 4.2), or one all_reduce
    cp        A: a ring of keys and values (ops/attention/cost.py)
              M: (n-1)/n b S (w (I + 2 G N) + w* (I + h)),   R: (n-1)/n b S w W:   their inputs are gathered, and every rank
              runs the recurrence over the whole sequence: what the compiler makes of these models
    ep        E: 2 (n-1)/n T/tp k H w  routed evenly, there and back (ops/experts/cost.py), each token from one rank of tp
    pp        T H w / tp               where the pipeline is cut after the block
    dp_shard  (n-1)/n P w              ZeRO-3 over dp_shard x cp; backward gathers again and scatters: twice that. P is what a
                                       rank computes with: what tp splits / tp, and experts / ep over expert_dp

I, h, G, N are the inner width, heads, groups and state of M, W the width of R (all of them a rank's share under tp), k the
experts of a token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from meshplan.mesh.expert_view import ExpertView
from meshplan.models.hybrid import HybridConfig
from meshplan.ops.attention.cost import Local, bytes_sent, collectives
from meshplan.ops.experts.cost import expression
from meshplan.ops.precision import wide
from meshplan.runtime.comm import AxisGroup


@dataclass(frozen=True, kw_only=True)
class Sent:
    """What one rank sends for one block on an axis.

    Attributes:
        forward, backward: bytes; both zero where nothing is sent.
        note: what is special there; empty if nothing.
        passing: for a recurrence on cp, bytes that a rank would hand to the next, once each way and ranks in turn, if its
            state were passed instead. meshplan does not do that.
    """

    forward: float = 0.0
    backward: float = 0.0
    note: str = ""
    passing: float | None = None

    @property
    def total(self) -> float:
        return self.forward + self.backward


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """Numbers of one block's parameters: those that tp can split, those that are whole on it, and routed experts."""

    split: int
    whole: int
    experts: int


@dataclass(frozen=True, kw_only=True)
class Run:
    """A model on a mesh: its sizes, the two views of the ranks, sequences of a data rank, tokens of each, and their dtype."""

    config: HybridConfig
    view: ExpertView
    batch: int
    seq: int
    dtype: torch.dtype

    def sent(self, letter: str, parameters: Parameters) -> dict[str, Sent]:
        """By axis of more than one rank."""
        found = {
            "tp": lambda: self._tp(letter),
            "cp": lambda: self._cp(letter),
            "ep": lambda: self._ep(letter),
            "dp_shard": lambda: self._dp_shard(letter, parameters),
            "pp": self._pp,
        }
        return {axis: count() for axis, count in found.items() if self._degree(axis) > 1}

    def _degree(self, axis: str) -> int:
        if axis == "ep":
            return self.view.degree("ep")
        return self.view.spec.degree(*(("dp_shard", "cp") if axis == "dp_shard" else (axis,)))

    @property
    def _tokens(self) -> float:
        return self.batch * self.seq / self._degree("cp")

    def _unit(self, letter: str) -> tuple[str, int]:
        """What tp deals out whole: its name, and how many a block has."""
        c = self.config
        return {
            "A": ("query heads", c.n_heads),
            "E": ("numbers of the shared expert", c.shared_dim),
            "M": ("groups", c.ssm_groups),
            "R": ("gate blocks", c.lru_blocks),
        }[letter]

    def _split(self, letter: str) -> int:
        """Ranks of tp that share a block: all, or one where they cannot."""
        n, (_, count) = self._degree("tp"), self._unit(letter)
        return n if count and count % n == 0 else 1

    def _tp(self, letter: str) -> Sent:
        n, (name, count) = self._degree("tp"), self._unit(letter)
        if letter == "E" and not count:
            return Sent(note="splits no expert: each token is sent by one rank")
        if count % n:
            return Sent(note=f"cannot split {count} {name}: the block is whole on every rank")
        few = letter == "A" and n > self.config.n_kv_heads
        note = f"each of {self.config.n_kv_heads} key heads on {n // self.config.n_kv_heads} ranks" if few else ""
        each = 2 * (n - 1) / n * self._tokens * self.config.dim * self.dtype.itemsize
        return Sent(forward=each, backward=each, note=note)

    def _cp(self, letter: str) -> Sent:
        c, n, tp = self.config, self._degree("cp"), self._split(letter)
        w, w_wide = self.dtype.itemsize, wide(self.dtype).itemsize
        if letter == "E":
            return Sent(note="each token by itself; a router's loss sums a count an expert")
        if letter == "A":
            kv_heads = max(1, c.n_kv_heads // tp)
            local = Local(self.batch, c.n_heads // tp, kv_heads, self.seq // n, c.head_dim, c.head_dim, self.dtype)
            ring = AxisGroup("cp", n, 0)
            sent = [
                bytes_sent(collectives("ring", local, ring, phase=phase), ring) for phase in ("forward", "backward")
            ]
            return Sent(forward=sent[0], backward=sent[1])
        if letter == "M":
            heads, inner = c.ssm_heads // tp, c.ssm_heads * c.ssm_head_dim // tp
            convolved = inner + 2 * c.ssm_groups * c.ssm_state // tp
            each, state = w * convolved + w_wide * (inner + heads), w_wide * inner * c.ssm_state
        else:
            convolved = c.lru_width // tp
            each, state = w * convolved, w_wide * convolved
        gathered = (n - 1) / n * self.batch * self.seq * each
        # The state, and the tokens before that the first taps of the convolution read.
        passing = self.batch * (state + w * (c.conv_width - 1) * convolved)
        note = "the whole sequence is gathered and run on every rank"
        return Sent(forward=gathered, backward=gathered, note=note, passing=passing)

    def _ep(self, letter: str) -> Sent:
        if letter != "E":
            return Sent(note="splits nothing: its ranks are data ranks here")
        c, n = self.config, self._degree("ep")
        values = {
            "T": self._tokens / self._degree("tp"),
            "k": c.top_k,
            "H": c.dim,
            "b": self.dtype.itemsize,
            "W": n,
            "i": 1,
        }
        each = float(expression("alltoall").subs(values))
        return Sent(forward=each, backward=each)

    def _dp_shard(self, letter: str, parameters: Parameters) -> Sent:
        def share(ranks: int, numbers: float) -> float:
            return (ranks - 1) / ranks * numbers * self.dtype.itemsize

        each = share(self._degree("dp_shard"), parameters.whole + parameters.split / self._split(letter))
        each += share(self.view.degree("expert_dp"), parameters.experts / self._degree("ep"))
        return Sent(forward=each, backward=2 * each)

    def _pp(self) -> Sent:
        each = self._tokens / self._degree("tp") * self.config.dim * self.dtype.itemsize
        return Sent(forward=each, backward=each)
