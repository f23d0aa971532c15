"""What a backward comes to: autograd's graph of the lowered forward, walked back from the outputs of the model."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from meshplan import compat


class Reach:
    """The nodes that run in a backward from `outputs`, told apart by the numbers autograd gives them as they are made."""

    def __init__(self, outputs: Iterable[Tensor]) -> None:
        todo = [n for n in map(node_of, outputs) if n is not None]
        self._nodes = set(todo)
        self._users: dict[Any, list[int]] = {}  # numbers of the nodes that send a gradient to this one
        while todo:
            user = todo.pop()
            for node, _ in user.next_functions:
                if node is None:
                    continue
                self._users.setdefault(node, []).append(compat.node_number(user))
                if node not in self._nodes:
                    self._nodes.add(node)
                    todo.append(node)
        self._numbers = {compat.node_number(n) for n in self._nodes}
        # A write into a view is two nodes at once, of which only the outer one stands in the graph.
        self._numbers |= {n - k for n in map(compat.node_number, self._writes()) for k in (1, 2)}

    def _writes(self) -> list[Any]:
        return [n for n in self._nodes if n.name() == "CopySlices"]

    def node(self, node: Any) -> bool:
        """Whether this node runs."""
        return node in self._nodes

    def numbers(self, made: Iterable[int]) -> bool:
        """Whether one of the nodes of these numbers runs."""
        return not self._numbers.isdisjoint(made)

    def through(self, inputs: Iterable[Any], start: int, end: int) -> bool:
        """Whether a node made from `start` to before `end` sends a gradient to one of the nodes `inputs`."""
        return any(start <= user < end for node in inputs for user in self._users.get(node, ()))

    def leaves(self) -> set[int]:
        """Identities of the leaves, such as parameters, that get a gradient."""
        return {id(leaf) for n in self._nodes if (leaf := getattr(n, "variable", None)) is not None}


def node_of(t: Tensor) -> Any:
    """The node that a gradient of `t` arrives at; None if it needs none."""
    return compat.gradient_node(t) if t.requires_grad else None


def sources(out: Tensor, inputs: Sequence[Tensor]) -> list[bool]:
    """For each of the `inputs` of a computation, whether a gradient of its result `out` comes to it."""
    ends = [node_of(x) for x in inputs]
    todo = [node_of(out)]
    seen = {None, *todo}
    while todo:
        node = todo.pop()
        if node is None or node in ends:
            continue
        for further, _ in node.next_functions:
            if further not in seen:
                seen.add(further)
                todo.append(further)
    return [end is not None and end in seen for end in ends]
