"""Random programs: an input or two, a few lines and idioms, blocks inside, repeated or shared, and a loss or plain results."""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.fuzz.case import HEADER, Block, Input, make
from benchmarks.fuzz.idioms import any_idiom, linear
from benchmarks.fuzz.ops import any_line
from benchmarks.fuzz.scope import Scope


class Models:
    """Draws one program. `data` is the number of data ranks, which divides the batch."""

    def __init__(self, rng: random.Random, data: int) -> None:
        self.rng, self.data = rng, data
        self.blocks: list[Block] = []
        self.classes: dict[str, Any] = {}

    def draw(self) -> tuple[tuple[Block, ...], dict[str, Input]]:
        """Blocks, the model last, and its inputs."""
        pick = self.rng.choice
        batch = self.data * pick((1, 2, 3) if self.data < 4 else (1, 2))
        length, width = pick((3, 4, 5, 6, 8)), pick((4, 5, 6, 8, 12))
        kind = self.rng.choices(("sequence", "ids", "rows", "images"), (5, 4, 2, 1))[0]
        inputs: dict[str, Input] = {}
        if kind == "ids":
            inputs["tokens"] = Input((batch, length), "ids", pick((5, 6, 7, 8, 11)))
        else:
            shape = {
                "sequence": (batch, length, width),
                "rows": (batch, width),
                "images": (batch, pick((2, 3, 4)), 4, 6),
            }
            inputs["x"] = Input(shape[kind], "float")
            if kind == "sequence" and self.rng.random() < 0.3:
                inputs["ids"] = Input((batch, length), "ids", 4)
        if kind in ("ids", "sequence") and self.rng.random() < 0.2:
            inputs["mask"] = Input((batch, length), "mask")
        ending = self.rng.choices(("labels", "target", "mean", "values"), (3, 2, 3, 2))[0]
        if ending == "labels" and kind in ("ids", "sequence"):
            inputs["labels"] = Input((batch, length), "labels", pick((4, 5, 6, 7)))
        s = self.scope("Model", {name: make(i, k) for k, (name, i) in enumerate(inputs.items())})
        if kind == "ids":
            made = s.member(f"nn.Embedding({inputs['tokens'].limit}, {width})")
            s.let(f"{made}(tokens)")
        self.body(s, self.rng.choice((2, 3, 4, 5)), depth=0)
        self.blocks.append(s.block(self.end(s, inputs, ending)))
        return tuple(self.blocks), inputs

    def scope(self, name: str, args: dict[str, Tensor]) -> Scope:
        return Scope(self.rng, name, args, self.classes)

    def body(self, s: Scope, size: int, depth: int) -> None:
        for _ in range(size):
            if depth < 2 and s.chance(0.3):
                self.child(s, depth)
            elif s.chance(0.5):
                any_idiom(s)
            else:
                any_line(s)

    def child(self, s: Scope, depth: int) -> None:
        """A block of its own, called once, twice, or as equal layers of a list."""
        args = {"x": s.env[s.current].detach().clone()}
        given = [s.current]
        others = [n for n in s.env if n != s.current and isinstance(s.env[n], Tensor)]
        if others and s.chance(0.3):
            given.append(s.pick(others))
            args["y"] = s.env[given[1]].detach().clone()
        inner = self.scope(f"Block{len(self.blocks)}", args)
        self.body(inner, self.rng.choice((1, 2, 3)), depth + 1)
        same = [n for n in inner.floats() if n not in inner.args and inner.shape(n) == inner.shape("x")]
        repeat = bool(same) and s.chance(0.5)
        result = same[-1] if repeat else inner.current
        inner.name = f"Block{len(self.blocks)}"
        pair = not repeat and s.chance(0.15)
        block = inner.block(f"{result}, {inner.current}" if pair else result)
        self.blocks.append(block)
        space: dict[str, Any] = {}
        exec(HEADER + "\n\n".join(b.source() for b in self.blocks), space)
        self.classes[block.name] = space[block.name]
        call = ", ".join(given)
        rest = "".join(f", {g}" for g in given[1:])
        if pair:
            made, (a, b) = s.member(f"{block.name}()"), (s.new(), s.new())
            if s.line(f"{a}, {b} = {made}({call})", a, b):
                s.current = s.pick([a, b])
            return
        if not repeat:
            s.let(f"{s.member(f'{block.name}()')}({call})")
        elif s.chance(0.6):
            made, h = s.member(f"nn.ModuleList([{block.name}() for _ in range({s.pick((2, 2, 3))})])"), s.new()
            if s.line(
                f"{h} = {given[0]}\n        for layer in {made}:\n            {h} = layer({h}{rest})".replace(
                    "\n        ", "\n"
                ),
                h,
            ):
                step = s.steps[-1]
                s.steps[-1] = type(step)(step.outs, step.code.replace("\n", "\n        "))
                s.current = h
        elif s.chance(0.5):
            s.let(
                s.member(f"{block.name}()" if rest else f"nn.Sequential({block.name}(), {block.name}())") + f"({call})"
            )
        else:
            made = s.member(f"{block.name}()")
            once = s.let(f"{made}({call})")
            if once:
                s.let(f"{made}({once}{rest})")

    def end(self, s: Scope, inputs: dict[str, Input], ending: str) -> str:
        """The lines of a loss and what the model returns."""
        x = s.current
        if ending == "labels" and "labels" in inputs:
            n = inputs["labels"].limit
            fits = [v for v in s.floats(3) if s.shape(v)[:2] == inputs["labels"].shape]
            x = x if x in fits else fits[-1] if fits else x
            if x in fits:
                tables = [a for a, made in s.members if made == f"nn.Embedding({n}, {s.shape(x)[-1]})"]
                logits = (
                    s.let(f"F.linear({x}, self.{tables[0]}.weight)") if tables and s.chance(0.5) else linear(s, x, n)
                )
                if tables and s.chance(0.5) and s.members[-1][1].startswith(f"nn.Linear({s.shape(x)[-1]}, {n}"):
                    s.setup.append(f"self.{s.members[-1][0]}.weight = self.{tables[0]}.weight")
                if logits:
                    loss = s.let(
                        s.pick(
                            [
                                f"F.cross_entropy({logits}.view(-1, {n}), labels.view(-1))",
                                f"F.cross_entropy({logits}.transpose(1, 2), labels)",
                                f"F.cross_entropy({logits}.flatten(0, 1), labels.flatten(), reduction='sum')",
                                f"nn.CrossEntropyLoss()({logits}.mT, labels)",
                                f"F.cross_entropy({logits}.reshape(-1, {logits}.shape[-1]), labels.reshape(-1), ignore_index=-100)",  # noqa: E501
                                f"F.cross_entropy({logits}[:, :-1].reshape(-1, {n}), labels[:, 1:].reshape(-1))",
                                f"F.nll_loss(F.log_softmax({logits}, -1).transpose(1, 2), labels)",
                                f"F.cross_entropy({logits}.mT, labels, reduction='none').mean()",
                                f"F.cross_entropy({logits}.mT, labels, reduction='none').sum() / (labels != -100).sum()",
                                f"F.cross_entropy({logits}.mT, labels, label_smoothing=0.1)",
                            ]
                        )
                    )
                    if loss:
                        return s.pick([loss, f"{loss}, {logits}", f'{{"loss": {loss}, "logits": {logits}}}'])
        if ending == "target":
            shape = s.shape(x)
            if shape[0] == next(iter(inputs.values())).shape[0] and len(shape) > 1:
                inputs["target"] = Input(shape, "float")
                s.args = (*s.args, "target")
                s.env["target"] = make(inputs["target"], 9)
                loss = s.let(
                    s.pick(
                        [
                            f"F.mse_loss({x}, target)",
                            f"F.l1_loss({x}, target)",
                            f"F.smooth_l1_loss({x}, target)",
                            f"F.huber_loss({x}, target, reduction='sum')",
                            f"F.binary_cross_entropy_with_logits({x}, target.sigmoid())",
                            f"F.kl_div(F.log_softmax({x}, -1), target.softmax(-1), reduction='batchmean')",
                            f"((({x} - target) ** 2).mean(-1)).mean()",
                            f"nn.MSELoss(reduction='sum')({x}, target)",
                            f"F.mse_loss({x}, target, reduction='none').mean(0).sum()",
                            f"F.cross_entropy({x}.flatten(1), target.flatten(1).softmax(-1))",
                            f"(({x} - target).pow(2) * (target > 0)).sum() / (target > 0).sum()",
                        ]
                    )
                )
                if loss:
                    return loss
        if ending == "values":
            others = [v for v in s.floats() if v not in s.args and v != x and s.env[v].requires_grad]
            return f"{x}, {s.pick(others)}" if others and s.chance(0.4) else x
        loss = s.let(
            s.pick(
                [
                    f"{x}.pow(2).mean()",
                    f"{x}.sum()",
                    f"{x}.tanh().mean()",
                    f"({x} ** 2).sum() / {x}.numel()",
                    f"{x}.logsumexp(-1).mean()",
                ]
            )
        )
        return loss or x


def has_gradient(blocks: tuple[Block, ...]) -> bool:
    """Whether the model has a parameter at all."""
    return any("nn.Parameter" in m or "nn.Linear" in m or "nn.Embedding" in m for b in blocks for _, m in b.members)


__all__ = ["Models", "has_gradient", "nn", "torch"]
