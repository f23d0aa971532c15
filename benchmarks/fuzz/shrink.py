"""A shorter case that goes wrong in the same way: rules, statements and values are taken away while the verdict stays."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from benchmarks.fuzz.case import Block, Case, Step
from benchmarks.fuzz.scope import FAILURES


def shrink(case: Case, still: Callable[[Case], bool], tries: int = 400) -> Case:
    """The smallest case found for which `still` holds, after at most so many questions; `case` itself holds."""
    asked = 0
    again = True
    while again:
        again = False
        for smaller in _smaller(case):
            if asked >= tries:
                return case
            if not _runs(smaller):
                continue
            asked += 1
            if still(smaller):
                case, again = smaller, True
                break
    return case


def _runs(case: Case) -> bool:
    try:
        with torch.no_grad():
            case.built()(**case.batch())
        return True
    except (*FAILURES, NameError, AttributeError, SyntaxError):
        return False


def _smaller(case: Case) -> Iterator[Case]:
    rules = case.plan.get("rules", [])
    for key in ("fsdp", "recompute"):
        if key in case.plan:
            yield case.with_plan(**{key: None})
    for i, rule in enumerate(rules):
        yield case.with_plan(rules=rules[:i] + rules[i + 1 :])
        for side in ("params", "input", "output", "use"):
            if side in rule and len(rule) > 2:
                less = {k: v for k, v in rule.items() if k != side}
                yield case.with_plan(rules=[*rules[:i], less, *rules[i + 1 :]])
    for k, block in enumerate(case.blocks):
        for i in range(len(block.steps) - 1, -1, -1):
            for less in _without(block, i):
                yield _with(case, k, less)
        for i, (name, _) in enumerate(block.members):
            if not any(f"self.{name}" in line for line in (*(s.code for s in block.steps), *block.setup)):
                yield _with(case, k, replace(block, members=block.members[:i] + block.members[i + 1 :]))
        for step in block.steps:
            for value in step.outs:
                if value != block.returns and k == len(case.blocks) - 1:
                    yield _with(case, k, replace(block, returns=f"{value}.square().sum()"))
    used = "".join(b.source() for b in case.blocks)
    for k, block in enumerate(case.blocks[:-1]):
        if used.count(block.name) == 1:
            yield replace(case, blocks=case.blocks[:k] + case.blocks[k + 1 :])


def _without(block: Block, i: int) -> Iterator[Block]:
    """The block without statement `i`: what it made is replaced by an earlier value."""
    step, rest = block.steps[i], block.steps[:i] + block.steps[i + 1 :]
    earlier = [name for s in block.steps[:i] for name in s.outs][::-1] + list(block.args)
    if not any(_names(step.outs, line) for line in (*(s.code for s in block.steps[i + 1 :]), block.returns)):
        yield replace(block, steps=rest)
        return
    for value in earlier[:4]:
        swapped = tuple(Step(s.outs, _swap(step.outs, value, s.code)) for s in rest)
        yield replace(block, steps=swapped, returns=_swap(step.outs, value, block.returns))


def _names(names: tuple[str, ...], line: str) -> bool:
    return any(re.search(rf"\b{name}\b", line) for name in names)


def _swap(names: tuple[str, ...], value: str, line: str) -> str:
    for name in names:
        line = re.sub(rf"\b{name}\b", value, line)
    return line


def _with(case: Case, k: int, block: Block) -> Case:
    return replace(case, blocks=(*case.blocks[:k], block, *case.blocks[k + 1 :]))
