"""All operators on two gloo ranks: eager and compiled as one device, sending what shape-only groups are told."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from meshplan import compat
from meshplan.ops.cross_entropy import cross_entropy
from meshplan.ops.dropout import dropout
from meshplan.ops.embedding import embedding
from meshplan.ops.norm import layer_norm, rms_norm
from meshplan.ops.token_mean import token_mean
from meshplan.runtime.comm import AxisGroup, chunk_sizes
from meshplan.runtime.recorder import record_collectives

VOCAB, WIDTH, TOKENS = 7, 5, 6
EXACT = {"rtol": 1e-13, "atol": 1e-14}


def parameters(dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    shapes = {"table": (VOCAB, WIDTH), "rms": (WIDTH,), "ln": (WIDTH,), "bias": (WIDTH,), "head": (VOCAB, WIDTH)}
    return {name: torch.randn(shape, generator=draw, dtype=dtype) for name, shape in shapes.items()}


IDS = torch.tensor([0, 6, 3, 4, 2, 6])
TARGET = torch.tensor([1, -100, 6, 4, 0, 3])


def one_device(p: dict[str, Tensor]) -> Tensor:
    x = F.embedding(IDS, p["table"], padding_idx=6)
    x = F.rms_norm(x, (WIDTH,), p["rms"], 1e-5)
    x = F.layer_norm(x, (WIDTH,), p["ln"], p["bias"])
    x = dropout(x, 0.2, True, key=5, global_shape=(TOKENS, WIDTH), offsets=(0, 0))
    loss = F.cross_entropy(x @ p["head"].T, TARGET, label_smoothing=0.1)
    return loss + (x.square().sum(-1) * (TARGET >= 0)).sum() / (TARGET >= 0).sum()


class _Enter(torch.autograd.Function):
    """R -> S on the last dim and back: the hidden state is split for the norms and whole for the head."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: AxisGroup) -> Tensor:
        ctx.group = group
        return group.reduce_scatter(x, 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.group.all_gather(grad, 1, WIDTH), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: AxisGroup) -> Tensor:
        ctx.group = group
        return group.all_gather(x, 1, WIDTH)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.group.reduce_scatter(grad, 1), None


def split(p: dict[str, Tensor], key: Tensor, ids: Tensor, target: Tensor, group: AxisGroup) -> Tensor:
    """The same program with vocabulary and width split on `group`. The square term is this rank's columns' summand: its
    gradient is right as it is, its value is not the global one."""
    x = _Enter.apply(embedding(ids, p["table"], group=group, vocab_size=VOCAB, padding_idx=6), group)
    x = rms_norm(x, (WIDTH,), p["rms"], 1e-5, group=group)
    x = layer_norm(x, (WIDTH,), p["ln"], p["bias"], group=group)
    start = group.rank * chunk_sizes(WIDTH, group.size)[0]
    x = dropout(x, 0.2, True, key=key, global_shape=(TOKENS, WIDTH), offsets=(0, start))
    squares = token_mean(x.square().sum(-1), target >= 0, groups=[])
    whole = _Leave.apply(x, group)
    loss = cross_entropy(whole @ p["head"].T, target, vocab_group=group, vocab_size=VOCAB, label_smoothing=0.1)
    return loss + squares


def shards(group: AxisGroup) -> dict[str, Tensor]:
    return {name: group.shard(x, 0).clone().requires_grad_() for name, x in parameters().items()}


def _on_a_rank(compiled: bool) -> tuple[dict[str, Tensor], list[tuple[str, str, int]]]:
    group = AxisGroup("tp", 2, dist.get_rank(), dist.group.WORLD.group_name)
    p = shards(group)
    if compiled:
        # Not recorded: torch refuses to compile under a dispatch mode.
        torch.compile(split, fullgraph=True, backend="aot_eager")(p, torch.tensor(5), IDS, TARGET, group).backward()
        return {name: x.grad for name, x in p.items()}, []
    with record_collectives() as log:
        split(p, torch.tensor(5), IDS, TARGET, group).backward()
    return {name: x.grad for name, x in p.items()}, [(c.phase, c.op, c.elements) for c in log]


def _told_to_an_abstract_group() -> list[tuple[str, str, int]]:
    told: list[tuple[str, str, int]] = []

    def on_call(op: str, group: AxisGroup, x: Tensor) -> None:
        told.append(("backward" if compat.in_backward() else "forward", op, x.numel()))

    with compat.fake_tensor_mode():
        group = AxisGroup("tp", 2, 1, on_call=on_call)
        p = {name: torch.empty(x.shape, dtype=x.dtype, requires_grad=True) for name, x in shards(group).items()}
        key, ids = torch.empty((), dtype=torch.int64), torch.empty(TOKENS, dtype=torch.int64)
        split(p, key, ids, ids.clone(), group).backward()
    assert all(x.grad is not None and x.grad.shape == x.shape for x in p.values())
    return told


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_gradients_are_those_of_one_device(pool, compiled):
    reference = {name: x.requires_grad_() for name, x in parameters().items()}
    one_device(reference).backward()
    ranks = pool.run(_on_a_rank, compiled, world=2)
    for name, x in reference.items():
        gathered = torch.cat([grads[name] for grads, _ in ranks])
        torch.testing.assert_close(gathered, x.grad, **EXACT, msg=lambda m, name=name: f"{name}: {m}")


def test_ranks_send_what_shape_only_groups_are_told(pool):
    announced = _told_to_an_abstract_group()
    assert ("forward", "all_reduce", 3 * TOKENS) in announced  # the loss, with label smoothing
    assert ("backward", "all_reduce", 2 * TOKENS) in announced  # layer norm
    for _, log in pool.run(_on_a_rank, False, world=2):
        assert log == announced
