"""A hand-written `Lowered.to_json()`: a 2-layer Llama on dp_shard 2 x tp 2 with sequence parallelism and FSDP."""

from __future__ import annotations

from typing import Any

BATCH, SEQ, DIM, VOCAB = 2, 1024, 512, 1000  # of one data rank
RING = {"all_gather": (1, 2), "reduce_scatter": (1, 2), "all_reduce": (2, 2)}  # (n - 1)/n and 2 (n - 1)/n at n = 2


def collective(phase: str, op: str, axis: str, elements: int, module: str, tensor: str, **more: Any) -> dict[str, Any]:
    """One float32 collective on 2 ranks; `wire_bytes` by the ring."""
    up, down = RING[op]
    record = {
        "phase": phase,
        "op": op,
        "axis": axis,
        "ranks_per_group": 2,
        "count": 1,
        "dtype": "float32",
        "elements": elements,
        "bytes": 4 * elements,
        "wire_bytes": 4 * elements * up // down,
        "module": module,
        "tensor": tensor,
        "where": "",
    }
    return {**record, **more}


def llama(layers: int = 2) -> dict[str, Any]:
    """The dict; `layers` equal layers, each with two column and two row splits and one FSDP unit."""
    hidden = BATCH * SEQ * DIM
    unit = 600_000
    names = [f"layers.{i}" for i in range(layers)]
    gather, scatter = ("all_gather", "reduce_scatter"), ("reduce_scatter", "all_gather")
    sites = [("tok_embeddings", "output", "P", "S(1)", scatter, "llama.py:10")]
    for name in names:
        for part, last, line in (("attention", "wo", 31), ("feed_forward", "w2", 47)):
            sites.append((f"{name}.{part}", "input", "S(1)", "R", gather, f"llama.py:{line}"))
            sites.append((f"{name}.{part}.{last}", "output", "P", "S(1)", scatter, f"llama.py:{line + 5}"))
    sites.append(("output", "input", "S(1)", "R", gather, "llama.py:60"))

    forward, backward, boundaries = [], [], []
    for module, side, source, target, (there, back), where in sites:
        tensor = "x" if side == "input" else "0"
        boundaries.append(
            {
                "module": module,
                "side": side,
                "tensor": tensor,
                "axis": "tp",
                "from": source,
                "to": target,
                "where": where,
                "implicit": False,
            }
        )
        forward.append(collective("forward", there, "tp", hidden, module, tensor, where=where))
        backward.insert(0, collective("backward", back, "tp", hidden, module, tensor, where=where))
    for name in names:
        at = next(k for k, c in enumerate(forward) if c["module"].startswith(name))
        forward.insert(at, collective("forward", "all_gather", "dp_shard", unit, name, "parameters"))
        first = next(k for k, c in enumerate(backward) if c["module"].startswith(name))
        backward.insert(first, collective("backward", "all_gather", "dp_shard", unit, name, "parameters"))
        last = max(k for k, c in enumerate(backward) if c["module"].startswith(name))
        backward.insert(last + 1, collective("backward", "reduce_scatter", "dp_shard", unit, name, "parameters"))
    backward.append(collective("backward", "all_reduce", "tp", 2 * DIM, "norm", "weight"))
    placements = [
        placement("tok_embeddings.weight", [VOCAB, DIM], [VOCAB // 2 // 2, DIM], {"dp_shard": "S(0)", "tp": "S(0)"}),
        *(
            placement(f"{n}.attention.wo.weight", [DIM, DIM], [DIM // 2, DIM // 2], {"dp_shard": "S(0)", "tp": "S(1)"})
            for n in names
        ),
        placement("norm.weight", [DIM], [DIM // 2], {"dp_shard": "S(0)", "tp": "R"}),
    ]
    return {
        "model": "llama-tiny",
        "world_size": 4,
        "node_size": 2,
        "mesh": {"dp_shard": 2, "tp": 2},
        "inputs": {"tokens": {"dtype": "int64", "shape": [4, SEQ], "place": {"dp": "S(0)"}}},
        "placements": placements,
        "regions": dict.fromkeys(names, "local"),
        "collectives": forward + backward,
        "boundaries": boundaries,
        "rules": ["layers.*.attention.wo: weight {tp: S(1)}, output {tp: S(1)}"],
        "fsdp_units": [{"module": n, "params": unit, "bytes": 4 * unit} for n in names],
        "warnings": [],
        "notes": ["padding: none"],
        "conditions": ["seq % tp == 0"],
        "counts": {f"{n}.attention.x": "batch*seq*512" for n in names},
    }


def placement(name: str, shape: list[int], local_shape: list[int], layout: dict[str, str]) -> dict[str, Any]:
    """One entry of `placements`."""
    return {"name": name, "shape": shape, "local_shape": local_shape, "layout": layout}
