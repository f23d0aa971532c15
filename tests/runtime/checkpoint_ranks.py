"""What each of four gloo ranks does for test_checkpoint.py: save and load on several meshes, and note what it saw."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import meshplan
from meshplan.errors import PlanError
from meshplan.plan.placements import S
from meshplan.runtime.checkpoint import load, save
from meshplan.runtime.extents import local_part


def numbered(*shape: int) -> Tensor:
    """Every element is its own position, so that a permuted or lost row is seen at once."""
    return torch.arange(float(torch.Size(shape).numel()), dtype=torch.float64).reshape(shape) + 1


class Holder(nn.Module):
    """Parameters under dotted names, without a forward."""

    def __init__(self, **parameters: Tensor) -> None:
        super().__init__()
        for name, value in parameters.items():
            module: nn.Module = self
            *path, leaf = name.split("__")
            for step in path:
                if step not in module._modules:
                    module.add_module(step, nn.Module())
                module = module._modules[step]
            module.register_parameter(leaf, value if isinstance(value, nn.Parameter) else nn.Parameter(value))


def net(fill: bool = True) -> Holder:
    """7 and 13 rows: uneven on 2, 3 and 4 ranks; one bias; values 1, 2, 3, ... scaled down, or zeros."""
    scale = 0.01 if fill else 0.0
    return Holder(
        up__weight=numbered(7, 5) * scale,
        down__weight=numbered(5, 7) * scale,
        down__bias=numbered(5) * scale,
        vocab__weight=numbered(13, 3) * scale,
    )


TP = {"up.weight": Shard(0), "down.weight": Shard(1), "down.bias": Replicate(), "vocab.weight": Shard(0)}


def tensor_parallel(model: Holder, mesh: DeviceMesh) -> Holder:
    for name, placement in TP.items():
        owner, _, leaf = name.rpartition(".")
        module = model.get_submodule(owner)
        module.register_parameter(leaf, nn.Parameter(distribute_tensor(getattr(module, leaf).data, mesh, [placement])))
    return model


def fsdp_tensor_parallel(model: Holder, mesh: DeviceMesh) -> Holder:
    return fully_shard(tensor_parallel(model, mesh["tp"]), mesh=mesh["dp"])


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """AdamW steps on gradients that depend on the values, elementwise: the same on every layout."""
    for step in steps:
        for p in model.parameters():
            p.grad = (p.detach() * 3 + step) * 0.1
        optimizer.step()


def adamw(model: nn.Module) -> torch.optim.AdamW:
    decayed = [p for p in model.parameters() if p.ndim > 1]
    plain = [p for p in model.parameters() if p.ndim == 1]
    return torch.optim.AdamW([{"params": decayed, "weight_decay": 0.3}, {"params": plain, "lr": 0.02}], lr=0.05)


def rows(tensor: Tensor) -> list[float]:
    """First column of what this rank holds."""
    local = local_part(tensor)
    return local[:, 0].tolist() if local.numel() else []


def refusal(call, *args, **kwargs) -> list:
    """(code, message, seconds) of the PlanError that the call raises."""
    start = time.monotonic()
    try:
        call(*args, **kwargs)
    except PlanError as e:
        return [e.code, str(e), time.monotonic() - start]
    return [None, "", time.monotonic() - start]


def seven_rows(rank: int, folder: Path) -> dict:
    out = {}
    two, three = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [0, 1, 2])
    model = Holder(w=distribute_tensor(numbered(7, 1), two, [Shard(0)]))
    save(folder / "seven", model)
    out["saved"] = rows(model.w)
    for name, mesh in (("three", three), ("four", init_device_mesh("cpu", (4,)))):
        model = Holder(w=distribute_tensor(torch.zeros(7, 1, dtype=torch.float64), mesh, [Shard(0)]))
        load(folder / "seven", model)
        out[name] = rows(model.w)
    one_row = Holder(w=distribute_tensor(numbered(1, 3), init_device_mesh("cpu", (4,)), [Shard(0)]))
    save(folder / "one_row", one_row)
    return out


def empty_shard(rank: int, folder: Path) -> dict:
    """FSDP2 cuts 5 rows on 4 ranks in 2, 2, 1 and 0."""
    mesh = init_device_mesh("cpu", (4,))
    model = fully_shard(Holder(w=numbered(5, 2)), mesh=mesh)
    save(folder / "fsdp5", model)
    return {"rows": rows(model.w)}


def fused(rank: int, folder: Path) -> dict:
    """q|k|v of 4, 2 and 2 rows split part by part on 2 ranks (0-based rows 0 1 4 6 and 2 3 5 7)."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    mine = torch.tensor([[0, 1, 4, 6], [2, 3, 5, 7]][rank % 2])

    def model(values: Tensor) -> Holder:
        local = DTensor.from_local(values[mine], mesh["tp"], [Shard(0)], run_check=False)
        return Holder(qkv__weight=local)

    plan = SimpleNamespace(to_yaml=lambda: "mesh: {dp: 2, tp: 2}\n")
    placements = [{"name": "qkv.weight", "layout": {"tp": S(0, parts=[4, 2, 2])}}]
    meshplan.lowered = lambda model: SimpleNamespace(plan=plan, placements=placements)
    try:
        saved = fully_shard(model(numbered(8, 2)), mesh=mesh["dp"])
        save(folder / "fused", saved)
        back = model(torch.zeros(8, 2, dtype=torch.float64))
        plan_text = load(folder / "fused", back).plan
    finally:
        del meshplan.lowered
    return {"rows": rows(back.qkv.weight), "plan": plan_text, "shard": rows(saved.qkv.weight)}


