"""The hand-written peer of a plan: the same layouts with torch's own `parallelize_module`, `fully_shard` and DDP.

What someone would write today, to measure against. A plan that torch's styles cannot express is refused.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from meshplan import compat
from meshplan.compiler.lowered import Core
from meshplan.errors import PlanError
from meshplan.plan.placements import Shard as Split
from meshplan.plan.shorthands import expand
from meshplan.verify.inputs import IGNORED
from meshplan.verify.job import Batch, find_loss

DATA = ("dp_replicate", "dp_shard")


@dataclass(frozen=True)
class Peer:
    """A model put on this rank by hand.

    Attributes:
        model: takes this rank's part of the batch, as the lowered model does.
        split_loss: logits stay split over the vocabulary, and so the loss needs `loss_parallel`.
        data: the group of the ranks that see different tokens, or None.
    """

    model: nn.Module
    split_loss: bool
    data: dist.ProcessGroup | None

    def forward_backward(self, batch: Batch) -> Tensor:
        """One step up to whole gradients, as a careful author writes it: the mean is over the valid labels of all
        ranks, and gradients that DTensor leaves as partial sums are reduced. Returns this rank's loss, whose mean over
        the data ranks is the loss."""
        context: AbstractContextManager[None] = loss_parallel() if self.split_loss else nullcontext()
        with context:
            loss = find_loss(self.model(**batch), batch)
            share = self._share(batch)
            loss = loss if share is None else loss * share.to(loss.dtype)
            loss.backward()
        for p in self.model.parameters():
            if isinstance(p, DTensor) and isinstance(p.grad, DTensor) and p.grad.placements != p.placements:
                p.grad = p.grad.redistribute(placements=p.placements)
        return loss.full_tensor() if isinstance(loss, DTensor) else loss

    def _share(self, batch: Batch) -> Tensor | None:
        """This rank's valid labels over what a rank has in the mean."""
        labels = next((x for name, x in batch.items() if "label" in name.lower()), None)
        if self.data is None or labels is None:
            return None
        mine = (labels != IGNORED).sum()
        total = mine.clone()
        dist.all_reduce(total, group=self.data)
        return mine.double() * dist.get_world_size(self.data) / total


def peer(model: nn.Module, core: Core, device_type: str = "cpu") -> Peer:
    """Shard `model`, a fresh single-device module, in place, as `core` lays its parameters out.

    All ranks of the default process group call it. Tensor parallelism becomes one style a module: matrices split by
    rows or columns, embeddings by rows, norms along the sequence. Gradients of the residual stream are gathered once
    for all matrices that share an input.

    Raises PlanError `no-peer` for what has no such equivalent: other sections of the plan, other splits.
    """
    styles = tensor_styles(model, core)
    mesh = _mesh(core, device_type)
    if styles:
        parallelize_module(model, mesh["tp"], styles)
    names = tuple(a for a in DATA if core.spec.degree(a) > 1)
    data = None
    if names:
        data = mesh[names[0]] if len(names) == 1 else compat.flatten_mesh(mesh[names], "+".join(names))
    return Peer(
        _data(model, core, mesh, data),
        any(isinstance(s, _SplitLogits) for s in styles.values()),
        None if data is None else data.get_group(),
    )


def refusal(core: Core) -> str | None:
    """Why `core` has no hand-written peer, or None."""
    plan, spec = core.bound.plan, core.spec
    for section in ("context", "experts", "pipeline", "recompute", "compile"):
        if getattr(plan, section, None) is not None:
            return f"a plan with a section `{section}`"
    other = [axis for axis, n in spec.axes if n > 1 and axis not in (*DATA, "tp")]
    if other:
        return f"the axis {other[0]}"
    fsdp = plan.fsdp
    if fsdp is not None and fsdp.strategy in ("zero1", "zero2"):
        return f"strategy {fsdp.strategy}"
    if (fsdp is None or fsdp.strategy == "ddp") and spec.degree("tp") > 1 and spec.degree(*DATA) > 1:
        return "tensor parallelism inside replicas without fully_shard"
    return None


