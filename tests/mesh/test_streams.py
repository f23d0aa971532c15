"""Random streams against the paper's known answers, a reference in Python integers, and one device's values."""

import itertools
import math

import pytest
import torch

from meshplan.errors import PlanError
from meshplan.mesh.streams import global_index, keep_mask, philox, stream_key, uniform, uniform_block

M = 0xFFFFFFFF
KEY = stream_key(7, "layers.0.attention", 3)


def reference(key, counter):
    """Philox4x32-10 as the paper writes it, on Python integers."""
    x, k = list(counter), [key & M, key >> 32 & M]
    for _ in range(10):
        a, b = 0xD2511F53 * x[0], 0xCD9E8D57 * x[2]
        x = [(b >> 32) ^ x[1] ^ k[0], b & M, (a >> 32) ^ x[3] ^ k[1], a & M]
        k = [(k[0] + 0x9E3779B9) & M, (k[1] + 0xBB67AE85) & M]
    return x


@pytest.mark.parametrize(
    ("counter", "key", "answer"),
    # Random123's kat_vectors, lines "philox4x32 10".
    [
        ([0, 0, 0, 0], [0, 0], [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([M, M, M, M], [M, M], [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
@pytest.mark.parametrize("kind", ["tensors", "ints"])
def test_known_answers(counter, key, answer, kind):
    words = tuple(torch.tensor([word]) for word in counter) if kind == "tensors" else tuple(counter)
    assert [int(word) for word in philox(key[0] | key[1] << 32, words)] == answer


def test_many_counters_equal_the_reference():
    generator = torch.Generator().manual_seed(0)
    counters = torch.randint(0, 2**32, (50, 4), generator=generator)
    got = torch.stack(philox(KEY, tuple(counters.unbind(1))), 1)
    assert got.tolist() == [reference(KEY, row) for row in counters.tolist()]


def test_a_tensor_key_is_the_same_stream_as_an_int():
    index = torch.arange(9)
    assert torch.equal(uniform(torch.tensor(KEY), index), uniform(KEY, index))


def test_uniform_reads_the_documented_words():
    index = torch.tensor([0, 5, 4 * 2**33 + 2])  # the last needs the counter's second word
    words = [reference(KEY, [0, 0, 0, 0])[0], reference(KEY, [1, 0, 0, 0])[1], reference(KEY, [0, 2, 0, 0])[2]]
    assert uniform(KEY, index).tolist() == [(word >> 8) / 2**24 for word in words]
    x = reference(KEY, [2, 0, 0, 0])
    doubles = [((x[0] << 21) | (x[1] >> 11)) / 2**53, ((x[2] << 21) | (x[3] >> 11)) / 2**53]
    assert uniform(KEY, torch.tensor([4, 5]), torch.float64).tolist() == doubles


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_uniform_is_uniform(dtype):
    n = 40_000
    x = uniform(KEY, torch.arange(n), dtype).double()
    assert x.min() >= 0 and x.max() < 1
    # Five standard errors; the stream is fixed, so this cannot flake.
    assert abs(x.mean() - 0.5) < 5 * math.sqrt(1 / 12 / n)
    assert abs(x.var() - 1 / 12) < 5 * math.sqrt(1 / 180 / n)
    assert abs(torch.corrcoef(torch.stack([x[:-1], x[1:]]))[0, 1]) < 5 / math.sqrt(n)
    counts = torch.histc(x, 64, 0, 1)
    assert ((counts - n / 64) ** 2 / (n / 64)).sum() < 63 + 5 * math.sqrt(2 * 63)


def test_a_dtype_that_would_round_to_one_is_refused():
    with pytest.raises(ValueError, match="bfloat16"):
        uniform(KEY, torch.arange(2), torch.bfloat16)
    with pytest.raises(ValueError, match="float16"):
        uniform_block(KEY, (2,), (0,), (2,), torch.float16)


def test_global_index_is_row_major_in_the_whole_tensor():
    assert global_index((3, 5), (1, 2), (2, 3)).tolist() == [[7, 8, 9], [12, 13, 14]]
    assert global_index((), (), ()).item() == 0
    assert global_index((3, 5), (3, 0), (0, 5)).shape == (0, 5)


BLOCKS = [
    ((7, 5, 6), (2, 1, 3), (4, 3, 2)),  # runs of 2 of 6: not aligned to Philox blocks
    ((7, 5, 8), (2, 1, 3), (4, 3, 5)),  # rows of 8: all aligned alike
    ((7, 5, 6), (0, 2, 0), (7, 3, 6)),  # cut in the middle: runs of 18 of 30
    ((7, 5, 3), (3, 0, 0), (4, 5, 3)),  # cut on dim 0: one run, beginning at word 1 of a block
    ((7, 5, 6), (0, 0, 0), (7, 5, 6)),
    ((7, 5, 6), (7, 0, 0), (0, 5, 6)),
    ((11,), (6,), (5,)),
    ((4, 1, 3), (1, 0, 1), (2, 1, 1)),
    ((), (), ()),
]


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_block_holds_the_values_of_its_elements(block, dtype):
    got = uniform_block(KEY, *block, dtype)
    assert got.dtype == dtype
    assert torch.equal(got, uniform(KEY, global_index(*block), dtype))


@pytest.mark.parametrize("block", BLOCKS)
def test_a_mask_drops_where_uniform_is_below_p(block):
    assert torch.equal(keep_mask(KEY, *block, p=0.3), uniform(KEY, global_index(*block)) >= 0.3)


@pytest.mark.parametrize("cuts", list(itertools.product([1, 2, 3], [1, 2], [1, 4])))
def test_shards_of_any_cut_are_slices_of_the_one_device_mask(cuts):
    shape = (6, 5, 7)
    whole = keep_mask(KEY, shape, (0, 0, 0), shape, 0.4)
    steps = [-(-size // n) for size, n in zip(shape, cuts, strict=True)]
    for at in itertools.product(*(range(n) for n in cuts)):
        offsets = tuple(min(i * step, size) for i, step, size in zip(at, steps, shape, strict=True))
        local = tuple(min(step, size - o) for o, step, size in zip(offsets, steps, shape, strict=True))
        where = tuple(slice(o, o + n) for o, n in zip(offsets, local, strict=True))
        assert torch.equal(keep_mask(KEY, shape, offsets, local, 0.4), whole[where])


def test_shards_do_not_repeat_each_other():
    halves = [keep_mask(KEY, (64, 64), (0, at), (64, 32), 0.5) for at in (0, 32)]
    assert 0.4 < (halves[0] == halves[1]).double().mean() < 0.6


@pytest.mark.parametrize(("p", "rate"), [(0.0, 1.0), (1.0, 0.0), (0.25, 0.75)])
def test_the_kept_share_is_one_minus_p(p, rate):
    kept = keep_mask(KEY, (200, 200), (0, 0), (200, 200), p).double().mean()
    assert abs(kept - rate) <= 5 * math.sqrt(p * (1 - p) / 40_000)


def test_wrong_probabilities_and_blocks_are_refused():
    with pytest.raises(PlanError) as error:
        keep_mask(KEY, (4,), (0,), (4,), 1.5)
    assert error.value.code == "bad-dropout"
    for block in [((4,), (2,), (3,)), ((4,), (-1,), (2,)), ((4, 4), (0,), (4,))]:
        with pytest.raises(PlanError) as error:
            global_index(*block)
        assert error.value.code == "block-outside"


def test_keys_are_stable_and_tell_names_apart():
    # blake2b-64 of "int:0\0str:embed.weight", shifted right by one: must never change, or runs stop reproducing.
    assert stream_key(0, "embed.weight") == 0x47AA624F94A00EFD
    keys = {stream_key(*names) for names in [(0, "a", "bc"), (0, "ab", "c"), (0, "abc"), (1, "abc"), (0, "1"), (0, 1)]}
    assert len(keys) == 6
    assert all(0 <= key < 2**63 for key in keys)


def test_the_mask_compiles_whole_and_a_new_key_compiles_nothing():
    compiled = torch.compile(keep_mask, fullgraph=True, backend="aot_eager")
    block = ((9, 12, 10), (0, 3, 0), (9, 5, 10))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for key in (KEY, KEY + 1):
        assert torch.equal(compiled(torch.tensor(key), *block, 0.3), keep_mask(key, *block, 0.3))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
