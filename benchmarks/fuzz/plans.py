"""Random plans that have a meaning: any legal placement of any parameter, and any legal layout at any boundary.

Whatever such a plan says can be honoured by gathering values and computing whole, so a refusal of one is too strict.
"""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.fuzz.case import Input

MESHES: tuple[tuple[dict[str, int], int], ...] = (
    ({"tp": 2}, 6), ({"tp": 3}, 2), ({"tp": 4}, 2), ({"dp_shard": 2}, 2), ({"dp_replicate": 2}, 1), ({"dp_shard": 2, "tp": 2}, 6),
    ({"dp_replicate": 2, "tp": 2}, 2), ({"dp_replicate": 2, "dp_shard": 2}, 1), ({"dp_replicate": 2, "dp_shard": 2, "tp": 2}, 1),
    ({"dp_shard": 3}, 1), ({"dp_shard": 4}, 1),
)  # fmt: skip
DATA = ("dp_replicate", "dp_shard")


def draw_mesh(rng: random.Random) -> dict[str, int]:
    """Degrees by axis."""
    return dict(rng.choices([m for m, _ in MESHES], [w for _, w in MESHES])[0])


def data_ranks(mesh: dict[str, int]) -> int:
    """Ranks that hold different rows."""
    return mesh.get("dp_replicate", 1) * mesh.get("dp_shard", 1)


def draw_places(rng: random.Random, inputs: dict[str, Input], mesh: dict[str, int]) -> dict[str, Input]:
    """Where the inputs live: rows over the data ranks, and now and then a dim over tp."""
    split = data_ranks(mesh) > 1 and rng.random() < 0.93
    out = {}
    for name, item in inputs.items():
        place: dict[str, str] = {}
        if split:
            place["dp"] = "S(0)"
        even = [d for d, n in enumerate(item.shape) if d and n % mesh.get("tp", 1) == 0]
        if "tp" in mesh and even and rng.random() < 0.12:
            place["tp"] = f"S({rng.choice(even)})"
        out[name] = Input(item.shape, item.kind, item.limit, place)
    return out


class Boundaries:
    """What crosses each module's boundary on one device: shapes of tensors by argument name and by output index."""

    def __init__(self, model: nn.Module, batch: dict[str, Tensor]) -> None:
        import inspect

        self.given: dict[str, dict[str, torch.Size]] = {}
        self.made: dict[str, list[torch.Size]] = {}
        handles = []
        for path, module in model.named_modules():
            names = list(inspect.signature(module.forward).parameters)

            def hook(m: nn.Module, args: Any, out: Any, path: str = path, names: list[str] = names) -> None:
                tensors = zip(names, args, strict=False)
                self.given.setdefault(path, {n: a.shape for n, a in tensors if isinstance(a, Tensor)})
                outs = out if isinstance(out, tuple) else tuple(out.values()) if isinstance(out, dict) else (out,)
                self.made.setdefault(path, [o.shape for o in outs])

            handles.append(module.register_forward_hook(hook))
        with torch.no_grad():
            model(**batch)
        for handle in handles:
            handle.remove()


def draw_plan(
    rng: random.Random, model: nn.Module, inputs: dict[str, Input], batch: dict[str, Tensor], mesh: dict[str, int]
) -> dict[str, Any]:
    """Mesh, rules and sections."""
    crossing = Boundaries(model, batch)
    rules: list[dict[str, Any]] = []
    density = rng.choice((0.2, 0.5, 0.8))
    seen: set[int] = set()
    if "tp" in mesh:
        for path, module in model.named_modules():
            layouts: dict[str, Any] = {}
            for name, p in module.named_parameters(recurse=False):
                if id(p) not in seen and p.dim() and rng.random() < density:
                    layouts[name] = {"tp": draw_shard(rng, model, path, name, p, mesh["tp"])}
                seen.add(id(p))
            use = _shorthand(rng, module, crossing, path) if not layouts else None
            rule: dict[str, Any] = {
                "at": path,
                **({"use": use} if use else {}),
                **({"params": layouts} if layouts else {}),
            }
            if rng.random() < 0.12 and not use:
                rule.update(draw_boundary(rng, crossing, path, mesh))
            if len(rule) > 1:
                rules.append(rule)
    plan: dict[str, Any] = {"mesh": mesh}
    if rules:
        plan["rules"] = rules
    called = [path for path in crossing.given if path and path.count(".") < 3]
    blocks = [p for p in called if list(model.get_submodule(p).children())] or called
    if data_ranks(mesh) > 1 and rng.random() < 0.6:
        units = sorted(rng.sample(blocks, min(len(blocks), rng.choice((0, 1, 2)))))
        plan["fsdp"] = {"units": outermost(units), "strategy": rng.choice(("ddp", "zero1", "zero2", "zero3", "zero3"))}
    if blocks and rng.random() < 0.12:
        unit = outermost([rng.choice(blocks)])
        plan["recompute"] = (
            {"units": unit, "policy": "full"}
            if rng.random() < 0.6
            else {"units": unit, "policy": "none", "gather": "regather"}
        )
    return plan


def draw_shard(rng: random.Random, model: nn.Module, path: str, name: str, p: Tensor, degree: int) -> str:
    """Any dim; now and then cut into equal parts, or replicated in so many words."""
    if rng.random() < 0.06:
        return "R"
    d = rng.randrange(p.dim())
    for parts in (2, 3):
        if p.shape[d] % (parts * degree) == 0 and rng.random() < 0.12:
            return f"S({d}, parts={[p.shape[d] // parts] * parts})"
    return f"S({d - p.dim() if rng.random() < 0.2 else d})"


def draw_boundary(rng: random.Random, crossing: Boundaries, path: str, mesh: dict[str, int]) -> dict[str, Any]:
    """A layout of one argument or of one result of the module at `path`."""
    if path not in crossing.made:
        return {}
    axis = "tp" if rng.random() < 0.93 else rng.choice(list(mesh))
    if path and rng.random() < 0.5 and crossing.given[path]:
        name = rng.choice(list(crossing.given[path]))
        shape = crossing.given[path][name]
        return {"input": {name: {axis: _layout(rng, shape)}}}
    index = rng.randrange(len(crossing.made[path]))
    shape = crossing.made[path][index]
    layout = {axis: _layout(rng, shape)}
    return {"output": layout if len(crossing.made[path]) == 1 else {index: layout}}


def _layout(rng: random.Random, shape: torch.Size) -> str:
    return f"S({rng.randrange(len(shape))})" if len(shape) and rng.random() < 0.7 else "R"


def _shorthand(rng: random.Random, module: nn.Module, crossing: Boundaries, path: str) -> str | None:
    if rng.random() < 0.7 or path not in crossing.made:
        return None
    if isinstance(module, nn.Linear):
        return rng.choice(("colwise", "rowwise"))
    if isinstance(module, nn.Embedding):
        return "embedding"
    if isinstance(module, nn.LayerNorm | nn.RMSNorm) and len(crossing.made[path][0]) == 3:
        return "sequence"
    return None


def outermost(paths: list[str]) -> list[str]:
    """Without paths inside others."""
    return [p for p in paths if not any(p != q and p.startswith(q + ".") for q in paths)]
