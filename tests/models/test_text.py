"""The standard library as data: the same bytes and windows each time, labels one byte on, splits apart."""

import sysconfig
from pathlib import Path

import pytest
import torch

from meshplan.errors import PlanError
from meshplan.models.text import batches, stdlib_bytes


def test_bytes_are_the_sources_in_sorted_order():
    first = min(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"), key=lambda path: path.name)
    want = first.read_bytes()[:200]
    got = stdlib_bytes(4096)
    assert got.dtype == torch.uint8 and got.shape == (4096,)
    assert bytes(got[: len(want)].tolist()) == want
    assert torch.equal(stdlib_bytes(10_000)[:4096], got)


def test_a_label_is_the_byte_after_its_token_and_windows_repeat_with_the_seed():
    a, b = (list(batches(13, 3, 4, seed=5)) for _ in range(2))
    other = next(batches(13, 3, 4, seed=6))
    assert len(a) == 4
    text = bytes(stdlib_bytes().tolist())
    for x, y in zip(a, b, strict=True):
        assert torch.equal(x["tokens"], y["tokens"]) and torch.equal(x["labels"], y["labels"])
        assert x["tokens"].shape == (3, 13) and x["tokens"].dtype == torch.int64
        assert torch.equal(x["tokens"][:, 1:], x["labels"][:, :-1])
        for row, last in zip(x["tokens"], x["labels"][:, -1], strict=True):
            assert bytes([*row.tolist(), last.item()]) in text
    assert not torch.equal(a[0]["tokens"], other["tokens"])


def test_splits_do_not_overlap_and_every_window_is_reachable():
    # 40 bytes: 36 for training, 4 for validation, whose only window of 3 + 1 bytes is all of it.
    text = stdlib_bytes(40).long()
    valid = next(batches(3, 5, 1, split="valid", limit=40))
    assert torch.equal(valid["tokens"], text[36:39].expand(5, 3))
    assert torch.equal(valid["labels"], text[37:40].expand(5, 3))
    train = next(batches(34, 64, 1, limit=40))
    starts = {tuple(row.tolist()) for row in train["tokens"]}
    assert starts == {tuple(text[i : i + 34].tolist()) for i in (0, 1)}


def test_drawing_windows_leaves_the_default_generator_alone():
    before = torch.get_rng_state()
    next(batches(3, 2, 1))
    assert torch.equal(before, torch.get_rng_state())


def test_a_window_longer_than_the_split_and_an_unknown_split_are_refused_at_the_call():
    with pytest.raises(PlanError) as error:
        batches(4, 1, 1, split="valid", limit=40)
    assert error.value.code == "text-too-short"
    with pytest.raises(PlanError) as error:
        batches(4, 1, 1, split="test")
    assert error.value.code == "bad-split" and error.value.legal == ["train", "valid"]
