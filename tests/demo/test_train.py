"""The two training loops of the demo: one schedule, one seed, the same text, and honest times."""

from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest
import torch

from meshplan.demo.cases import BATCH, SEQ_LEN, own_llama
from meshplan.demo.train import Trained, train_alone, train_on_rank

CASE = replace(own_llama(), model="llama-tiny")  # the same module names under the same plan, in a tenth of the time
STEPS = 5


def test_the_first_step_times_are_left_out_and_the_median_counts():
    # Steps end at 9, 19, 20, 22, 23, 124: after three steps of warming up the rest take 2, 1 and 101 seconds.
    one = Trained(losses=(0.0,) * 6, ended=(9.0, 19.0, 20.0, 22.0, 23.0, 124.0))
    assert one.tokens_per_second == BATCH * SEQ_LEN / 2


def test_one_device_reports_every_step_and_learns(tmp_path):
    progress = tmp_path / "progress"
    trained = train_alone(CASE, STEPS, 3, progress)
    assert [float(line) for line in progress.read_text().split()] == pytest.approx(trained.losses, abs=1e-6)
    assert len(trained.losses) == len(trained.ended) == STEPS
    assert trained.losses[-1] < trained.losses[0]
    assert list(trained.ended) == sorted(trained.ended)
    # Another seed is another start and other text.
    assert trained.losses != train_alone(CASE, STEPS, 4, progress).losses


def test_four_ranks_follow_one_device(pool, tmp_path):
    alone = train_alone(CASE, STEPS, 3, tmp_path / "alone")
    ranks = pool.run(train_on_rank, CASE, STEPS, 3, tmp_path / "ranks", timeout=250)
    mean = [fmean(step) for step in zip(*(one.losses for one in ranks), strict=True)]
    # float32, and a sum in another order: a few units in the last place, grown over five steps of AdamW.
    assert mean == pytest.approx(alone.losses, abs=2e-5)
    # The ranks of one data group hold different text, so the mean is not what each of them has.
    assert len({one.losses for one in ranks}) == 2
    assert len(Path(tmp_path / "ranks").read_text().split()) == STEPS


def test_the_text_of_a_step_is_the_same_bytes_shifted_by_one():
    batch = next(CASE.batches(1, 0))
    assert {name: (tuple(x.shape), x.dtype) for name, x in batch.items()} == dict.fromkeys(
        ("tokens", "labels"), ((BATCH, SEQ_LEN), torch.int64)
    )
    assert torch.equal(batch["tokens"][:, 1:], batch["labels"][:, :-1])
