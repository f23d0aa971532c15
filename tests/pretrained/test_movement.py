"""A conversion watched on meta tensors, and pieces of its result followed back to the stored elements."""

import itertools
import math

import pytest
import torch

from meshplan.pretrained.movement import NotRecorded, Recording, piece

STORED = {
    "a": torch.arange(24.0).reshape(4, 6),
    "b": torch.arange(100.0, 124.0).reshape(4, 6),
    "c": torch.arange(200.0, 212.0).reshape(2, 6),
    "cube": torch.arange(60.0).reshape(3, 4, 5),
}

MOVES = {
    "cat": lambda a, b, c, cube: torch.cat([a, c, b], dim=0),
    "cat of the last dim": lambda a, b, c, cube: torch.cat([a, b], dim=-1),
    "experts": lambda a, b, c, cube: torch.cat([torch.stack([a, b]), torch.stack([b, a])], dim=1),
    "chunk": lambda a, b, c, cube: torch.chunk(a, 3, dim=1)[1].contiguous(),
    "split": lambda a, b, c, cube: torch.split(a, [1, 3], dim=0)[1],
    "slices": lambda a, b, c, cube: a[1:, :-2],
    "select": lambda a, b, c, cube: cube[:, -1].transpose(0, 1),
    "unbind": lambda a, b, c, cube: cube.unbind(1)[2],
    "transposes": lambda a, b, c, cube: cube.permute(2, 0, 1).transpose(-1, 0),
    "t": lambda a, b, c, cube: c.t().contiguous(),
    "ones": lambda a, b, c, cube: a.unsqueeze(1)[:, :, 2:].squeeze(1),
}
COMPUTED = {
    "rotary order": lambda a, b, c, cube: a.view(2, 2, 6).transpose(0, 1).reshape(4, 6),
    "every other": lambda a, b, c, cube: cube[:, ::2],
    "sum": lambda a, b, c, cube: torch.cat([a + b, c]),
}


def read(node, offset, size):
    """The piece, and how many stored elements were fetched for it."""
    fetched = 0

    def fetch(name, at, extent):
        nonlocal fetched
        fetched += math.prod(extent)
        out = STORED[name]
        for dim, (first, length) in enumerate(zip(at, extent, strict=True)):
            out = out.narrow(dim, first, length)
        return out.clone()

    return piece(node, offset, size, fetch), fetched


@pytest.mark.parametrize("name", [*MOVES, *COMPUTED])
def test_every_piece_is_that_of_the_whole_and_moves_fetch_no_more(name):
    move = {**MOVES, **COMPUTED}[name]
    want = move(**STORED)
    with Recording() as recording:
        made = move(**{n: recording.source(n, t.shape, t.dtype) for n, t in STORED.items()})
        node = recording.node(made)
    assert node.shape == tuple(want.shape)
    for low in itertools.product(*(range(n) for n in want.shape)):
        size = [n - first for first, n in zip(low, want.shape, strict=True)]
        for extent in (size, [1] * len(size)):
            got, fetched = read(node, low, extent)
            cut = want[tuple(slice(f, f + n) for f, n in zip(low, extent, strict=True))]
            assert torch.equal(got, cut)
            assert fetched == math.prod(extent) if name in MOVES else fetched >= math.prod(extent)


@pytest.mark.parametrize(
    "convert",
    [lambda x: x.mul_(2), lambda x: x.as_strided((2, 2), (3, 1))],
    ids=["in place", "by its strides"],
)
def test_what_a_graph_cannot_hold_is_not_recorded(convert):
    with Recording() as recording, pytest.raises(NotRecorded):
        recording.node(convert(recording.source("a", (4, 6), torch.float32)))
