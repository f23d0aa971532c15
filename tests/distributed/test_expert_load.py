"""The load report of a step: every choice of every token once, under any layout of tokens, and as one device counts."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

import meshplan as mp
from tests.distributed.moe import EXPERTS
from tests.distributed.test_experts import PLANS, batch, made

CASES = [
    "ep 2 of tp, tokens whole", "ep 2 x etp 2, tokens whole", "ep 2 x etp 2 + sp",
    "ep 2 of dp_shard 4, zero2, once per expert", "ep 4 of dp_shard 2 and cp 2, recomputed", "ep 4 by two levels, a node of 2",
]  # fmt: skip


def chosen(model: nn.Module, given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """How often each expert of each module is chosen on one device."""
    found: dict[str, torch.Tensor] = {}

    def see(path: str, module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        found[path] = args[1].flatten().bincount(minlength=EXPERTS)

    for path, module in model.named_modules():
        if path.endswith("experts"):
            module.register_forward_pre_hook(functools.partial(see, path))
    model(**given)
    return found


def _steps(given: mp.Plan) -> tuple[dict[str, Any], str, str]:
    model = mp.parallelize(made(), given)
    first, second = (mp.shard_batch(model, batch(seed=seed)) for seed in (3, 4))
    model(**first).backward()  # nobody counts
    with mp.expert_load() as load:
        for local in (first, second):
            model(**local).backward()
    return load.to_json(), str(load), str(load["layers.0.experts"])


@pytest.mark.parametrize("case", CASES)
def test_the_load_of_two_steps_counts_every_choice_once(pool, case):
    given = PLANS[case]
    one, other = (chosen(made(), batch(seed=seed)) for seed in (3, 4))
    want = {path: one[path] + other[path] for path in one}
    assert len(want) > 1 and len(set(want["layers.0.experts"].tolist())) > 1
    n = functools.reduce(int.__mul__, given.mesh.values())
    for found, text, table in pool.run(_steps, given, world=n):
        assert {path: load["experts"] for path, load in found.items()} == {path: c.tolist() for path, c in want.items()}
        for path, load in found.items():
            by_rank = want[path].view(given.experts.ep, -1).sum(1)
            assert load["by_rank"] == by_rank.tolist()
            assert load["imbalance"] == pytest.approx((by_rank.max() / by_rank.double().mean()).item())
            assert f"{path} " in text and f"{load['imbalance']:.2f}" in text
        assert all(f" {count} " in table for count in want["layers.0.experts"].tolist())
