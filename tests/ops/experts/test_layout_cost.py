"""What a layout is said to send around a dispatch is what gloo ranks send, one by one, and its formulas are those bytes."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist

from meshplan.ops.experts.experts import routed_experts
from meshplan.ops.experts.layout import TokenLayout
from meshplan.ops.experts.layout_cost import sends_around
from meshplan.runtime.comm import AxisGroup
from meshplan.runtime.recorder import record_collectives

K, WIDTH, DTYPE, WEIGHTS = 2, 8, torch.float32, torch.float64

LAYOUTS = {
    "copies": {"copies": True},
    "etp own": {"etp": True},
    "etp own, equal": {"etp": True, "equal": True},
    "etp copies": {"etp": True, "etp_copies": True},
}
TOKENS = {"copies": (7,), "etp own": (3, 0, 6, 2), "etp own, equal": (7, 7, 7, 7), "etp copies": (7,)}


def _layout(name: str, kind: str, group: AxisGroup) -> TokenLayout:
    given = dict(LAYOUTS[name])
    over = {axis: group for axis in ("copies", "etp") if given.pop(axis, False)}
    return TokenLayout(**over, **given, kind=kind)  # type: ignore[arg-type]


def _recorded(name: str, kind: str, frozen: str) -> tuple[list, list]:
    """One rank alone has the experts, so that nothing but the layout sends."""
    group = AxisGroup("tp", 4, dist.get_rank(), dist.group.WORLD.group_name)  # type: ignore[union-attr]
    layout = _layout(name, kind, group)
    tokens = TOKENS[name]
    size = tokens[group.rank % len(tokens)]
    x = torch.ones(size, WIDTH, dtype=DTYPE, requires_grad=frozen != "tokens")
    weights = torch.ones(size, K, dtype=WEIGHTS, requires_grad=frozen != "weights")
    w = torch.ones((), dtype=DTYPE, requires_grad=True)
    chosen = torch.zeros(size, K, dtype=torch.int32)
    with record_collectives() as log:
        out = routed_experts(
            x, chosen, weights, lambda x, _: w * x, experts=1, group=AxisGroup("ep", 1, 0), layout=layout
        )
        out.backward(torch.ones_like(out))
    said = []
    for phase in ("forward", "backward"):
        before, after = sends_around(
            layout, tokens, K, WIDTH, DTYPE, WEIGHTS, indices_dtype=torch.int32, phase=phase,
            tokens_grad=frozen != "tokens", weights_grad=frozen != "weights",
        )  # fmt: skip
        said += [(phase, s.call.op, s.call.elements, str(s.call.dtype), s.bytes) for s in before + after]
    return [(c.phase, c.op, c.elements, f"torch.{c.dtype}", c.wire_bytes) for c in log], said


@pytest.mark.parametrize("frozen", ["", "tokens", "weights"])
def test_calls_are_those_announced(pool, frozen):
    for name, kind in itertools.product(LAYOUTS, ("I", "R")):
        for made, announced in pool.run(_recorded, name, kind, frozen):
            assert made == announced, (name, kind)
            assert made


def test_bytes_of_rows_are_those_of_the_formulas():
    """The weights have no numbers here: rows alone."""
    group, tokens = AxisGroup("tp", 4, 1), 64
    row = WIDTH * DTYPE.itemsize
    expected = {
        ("copies", "I"): 3 / 4 * tokens,
        ("copies", "R"): 3 / 4 * tokens,
        ("etp own, equal", "I"): 2 * 3 * tokens,
        ("etp copies", "I"): 2 * 3 / 4 * tokens,
        ("etp copies", "R"): 2 * 3 / 4 * tokens,
    }
    for (name, kind), count in expected.items():
        for phase in ("forward", "backward"):
            around = sends_around(
                _layout(name, kind, group), (tokens,), 0, WIDTH, DTYPE, WEIGHTS, phase=phase, weights_grad=False
            )
            assert sum(s.bytes for part in around for s in part) == count * row


def test_a_share_is_what_etp_reduces():
    copies, etp = AxisGroup("tp_ep", 2, 1), AxisGroup("tp_etp", 2, 0)
    layout = TokenLayout(copies=copies, etp=etp, etp_copies=True)
    before, after = sends_around(layout, (7,), K, WIDTH, DTYPE, WEIGHTS)
    assert before == [] and [(s.call.axis, s.call.elements) for s in after] == [
        ("tp_etp", 3 * WIDTH),
        ("tp_ep", 8 * WIDTH),
    ]