def tensor_styles(model: nn.Module, core: Core) -> dict[str, ParallelStyle]:
    """The style of each module that tensor parallelism touches, by path; none at tp 1. Raises as `peer`."""
    reason = refusal(core)
    if reason is not None:
        raise _no_peer(reason)
    if core.spec.degree("tp") == 1:
        return {}
    outputs = _outputs(model, core)
    splits: dict[str, dict[str, Split]] = {}
    for name, param in core.params.items():
        path, _, own = name.rpartition(".")
        for axis, shard in param.shards:
            if axis != "tp" or shard.parts:
                raise _no_peer(f"{name} split in parts or on {axis}")
            splits.setdefault(path, {})[own] = shard
    styles: dict[str, ParallelStyle] = {}
    for path, shards in splits.items():
        styles[path] = _style(path, model.get_submodule(path), shards, outputs.get(path))
    along = [outputs[path] for path in outputs if path not in splits and isinstance(outputs[path], Shard)]
    for path in outputs:
        if path not in splits and path and isinstance(outputs[path], Shard):
            styles[path] = SequenceParallel(sequence_dim=outputs[path].dim)
    # Matrices split by columns need the whole of an input that norms leave split: gathered once, where it enters.
    for path in [p for p, s in styles.items() if isinstance(s, ColwiseParallel)]:
        parent = path.rpartition(".")[0]
        layout = along[0] if along else Replicate()
        if parent and parent not in styles:
            styles[parent] = _Whole(layout)
        elif not parent:
            styles[path] = _SplitLogits(input_layouts=layout, output_layouts=Shard(-1), use_local_output=False)
    return dict(sorted(styles.items(), key=lambda item: item[0]))


class _Whole(ParallelStyle):
    """The first tensor handed to a module, whole on every rank; gradients of all who use it are added, then reduced."""

    def __init__(self, layout: Any) -> None:
        super().__init__()
        self.layout = layout

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def whole(x: Any) -> Any:
            x = x if isinstance(x, DTensor) else DTensor.from_local(x, device_mesh, [self.layout], run_check=False)
            return x.redistribute(placements=[Replicate()])

        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if args:
                return (whole(args[0]), *args[1:]), kwargs
            first = next(name for name, x in kwargs.items() if isinstance(x, Tensor) and x.is_floating_point())
            return args, {**kwargs, first: whole(kwargs[first])}

        module.register_forward_pre_hook(before, with_kwargs=True)
        return module


class _SplitLogits(ColwiseParallel):
    """A head whose logits stay split over the vocabulary, for `loss_parallel`."""


def _style(path: str, module: nn.Module, shards: dict[str, Split], output: Any) -> ParallelStyle:
    weight = shards.get("weight")
    if isinstance(module, nn.Embedding) and weight is not None and weight.dim == 0:
        return RowwiseParallel(input_layouts=Replicate(), output_layouts=output or Replicate())
    if isinstance(module, nn.Linear) and weight is not None:
        return ColwiseParallel() if weight.dim == 0 else RowwiseParallel(output_layouts=output or Replicate())
    raise _no_peer(f"{path}, a {type(module).__name__} split on tp")


def _outputs(model: nn.Module, core: Core) -> dict[str, Any]:
    """What the plan says of each module's output on tp, by path."""
    found = {}
    for rule, paths in core.bound.matches:
        for path in paths:
            said = [on["tp"] for on in expand(rule, model.get_submodule(path)).output.values() if "tp" in on]
            if said:
                found[path] = Shard(said[0].dim) if isinstance(said[0], Split) else Replicate()
    return found


def _mesh(core: Core, device_type: str) -> DeviceMesh:
    axes = {axis: core.spec.degree(axis) for axis in (*DATA, "tp")}
    busy = {axis: n for axis, n in axes.items() if n > 1} or {"dp_shard": 1}
    return init_device_mesh(device_type, tuple(busy.values()), mesh_dim_names=tuple(busy))


def _data(model: nn.Module, core: Core, mesh: DeviceMesh, data: DeviceMesh | None) -> nn.Module:
    fsdp, names = core.bound.plan.fsdp, tuple(a for a in DATA if core.spec.degree(a) > 1)
    if data is None:
        return model
    if fsdp is None or fsdp.strategy == "ddp":
        return nn.parallel.DistributedDataParallel(model, process_group=data.get_group())
    if names == ("dp_replicate",):
        raise _no_peer("fully_shard over copies alone")
    policy = MixedPrecisionPolicy(fsdp.param_dtype, fsdp.reduce_dtype, fsdp.output_dtype)
    for path in core.bound.fsdp_units:
        if path:
            fully_shard(model.get_submodule(path), mesh=mesh[names], mp_policy=policy)
    fully_shard(model, mesh=mesh[names], mp_policy=policy)
    return model


def _no_peer(what: str) -> PlanError:
    return PlanError(
        f"{what} has no equivalent in parallelize_module and fully_shard to compare with", code="no-peer",
        legal="colwise, rowwise, embedding, sequence and vocab_head on tp; ddp, zero3 and hsdp on data axes",
    )  # fmt: skip


__all__ = ["Peer", "peer", "refusal", "tensor_styles"]
