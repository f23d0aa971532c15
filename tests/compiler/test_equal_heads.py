"""Key heads that a program repeats for its query heads are told from its calls, and travel once."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshplan as mp
from meshplan.ops.attention.legal import spared_heads
from meshplan.verify.aligned import align

B, SEQ, HEADS, KV, D = 2, 24, 6, 2, 3
EACH = HEADS // KV


def repeat_kv(x: Tensor) -> Tensor:
    """As transformers does it, on [B, KV, S, D]."""
    b, kv, n, d = x.shape
    return x[:, :, None].expand(b, kv, EACH, n, d).reshape(b, kv * EACH, n, d)


def before_transpose(x: Tensor) -> Tensor:
    rows = x.transpose(1, 2)
    return rows.unsqueeze(3).expand(-1, -1, -1, EACH, -1).flatten(2, 3).transpose(1, 2)


def scaled_afterwards(x: Tensor) -> Tensor:
    return torch.cat([repeat_kv(x)[..., :1] * 2.0, repeat_kv(x)[..., 1:].contiguous()], -1)


REPEATED = {
    "repeat_kv": repeat_kv,
    "repeat_interleave": lambda x: x.repeat_interleave(EACH, dim=1),
    "repeat": lambda x: x.unsqueeze(2).repeat(1, 1, EACH, 1, 1).flatten(1, 2),
    "broadcast_to": lambda x: x.unsqueeze(2).broadcast_to(B, KV, EACH, x.shape[2], D).flatten(1, 2),
    "before transpose": before_transpose,
    "scaled afterwards": scaled_afterwards,
}


def written(x: Tensor) -> Tensor:
    """Equal heads, of which one is then changed through a view."""
    made = repeat_kv(x)
    made[:, 1].mul_(2.0)
    return made


PER_HEAD = torch.arange(1.0, HEADS + 1, dtype=torch.float64).view(-1, 1, 1)

OTHERWISE = {
    "one by one": lambda x: x.repeat(1, EACH, 1, 1),  # 0 1 0 1 0 1, not 0 0 0 1 1 1
    "in pairs across": lambda x: torch.cat([x, x.flip(1), x], 1),
    "written": written,
    "scaled by head": lambda x: repeat_kv(x) * PER_HEAD,
}


class Grouped(nn.Module):
    """Attention of six heads on two key heads under a mask given as a tensor."""

    def __init__(self, spread: Any) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, n * D, bias=False) for n in (HEADS, KV, KV))
        self.o, self.spread = nn.Linear(HEADS * D, 8), spread

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, D)).transpose(1, 2) for p in (self.q, self.k, self.v))
        at = torch.arange(x.shape[1])
        mask = (at[:, None] - at).abs() < 7
        out = F.scaled_dot_product_attention(q, self.spread(k), self.spread(v), attn_mask=mask)
        return self.o(out.transpose(1, 2).flatten(2)).pow(2).mean()


def plan(method: str, cp: int = 2, **mesh: int) -> mp.Plan:
    split = [mp.Rule("{q,k,v}", use="colwise"), mp.Rule("o", use="rowwise")] if mesh else []
    return mp.Plan(
        mesh={"cp": cp, **mesh},
        inputs={"x": mp.Input(shape=(B, SEQ, 8), dtype=torch.float64, place={"cp": mp.S(1)})},
        rules=split,
        context={"attention": [""], "method": method, **({"inner": 2} if method == "hybrid" else {})},
    )


def sent(spread: Any, given: mp.Plan, ranks: int, op: str) -> list[int]:
    """Elements of the forward's calls of one kind over cp."""
    low = mp.lower(Grouped(spread).double(), given, ranks)
    return [c.elements for c in low.collectives if (c.op, c.phase) == (op, "forward") and c.axis.startswith("cp")]


@pytest.mark.parametrize("how", REPEATED)
def test_a_repeated_head_travels_once_whatever_repeats_it(how):
    model = Grouped(REPEATED[how]).double()
    assert sent(REPEATED[how], plan("ring"), 2, "send") == [2 * B * KV * SEQ // 2 * D]
    assert align(model, plan("ring"), 2).distance < 1e-12


@pytest.mark.parametrize("how", OTHERWISE)
def test_heads_that_are_not_equal_in_runs_all_travel(how):
    model = Grouped(OTHERWISE[how]).double()
    assert sent(OTHERWISE[how], plan("ring"), 2, "send") == [2 * B * HEADS * SEQ // 2 * D]
    assert align(model, plan("ring"), 2).distance < 1e-12


def test_gathered_keys_are_not_repeated_either():
    assert sent(repeat_kv, plan("allgather", 4), 4, "all_gather")[0] == 2 * B * KV * SEQ * D
    assert align(Grouped(repeat_kv).double(), plan("allgather", 4), 4).distance < 1e-12


@pytest.mark.parametrize(("method", "cp", "left"), [("ulysses", 2, KV), ("ulysses", 3, HEADS), ("hybrid", 4, KV)])
def test_exchanged_heads_leave_each_rank_its_own(method, cp, left):
    """Over 3 ranks two key heads cannot be dealt out, so that the repeated ones are."""
    moved = sent(repeat_kv, plan(method, cp), cp, "all_to_all")
    assert moved[1:3] == [B * left * SEQ // cp * D] * 2
    assert align(Grouped(repeat_kv).double(), plan(method, cp), cp).distance < 1e-12


@pytest.mark.parametrize(("tp", "left"), [(2, 1), (3, 2)])
def test_tensor_parallel_ranks_send_what_is_equal_among_their_heads(tp, left):
    """Two key heads on two ranks: one each. On three, each has two of the six repeated ones; the second's are not equal."""
    assert sent(repeat_kv, plan("ring", tp=tp), 2 * tp, "send") == [2 * B * left * SEQ // 2 * D]
    assert align(Grouped(repeat_kv).double(), plan("ring", tp=tp), 2 * tp).distance < 1e-12


def test_a_model_that_repeats_is_verified_on_ranks(pool):
    receipt = mp.verify(functools.partial(Grouped, repeat_kv), plan("ring"), nproc=2)
    assert receipt.passed, str(receipt)


@pytest.mark.parametrize(
    ("heads", "equal", "exchanged", "spared"),
    [(6, 3, 1, 3), (6, 3, 2, 3), (6, 3, 3, 1), (4, 8, 1, 4), (4, 6, 1, 2), (8, 4, 4, 2), (1, 1, 4, 1)],
)
def test_how_many_heads_one_can_stand_for(heads, equal, exchanged, spared):
    assert spared_heads(heads, equal, exchanged) == spared
