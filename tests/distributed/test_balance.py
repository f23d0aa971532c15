"""A model's own balance loss over the whole batch: that of one device on any ranks; under accumulation, of each microbatch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import meshplan as mp
from tests.distributed.moe import EXPERTS, VOCAB, WIDTH, Experts
from tests.distributed.test_experts import adamw, batch, plan
from tests.distributed.training import apart, on_this_rank, one_device


class Model(nn.Module):
    """E sum_e f_e P_e (Switch Transformers, 2101.03961, equation 4) beside the loss: no mean over tokens, so that two halves of a
    batch do not have the mean of it."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.router, self.experts = nn.Linear(WIDTH, EXPERTS, bias=False), Experts(EXPERTS, WIDTH, 10)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(tokens)
        flat = x.flatten(0, 1)
        scores = self.router(flat).softmax(-1)
        weights, chosen = scores.topk(2, -1)
        x = x + self.experts(flat, chosen, weights).view_as(x)
        often = F.one_hot(chosen, EXPERTS).sum(1).to(scores.dtype).mean(0)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten()) + 0.5 * EXPERTS * (often * scores.mean(0)).sum()


def made() -> nn.Module:
    torch.manual_seed(7)
    return Model()


GIVEN = plan({"dp_shard": 2}, experts={"at": ["experts"], "ep": 2}, fsdp={"units": ["experts"]})


def test_it_is_over_the_batch_of_all_ranks(pool):
    receipt = mp.verify(made, GIVEN, nproc=2, inputs=batch, steps=2, optimizer=adamw)
    assert receipt.passed, str(receipt)


def test_two_microbatches_are_no_larger_batch(pool):
    halves = [[batch(seed=1), batch(seed=2)]]
    want = one_device(made, halves, adamw, clip=1e9)
    for rank in pool.run(on_this_rank, made, GIVEN, halves, adamw, clip=1e9, world=2):
        assert apart(rank.gradients, want.gradients) < 1e-9
    joined = {name: torch.cat([half[name] for half in halves[0]]) for name in halves[0][0]}
    assert apart(one_device(made, [[joined]], adamw, clip=1e9).gradients, want.gradients) > 1e-3
