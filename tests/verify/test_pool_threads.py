"""A rank of the pool does not grow threads: every call's process groups are gone when it is over."""

from __future__ import annotations

from pathlib import Path

import torch

import meshplan as mp
from meshplan.models.llama import Llama, LlamaConfig


def train_once() -> int:
    model = Llama(LlamaConfig(dim=8, n_layers=1, n_heads=2, n_kv_heads=2, ffn_dim=8, vocab_size=8))
    item = mp.Input(shape=(2, 4), dtype=torch.int64, place={"dp": mp.S(0)})
    plan = mp.Plan(
        mesh={"dp_shard": 2, "tp": 1},
        inputs={"tokens": item, "labels": item},
        rules=[],
        fsdp=mp.Fsdp(units=["layers.*"]),
    )
    model = mp.parallelize(model, plan)
    batch = mp.shard_batch(model, {k: torch.arange(8).view(2, 4) for k in ("tokens", "labels")})
    model(**batch).backward()
    return threads()


def threads() -> int:
    status = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in status if line.startswith("Threads:")))


def test_threads_do_not_add_up_over_calls(pool):
    for _ in range(2):  # the first calls start threads that stay: autograd's, the store's
        first = pool.run(train_once, world=2)
    for _ in range(4):
        last = pool.run(train_once, world=2)
    assert all(b <= a for a, b in zip(first, last, strict=True)), (first, last)
    idle = pool.run(threads, world=2)
    assert all(n < busy for n, busy in zip(idle, last, strict=True)), (idle, last)
