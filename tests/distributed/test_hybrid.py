"""Attention, state space and recurrence on ranks: split by heads and channels over tp, by sequence over cp."""

import functools

import torch

import meshplan as mp
from meshplan.models.hybrid import hybrid
from tests.models.patterns import TP

AMR = functools.partial(hybrid, "AMR", vocab_size=61)
TOKENS = mp.Input(shape=(2, 24), dtype=torch.int64, place={"dp": mp.S(0), "cp": mp.S(1)})
PLAN = mp.Plan(
    mesh={"cp": 2, "tp": 2},
    inputs={"tokens": TOKENS, "labels": TOKENS},
    rules=[rule for letter in "AMR" for rule in TP[letter]],
    context={"attention": ["layers.*.attention"], "method": "ring", "balance": "zigzag"},
    fsdp={"units": ["layers.*"]},
)


def test_three_steps_are_those_of_one_device(pool):
    receipt = mp.verify(AMR, PLAN, nproc=4, steps=3)
    assert receipt.passed, str(receipt)
