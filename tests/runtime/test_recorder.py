"""Every way torch issues a collective is recorded once, with the full tensor's size, the group and the phase."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.utils.checkpoint import checkpoint

from meshplan.runtime.comm import AxisGroup
from meshplan.runtime.recorder import record_collectives, wire_bytes


def _brief(log) -> list[tuple]:
    return [(c.op, c.ranks, c.elements, c.dtype) for c in log]


def _phases(log) -> list[tuple]:
    return [(c.phase, c.op, c.elements) for c in log]


def _eager() -> list[tuple]:
    x, n = torch.ones(3, dtype=torch.float64), dist.get_world_size()
    with record_collectives() as log:
        dist.all_gather_into_tensor(torch.empty(3 * n, dtype=torch.float64), x)
        dist.all_gather([torch.empty(3, dtype=torch.float64) for _ in range(n)], x)
        dist.reduce_scatter_tensor(torch.empty(2), torch.ones(2 * n))
        dist.reduce_scatter(torch.empty(5), [torch.ones(5) for _ in range(n)])
        dist.all_reduce(x)
        dist.all_reduce(x, async_op=True).wait()
        dist.broadcast(torch.ones(7, dtype=torch.int64), 0)
        dist.all_to_all_single(torch.empty(4 * n), torch.ones(4 * n))
        dist.reduce(torch.ones(11), 0)
        dist.gather(torch.ones(2), [torch.empty(2) for _ in range(n)] if dist.get_rank() == 0 else None, 0)
        dist.scatter(torch.empty(2), [torch.ones(2) for _ in range(n)] if dist.get_rank() == 0 else None, 0)
        dist.barrier()
    return _brief(log)


def test_eager_collectives(pool):
    world = (0, 1, 2)
    expected = [
        ("all_gather", world, 9, "float64"),
        ("all_gather", world, 9, "float64"),
        ("reduce_scatter", world, 6, "float32"),
        ("reduce_scatter", world, 15, "float32"),
        ("all_reduce", world, 3, "float64"),
        ("all_reduce", world, 3, "float64"),
        ("broadcast", world, 7, "int64"),
        ("all_to_all", world, 12, "float32"),
        ("reduce", world, 11, "float32"),
        ("gather", world, 6, "float32"),
        ("scatter", world, 6, "float32"),
    ]
    assert pool.run(_eager, world=3) == [expected] * 3


def _uneven() -> tuple[list[tuple], list[int]]:
    rank = dist.get_rank()
    sizes = [[1, 2], [4, 0]]  # rank r sends sizes[r][j] to rank j
    with record_collectives() as log:
        dist.all_to_all_single(
            torch.empty(sizes[0][rank] + sizes[1][rank]),
            torch.ones(sum(sizes[rank])),
            [sizes[0][rank], sizes[1][rank]],
            sizes[rank],
        )
        dist.all_to_all([torch.empty(5), torch.empty(5)], [torch.ones(5), torch.ones(5)])
        dist.all_to_all_single(torch.empty(6), torch.ones(6))
    return _brief(log), [c.wire_bytes for c in log]


def test_all_to_all_counts_what_this_rank_puts_in_and_sends_all_but_what_stays(pool):
    put = [[("all_to_all", (0, 1), total, "float32") for total in (uneven, 10, 6)] for uneven in (3, 4)]
    sent = [[4 * 2, 4 * 5, 4 * 3], [4 * 4, 4 * 5, 4 * 3]]
    assert pool.run(_uneven, world=2) == list(zip(put, sent, strict=True))


def _point_to_point() -> list[tuple]:
    x, rank = torch.ones(5, dtype=torch.bfloat16), dist.get_rank()
    with record_collectives() as log:
        dist.send(x, 1) if rank == 0 else dist.recv(x, 0)
        dist.isend(x, 1).wait() if rank == 0 else dist.irecv(x, 0).wait()
        ops = [dist.P2POp(dist.isend, x, 1 - rank), dist.P2POp(dist.irecv, torch.empty_like(x), 1 - rank)]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
    return [(c.op, c.elements, c.bytes, c.wire_bytes) for c in log]


def test_point_to_point(pool):
    send, recv = ("send", 5, 10, 10), ("recv", 5, 10, 0)
    assert pool.run(_point_to_point, world=2) == [[send, send, send, recv], [recv, recv, send, recv]]


def _coalesced() -> list[tuple]:
    a, b, world = torch.ones(3), torch.ones(2, 2), dist.group.WORLD
    with record_collectives() as log:
        dist.all_reduce_coalesced([a, b])
        for y in funcol.all_gather_into_tensor_coalesced([a, b.double()], world):
            y.sum()
        for y in funcol.reduce_scatter_tensor_coalesced([torch.ones(4), torch.ones(6)], "sum", [0, 0], world):
            y.sum()
        for y in funcol.all_reduce_coalesced([a, b], "sum", world):
            y.sum()
    return [(c.op, c.elements, c.dtype) for c in log]


def test_a_coalesced_call_is_one_entry_a_dtype(pool):
    expected = [
        ("all_reduce", 7, "float32"),
        ("all_gather", 6, "float32"),
        ("all_gather", 8, "float64"),
        ("reduce_scatter", 10, "float32"),
        ("all_reduce", 7, "float32"),
    ]
    assert pool.run(_coalesced, world=2) == [expected] * 2


def _functional() -> list[tuple]:
    x = torch.ones(4, 3, dtype=torch.float64)
    ops, name = torch.ops._c10d_functional, dist.group.WORLD.group_name
    with record_collectives() as log:
        (funcol.all_gather_tensor(x, 0, dist.group.WORLD) + 1).sum()  # the wait happens inside an operator
        funcol.reduce_scatter_tensor(x, "sum", 0, dist.group.WORLD).sum()
        funcol.all_reduce(x, "sum", dist.group.WORLD).sum()
        funcol.broadcast(x, 0, dist.group.WORLD).sum()
        funcol.all_to_all_single(x, None, None, dist.group.WORLD).sum()
        ops.wait_tensor(ops.all_reduce_(x.clone(), "sum", name))
    return _brief(log)


def test_functional_collectives_are_recorded_once(pool):
    kinds = [("all_gather", 24), ("reduce_scatter", 12), ("all_reduce", 12), ("broadcast", 12), ("all_to_all", 12)]
    expected = [(op, (0, 1), elements, "float64") for op, elements in [*kinds, ("all_reduce", 12)]]
    assert pool.run(_functional, world=2) == [expected] * 2


def _autograd() -> list[tuple]:
    x = torch.ones(4, 3, requires_grad=True)
    with record_collectives() as log:
        y = funcol.all_gather_tensor_autograd(x, 0, dist.group.WORLD)
        z = funcol.reduce_scatter_tensor_autograd(y * 2, "sum", 0, dist.group.WORLD)
        (z * 3).sum().backward()
    return _phases(log)


def test_the_backward_of_differentiable_collectives_is_in_the_backward_phase(pool):
    expected = [
        ("forward", "all_gather", 24),
        ("forward", "reduce_scatter", 24),
        ("backward", "all_gather", 24),
        ("backward", "reduce_scatter", 24),
    ]
    assert pool.run(_autograd, world=2) == [expected] * 2


def _dtensor() -> list[tuple]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    axes = {tuple(sorted(mesh[name].mesh.tolist())): name for name in ("dp", "tp")}
    x = DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0), Partial()])
    with record_collectives(axes.get) as log:
        y = x.redistribute(placements=[Shard(0), Replicate()])
        y.redistribute(placements=[Replicate(), Replicate()])
        x.redistribute(placements=[Shard(0), Shard(0)])
    return [(c.op, c.axis, c.ranks, c.elements) for c in log]


def test_collectives_beneath_dtensor_carry_their_axis(pool):
    results = pool.run(_dtensor)
    for rank, log in enumerate(results):
        dp, tp = (rank % 2, rank % 2 + 2), (rank // 2 * 2, rank // 2 * 2 + 1)
        assert log == [("all_reduce", "tp", tp, 6), ("all_gather", "dp", dp, 12), ("reduce_scatter", "tp", tp, 6)]


def _axis_group() -> list[tuple]:
    group = AxisGroup("tp", 2, dist.get_rank(), dist.group.WORLD.group_name)
    with record_collectives() as log:
        group.all_gather(torch.ones(3 - group.rank, 2), 0, size=5)
        group.reduce_scatter(torch.ones(2, 5), 1)
        group.all_reduce(torch.ones(5))
    return [(c.op, c.elements) for c in log]


def test_padding_on_the_wire_is_counted(pool):
    assert pool.run(_axis_group, world=2) == [[("all_gather", 12), ("reduce_scatter", 12), ("all_reduce", 5)]] * 2


class _Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(5, 7), nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


def _fsdp(kind: str) -> list[tuple]:
    shape, names = ((2, 2), ("dp_replicate", "dp_shard")) if kind == "hsdp" else ((2,), ("dp_shard",))
    options = {"mesh": init_device_mesh("cpu", shape, mesh_dim_names=names)}
    if kind == "mixed":
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if kind == "offload":
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    model = _Mlp().double()
    for module in (model.up, model.down, model):
        fully_shard(module, **options)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    x = torch.ones(2, 5, dtype=torch.float64)
    with record_collectives() as log:
        model(x).square().sum().backward()
        log.phase("optimizer")
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        log.phase(None)
        optimizer.zero_grad()
        model(x)
    return [(c.phase, c.op, c.ranks, c.elements, c.dtype) for c in log]


# fully_shard pads dim 0: up is 8 x 5 + 8 = 48 elements on 2 ranks, down 4 x 7 + 4 = 32.
UP, DOWN = 48, 32


def _expected_fsdp(ranks, gathered="float64", reduced="float64", replicas=None):
    forward = [("forward", "all_gather", ranks, n, gathered) for n in (UP, DOWN)]
    backward = [("backward", "all_gather", ranks, n, gathered) for n in (DOWN, UP)]
    for n in (DOWN, UP):
        backward.append(("backward", "reduce_scatter", ranks, n, reduced))
        if replicas:
            backward.append(("backward", "all_reduce", replicas, n // 2, reduced))
    return forward + backward


@pytest.mark.parametrize("kind", ["plain", "mixed", "offload"])
def test_fully_shard_is_seen_in_forward_backward_and_optimizer(pool, kind):
    wire = {"mixed": ("bfloat16", "float32")}.get(kind, ("float64", "float64"))
    step = _expected_fsdp((0, 1), *wire)
    # Clipping reduces the partial norms of the 4 sharded parameters, stacked.
    clip = [("optimizer", "all_reduce", (0, 1), 4, "float64")]
    assert pool.run(_fsdp, kind, world=2) == [step + clip + step[:2]] * 2


def test_hybrid_sharding_all_reduces_shards_over_the_replicas(pool):
    for rank, log in enumerate(pool.run(_fsdp, "hsdp")):
        shard, replicas = (rank // 2 * 2, rank // 2 * 2 + 1), (rank % 2, rank % 2 + 2)
        expected = _expected_fsdp(shard, replicas=replicas)
        assert log[: len(expected)] == expected


class _GatherOnce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return AxisGroup("tp", 2, dist.get_rank(), dist.group.WORLD.group_name).all_gather(x, 0)

    @staticmethod
    def backward(ctx, grad):
        return AxisGroup("tp", 2, dist.get_rank(), dist.group.WORLD.group_name).reduce_scatter(grad, 0)


def _recompute_and_hooks() -> list[tuple]:
    x = torch.ones(3, 2, requires_grad=True)
    x.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad))
    x_seen = x * 1.0
    x_seen.register_hook(
        lambda g: torch.autograd.Variable._execution_engine.queue_callback(lambda: dist.broadcast(torch.ones(1), 0))
    )
    with record_collectives() as log:
        y = checkpoint(lambda v: _GatherOnce.apply(v).exp(), x_seen, use_reentrant=False)
        y.sum().backward()
        dist.all_reduce(torch.ones(2))
    return _phases(log)


def test_recompute_hooks_and_engine_callbacks_belong_to_the_backward(pool):
    expected = [
        ("forward", "all_gather", 12),
        ("backward", "all_gather", 12),
        ("backward", "reduce_scatter", 12),
        ("backward", "all_reduce", 6),
        ("backward", "broadcast", 1),
        ("forward", "all_reduce", 2),
    ]
    assert pool.run(_recompute_and_hooks, world=2) == [expected] * 2


def _sequence_numbers() -> tuple:
    with record_collectives() as log:
        for n in (1, 2, 3):
            dist.all_reduce(torch.ones(n))
    dist.all_reduce(torch.ones(9))  # outside
    return [c.sequence for c in log], log[1].to_json(), len(log)


def test_entries_are_numbered_and_become_json(pool):
    entry = {
        "sequence": 1, "phase": "forward", "op": "all_reduce", "ranks": [0], "axis": None,
        "dtype": "float32", "elements": 2, "bytes": 8, "wire_bytes": 0,
    }  # fmt: skip
    assert pool.run(_sequence_numbers, world=1) == [([0, 1, 2], entry, 3)]


@pytest.mark.parametrize(
    ("op", "n", "expected"),
    [
        ("all_gather", 4, 300),  # three of four chunks are passed on
        ("reduce_scatter", 4, 300),
        ("all_reduce", 4, 600),  # the two in a row
        ("all_to_all", 4, 300),  # all but the chunk that stays
        ("broadcast", 4, 400),
        ("send", 2, 400),
        ("recv", 2, 0),
        ("all_reduce", 1, 0),
    ],
)
def test_wire_bytes_of_a_ring(op, n, expected):
    assert wire_bytes(op, 400, n) == expected
