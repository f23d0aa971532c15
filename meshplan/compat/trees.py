"""Nested containers of tensors: torch's own flattening, which is private."""

from __future__ import annotations

from typing import Any


def flatten(tree: Any) -> tuple[list[Any], Any]:
    """Leaves and structure of nested lists, tuples, dicts and registered containers. Private: `torch.utils._pytree`."""
    from torch.utils import _pytree

    return _pytree.tree_flatten(tree)


def unflatten(leaves: list[Any], structure: Any) -> Any:
    """The inverse of `flatten`."""
    from torch.utils import _pytree

    return _pytree.tree_unflatten(leaves, structure)


def flatten_with_path(tree: Any) -> list[tuple[str, Any]]:
    """Leaves with their key path as dotted text: `("0", x)`, `("past.1", y)`, `("logits", z)`; a bare leaf has path ""."""
    from torch.utils import _pytree

    def key(k: Any) -> str:
        for attr in ("key", "idx", "name"):
            if hasattr(k, attr):
                return str(getattr(k, attr))
        return str(k)

    return [(".".join(key(k) for k in path), leaf) for path, leaf in _pytree.tree_flatten_with_path(tree)[0]]
