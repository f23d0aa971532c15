"""The same case with its sequences over cp as well: dim 1 of every input that has one, and attention by one of the methods."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.fuzz.case import Case, Input

RANKS = 2
METHODS = ("ring", "allgather", "ulysses")


def over_cp(case: Case) -> Case:
    """`case` on twice as many ranks; as it was where no input has an even dim 1."""
    split = [name for name, item in case.inputs.items() if _even(item, RANKS)]
    if not split or "cp" in case.plan["mesh"]:
        return case
    tensors = dict(case.inputs)
    for name in split:
        tensors[name] = replace(tensors[name], place={**tensors[name].place, "cp": "S(1)"})
    mesh: dict[str, int] = {}
    for axis, degree in case.plan["mesh"].items():
        if axis == "tp":
            mesh["cp"] = RANKS
        mesh[axis] = degree
    mesh.setdefault("cp", RANKS)
    plan = {**case.plan, "mesh": mesh}
    if any("scaled_dot_product_attention" in step.code for block in case.blocks for step in block.steps):
        zigzag = all(_even(case.inputs[name], 2 * RANKS) for name in split)
        method = METHODS[case.seed % len(METHODS)]
        plan["context"] = {"attention": [""], "method": method, "balance": "zigzag" if zigzag else "contiguous"}
    return replace(case, inputs=tensors, plan=plan)


def _even(item: Input, pieces: int) -> bool:
    return len(item.shape) > 1 and item.shape[1] % pieces == 0 and item.shape[1] > 0