def two_dimensional(rank: int, folder: Path) -> dict:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = fsdp_tensor_parallel(net(), mesh)
    optimizer = adamw(model)
    train(model, optimizer, range(3))
    save(folder / "2d", model, optimizer, extra={"step": 3, "betas": (0.5, 0.25), "seen": torch.arange(3)})

    again = fsdp_tensor_parallel(net(fill=False), mesh)
    fresh = adamw(again)
    loaded = load(folder / "2d", again, fresh)
    train(model, optimizer, range(3, 6))
    train(again, fresh, range(3, 6))
    same = all(
        torch.equal(local_part(a), local_part(b)) for a, b in zip(model.parameters(), again.parameters(), strict=True)
    )

    flat = tensor_parallel(net(fill=False), init_device_mesh("cpu", (4,), mesh_dim_names=("tp",)))
    flat_optimizer = adamw(flat)
    load(folder / "2d", flat, flat_optimizer)
    save(folder / "tp4", flat, flat_optimizer)
    return {
        "resumed": same,
        "extra": [loaded.extra["step"], list(loaded.extra["betas"]), loaded.extra["seen"].tolist()],
        "moment_is_sharded": isinstance(fresh.state[again.up.weight]["exp_avg"], DTensor),
        "options": [[g["lr"], g["weight_decay"]] for g in fresh.param_groups],
    }


def pipeline(rank: int, folder: Path) -> dict:
    """4 layers on 2 pipeline ranks with 2 stages each: this rank has layers 0 and 2, or 1 and 3."""
    mine = [rank % 2, rank % 2 + 2]
    model = Holder(**{f"layers__{i}__w": numbered(2, 3) * (i + 1) for i in mine})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    train(model, optimizer, range(1))
    save(folder / "pp", model, optimizer)
    before = [p.detach().clone() for p in model.parameters()]
    other = Holder(**{f"layers__{i}__w": torch.zeros(2, 3, dtype=torch.float64) for i in mine})
    load(folder / "pp", other, torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9))
    return {"equal": all(torch.equal(a, b) for a, b in zip(before, other.parameters(), strict=True))}


def some_ranks_only(rank: int, folder: Path) -> dict:
    model = Holder(w=numbered(3, 2))
    out = {"alone": refusal(save, folder / "alone", model, timeout=0.5) if rank == 0 else None}
    dist.barrier()
    out["exists"] = (folder / "alone").exists()
    dist.barrier()
    save(folder / "alone", model)  # the ranks are still in step
    out["then"] = (folder / "alone" / ".metadata").is_file()
    return out


def one_rank_wrong(rank: int, folder: Path) -> dict:
    model = Holder(w=torch.zeros(3, 2 + (rank == 2), dtype=torch.float64), v=torch.zeros(1))
    before = [p.clone() for p in model.parameters()]
    out = {"load": refusal(load, folder / "alone", model, strict=False)}
    out["save"] = refusal(save, folder / "alone", model)
    out["unchanged"] = all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    mesh = init_device_mesh("cpu", (4,))
    packed = DTensor.from_local(  # 3 + 1 + 1 + 2 rows: not how 7 rows are cut in 4
        torch.zeros([3, 1, 1, 2][rank], 1), mesh, [Shard(0)], run_check=False, shape=torch.Size((7, 1)), stride=(1, 1)
    )
    out["packed"] = refusal(save, folder / "packed", Holder(w=packed))
    return out


CASES = (seven_rows, empty_shard, fused, two_dimensional, pipeline, some_ranks_only, one_rank_wrong)


def all_cases(folder: Path) -> dict[str, dict]:
    """Run every case on this rank, in one order; what each noted."""
    return {case.__name__: case(dist.get_rank(), folder) for case in CASES}
