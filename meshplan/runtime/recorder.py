"""Records, in program order, every collective that a rank really issues: eager, functional, FSDP2's and DTensor's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from meshplan import compat

AxisNames = Callable[[tuple[int, ...]], str | None]


@dataclass(frozen=True)
class Collective:
    """One collective call as this rank issued it.

    Attributes:
        sequence: 0-based position in the program of this rank.
        phase: forward, backward or optimizer.
        op: all_gather, reduce_scatter, all_reduce, all_to_all, broadcast, send, recv, peer_pull, peer_push; also reduce,
            gather, scatter.
        ranks: global ranks of the process group, in group order.
        axis: what `device_mesh_names` calls these ranks, or None.
        dtype: torch's bare name, such as "float64".
        elements: of the full tensor, padding included: the gathered or unreduced side; for all_to_all what this
            rank puts in.
        bytes: the same in bytes.
        stays: of an all_to_all with sizes, bytes for this rank itself; else None.
    """

    sequence: int
    phase: str
    op: str
    ranks: tuple[int, ...]
    axis: str | None
    dtype: str
    elements: int
    bytes: int
    stays: int | None = None

    @property
    def wire_bytes(self) -> int:
        """Bytes this rank sends: all but what stays, or under the ring algorithm; see `wire_bytes`."""
        if self.stays is not None:
            return self.bytes - self.stays
        return wire_bytes(self.op, self.bytes, len(self.ranks))

    def to_json(self) -> dict[str, Any]:
        """The fields and `wire_bytes`, as JSON values."""
        fields = {**asdict(self), "ranks": list(self.ranks), "wire_bytes": self.wire_bytes}
        del fields["stays"]
        return fields


def wire_bytes(op: str, nbytes: int, n: int) -> int:
    """Bytes one of `n` ranks sends for `op` on a full tensor of `nbytes`, rounded down.

    Ring algorithms (Thakur, Rabenseifner, Gropp, "Optimization of collective communication operations in MPICH", 2005):
    all_gather and reduce_scatter pass n - 1 of n chunks on, all_reduce is the two in a row. all_to_all keeps one of n
    chunks. A pipelined broadcast (and reduce) passes all of it on once. recv sends nothing. For each message that a rank pulls
    from a peer, a peer pulls one from it.
    """
    if n == 1 or op == "recv":
        return 0
    if op in ("send", "broadcast", "reduce", "peer_pull", "peer_push"):
        return nbytes
    return (2 if op == "all_reduce" else 1) * (n - 1) * nbytes // n


class CollectiveLog(Sequence[Collective]):
    """The collectives recorded so far; grows while its `record_collectives` block is open."""

    def __init__(self, names: AxisNames | None = None) -> None:
        self._names = names
        self._phase: str | None = None
        self._entries: list[Collective] = []

    def phase(self, name: str | None) -> None:
        """Call what follows `name`. None, the initial state, means "backward" inside the autograd engine (also for a
        forward that is recomputed there) and "forward" outside."""
        self._phase = name

    def __getitem__(self, index: Any) -> Any:
        return self._entries[index]

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Collective]:
        return iter(tuple(self._entries))

    def _add(
        self, op: str, group: object, tensors: Sequence[Tensor], shard: bool = False, sizes: Sequence[int] = ()
    ) -> None:
        """`tensors` together are the full tensor, or with `shard` one of `n` equal shards of it; `sizes` are the rows of it for
        each rank, where they were given."""
        ranks = tuple(dist.get_process_group_ranks(group))  # type: ignore[arg-type]
        phase = self._phase or ("backward" if compat.in_backward() else "forward")
        axis = self._names(ranks) if self._names else None
        # A coalesced call may mix dtypes; it is one entry for each of them.
        for dtype in dict.fromkeys(t.dtype for t in tensors):
            elements = sum(t.numel() for t in tensors if t.dtype == dtype) * (len(ranks) if shard else 1)
            bare = str(dtype).removeprefix("torch.")
            size = elements * dtype.itemsize
            rows, own = sum(sizes), sizes[dist.get_rank(group)] if sizes else 0  # type: ignore[arg-type]
            stays = None if not sizes else own * size // rows if rows else 0
            self._entries.append(Collective(len(self), phase, op, ranks, axis, bare, elements, size, stays))


@contextmanager
def record_collectives(device_mesh_names: AxisNames | None = None) -> Iterator[CollectiveLog]:
    """Record the collectives this thread issues, and those of the backward passes it starts.

    Arguments:
        device_mesh_names: gives the axis name for a tuple of global ranks, or None.

    Barriers carry no data and are left out. Dynamo compiles nothing while a mode is active: a function first called
    inside the block runs eagerly, and only one that was compiled before shows the order of its compiled graph.
    """
    log = CollectiveLog(device_mesh_names)
    with _Recorder(log):
        yield log


class _Recorder(compat.TorchDispatchMode):
    def __init__(self, log: CollectiveLog) -> None:
        super().__init__()
        self.log = log

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        # A wrapper (DTensor, AsyncCollectiveTensor) unwraps itself first; the call then returns here on plain tensors.
        if any(hasattr(t, "__tensor_flatten__") for t in types):
            return NotImplemented
        if func.namespace in ("c10d", "_c10d_functional", "_dtensor", "meshplan"):
            self._record(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def _record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        name = func._schema.name
        given = dict(zip((a.name for a in func._schema.arguments), args, strict=False)) | kwargs
        if name == "_c10d_functional::batch_p2p_ops":
            group = compat.process_group_of(given["group_name"])
            for op, tensor in zip(given["op_list"], given["tensors"], strict=True):
                self.log._add(op.removeprefix("i"), group, [tensor])
            return
        for table in (_EAGER, _FUNCTIONAL):
            if name in table:
                op, tensor = table[name]
                group = compat.process_group_of(given["process_group" if table is _EAGER else "group_name"])
                tensors, sizes = list(_flat(given[tensor.removeprefix("n*")])), given.get("input_split_sizes") or ()
                self.log._add(op, group, tensors, tensor.startswith("n*"), sizes)


def _flat(x: Any) -> Iterator[Tensor]:
    if isinstance(x, Tensor):
        yield x
    else:
        for item in x:
            yield from _flat(item)


# Operator -> (op, the argument that is the full tensor; "n*" marks a shard of it, n times smaller).
_EAGER = {
    "c10d::_allgather_base_": ("all_gather", "output_tensor"),
    "c10d::allgather_": ("all_gather", "output_tensors"),
    "c10d::allgather_coalesced_": ("all_gather", "output_lists"),
    "c10d::allgather_into_tensor_coalesced_": ("all_gather", "outputs"),
    "c10d::_reduce_scatter_base_": ("reduce_scatter", "input_tensor"),
    "c10d::reduce_scatter_": ("reduce_scatter", "input_tensors"),
    "c10d::reduce_scatter_tensor_coalesced_": ("reduce_scatter", "inputs"),
    "c10d::allreduce_": ("all_reduce", "tensors"),
    "c10d::allreduce_coalesced_": ("all_reduce", "tensors"),
    "c10d::alltoall_": ("all_to_all", "input_tensors"),
    "c10d::alltoall_base_": ("all_to_all", "input"),
    "c10d::broadcast_": ("broadcast", "tensors"),
    "c10d::reduce_": ("reduce", "tensors"),
    "c10d::gather_": ("gather", "n*input_tensors"),
    "c10d::scatter_": ("scatter", "n*output_tensors"),
    "c10d::send": ("send", "tensors"),
    "c10d::recv_": ("recv", "tensors"),
    "c10d::recv_any_source_": ("recv", "tensors"),
}
_FUNCTIONAL = {
    "_c10d_functional::all_gather_into_tensor": ("all_gather", "n*input"),
    "_c10d_functional::all_gather_into_tensor_out": ("all_gather", "n*input"),
    "_c10d_functional::all_gather_into_tensor_coalesced": ("all_gather", "n*inputs"),
    "_c10d_functional::reduce_scatter_tensor": ("reduce_scatter", "input"),
    "_c10d_functional::reduce_scatter_tensor_out": ("reduce_scatter", "input"),
    "_c10d_functional::reduce_scatter_tensor_coalesced": ("reduce_scatter", "inputs"),
    "_c10d_functional::all_reduce": ("all_reduce", "input"),
    "_c10d_functional::all_reduce_": ("all_reduce", "input"),
    "_c10d_functional::all_reduce_coalesced": ("all_reduce", "inputs"),
    "_c10d_functional::all_reduce_coalesced_": ("all_reduce", "inputs"),
    "_c10d_functional::all_to_all_single": ("all_to_all", "input"),
    "_c10d_functional::broadcast": ("broadcast", "input"),
    "_c10d_functional::broadcast_": ("broadcast", "input"),
    "_c10d_functional::isend": ("send", "tensor"),
    "_c10d_functional::irecv": ("recv", "tensor"),
    "_dtensor::shard_dim_alltoall": ("all_to_all", "input"),
    "meshplan::peer_pull": ("peer_pull", "message"),
    "meshplan::peer_push": ("peer_push", "message"),
}
