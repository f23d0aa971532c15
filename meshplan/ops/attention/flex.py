"""torch's `flex_attention` as an operator that a compiler can see, with its block mask read as a program (mask_program.py).

The operator is scaled dot-product attention under the boolean mask that the mask function says, of every pair of positions: a
block mask is a way to compute that, and says nothing of its own.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import handle_torch_function

from meshplan import compat
from meshplan.ops.attention.mask_program import MaskProgram, is_identity, name_of, read_mask, refused
from meshplan.ops.attention.sequence import Run
from meshplan.ops.dropout import Runs


def flex_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    program: MaskProgram | None,
    scale: float | None,
    enable_gqa: bool,
    *captured: Tensor,
) -> Tensor:
    """`flex_attention(query, key, value, block_mask=..., scale=scale, enable_gqa=enable_gqa)`.

    Arguments:
        query: [B, H, Q, D]; key: [B, Hkv, K, D]; value: [B, Hkv, K, Dv].
        program: the mask function; None sees everything. captured: what it captured.

    Returns:
        [B, H, Q, Dv]. Without values (fake or meta tensors) the mask is not evaluated.
    """
    if compat.current_function_mode() is not None:
        given: tuple[Any, ...] = (query, key, value, program, scale, enable_gqa, *captured)
        return handle_torch_function(flex_call, (query, key, value, *captured), *given)  # type: ignore[no-any-return]
    seen = sees((query, program, captured), key.shape[2])
    mask = None if seen is None else seen((0, query.shape[1]), torch.arange(query.shape[2], device=query.device))
    return F.scaled_dot_product_attention(query, key, value, mask, scale=scale, enable_gqa=enable_gqa)


@dataclass(frozen=True)
class Sees:
    """What the mask function lets this rank's elements and heads see.

    Attributes:
        batch, heads: int64, the numbers that they have on one device; columns: of keys.
    """

    program: MaskProgram
    captured: tuple[Tensor, ...]
    batch: Tensor
    heads: Tensor
    columns: int

    def __call__(self, heads: Run, rows: Tensor) -> Tensor:
        """bool [B or 1, heads or 1, rows, columns]: of some of the heads, and queries at positions int64 [rows]."""
        every = torch.arange(self.columns, device=rows.device)
        return self.program.evaluate(self.captured, self.batch, self.heads[heads[0] : heads[1]], rows, every)


def sees(
    of: tuple[Tensor, MaskProgram | None, tuple[Tensor, ...]], columns: int, batch: int | Runs = 0, head: int | Runs = 0
) -> Sees | None:
    """What a rank's queries see; None for everything, and where nothing has a value.

    Arguments:
        of: the query [B, H, Q, D], the mask function and what it captured.
        columns: how many keys there are.
        batch, head: where the rank's elements and query heads begin among those of one device, or their runs.
    """
    query, program, captured = of
    if program is None or any(t.is_meta or compat.is_fake(t) for t in (query, *captured)):
        return None
    # What counts no elements takes the rows of what it captured that are this rank's own.
    elements = _numbers(batch if program.counts_batch else 0, query.shape[0], query.device)
    return Sees(program, captured, elements, _numbers(head, query.shape[1], query.device), columns)


def _numbers(at: int | Runs, size: int, device: torch.device) -> Tensor:
    """int64 [size]: the numbers from `at` on, or those of its runs."""
    runs = ((at, size),) if isinstance(at, int) else at
    return torch.cat([torch.arange(first, first + length, device=device) for first, length in runs])


def flex_on_rank(
    args: tuple[Any, ...], batch: int | Runs, head: int | Runs, columns: int | None = None
) -> dict[str, Any]:
    """The arguments of `flex_call` as those of `scaled_dot_product_attention`, with `sees` in the place of a mask.

    Arguments:
        batch, head: as in `sees`; columns: how many keys there are, by default those at hand.
    """
    query, key, value, program, scale, enable_gqa, *captured = args
    every = key.shape[2] if columns is None else columns
    seen = sees((query, program, tuple(captured)), every, batch, head)
    return {"query": query, "key": key, "value": value, "sees": seen, "scale": scale, "enable_gqa": enable_gqa}


def taken_whole() -> dict[str, Any]:
    """What takes calls while one device's program is read: tensors have their true sizes, and a block mask has to fit them."""
    return {"flex_attention": _whole, "create_block_mask": _described}


def taken_on_rank() -> dict[str, Any]:
    """What takes calls on a rank, whose queries may be a part of those that the block mask was made for."""
    return {"flex_attention": _on_rank, "create_block_mask": _described}


def taken_unedited() -> dict[str, Any]:
    """What takes calls on a rank in whose module nothing was edited: torch's own operator computes what is meant, but for inputs
    that want a gradient on the CPU, of which it has none."""
    return {"flex_attention": _unedited, "create_block_mask": _described}


def _unedited(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
    differentiated = any(t.requires_grad for t in (query, key, value))
    taker = _on_rank if query.device.type == "cpu" and differentiated else compat.own_flex
    return taker(query, key, value, *args, **kwargs)


def _attention(
    query: Tensor, key: Tensor, value: Tensor, score_mod: Any = None, block_mask: Any = None, scale: float | None = None,
    enable_gqa: bool = False, return_lse: bool = False, kernel_options: Any = None, *, return_aux: Any = None,
) -> Any:  # fmt: skip
    if return_lse or any(return_aux or ()):
        raise refused("its log-sum-exp or maxima asked for", "the output alone; return_lse=False, return_aux=None")
    if score_mod is not None and not is_identity(score_mod, query):
        raise refused(
            f"the score function {name_of(score_mod)}",
            "no score_mod; a bias by scaled_dot_product_attention(attn_mask=...)",
        )
    if {t.dim() for t in (query, key, value)} != {4} or query.shape[0] != key.shape[0]:
        shapes = ", ".join(str(list(t.shape)) for t in (query, key, value))
        raise refused(f"tensors of {shapes}", "[B, H, Q, D], [B, Hkv, K, D] and [B, Hkv, K, Dv]")
    program, captured = (None, []) if block_mask is None else read_mask(block_mask.mask_mod, query.device)
    return flex_call(query, key, value, program, scale, enable_gqa, *captured)


def _on_rank(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
    """A log-sum-exp that only ranks are asked for (transformers asks on GPUs, and hands it on as weights nobody reads; a program
    is read on the CPU) is a tensor without values: to compute with it fails."""
    aux, lse = kwargs.pop("return_aux", None), kwargs.pop("return_lse", False)
    if getattr(aux, "max_scores", False):
        kwargs["return_aux"] = aux
    out = _attention(query, key, value, *args, **kwargs)
    if not (lse or getattr(aux, "lse", False)):
        return out
    with compat.without_function_modes():
        none = torch.empty(query.shape[:3], dtype=torch.float32, device="meta")
    if aux is not None:
        from torch.nn.attention.flex_attention import AuxOutput

        return out, AuxOutput(lse=none, max_scores=None)
    return out, none


def _whole(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    block_mask = args[1] if len(args) > 1 else kwargs.get("block_mask")
    if block_mask is not None and tuple(block_mask.shape[-2:]) != (query.shape[-2], key.shape[-2]):
        raise refused(
            f"a block mask for {' x '.join(map(str, block_mask.shape[-2:]))} positions, where there are "
            f"{query.shape[-2]} x {key.shape[-2]}", "a block mask made for the lengths at hand",
        )  # fmt: skip
    return _attention(query, key, value, *args, **kwargs)


def _described(mask_mod: Any, B: int | None, H: int | None, Q_LEN: int, KV_LEN: int, *args: Any, **kwargs: Any) -> Any:
    return _described_class()((mask_mod, B, H, Q_LEN, KV_LEN, *args), kwargs)


@functools.cache
def _described_class() -> type:
    from torch.nn.attention.flex_attention import BlockMask, create_block_mask

    class Described(BlockMask):
        """A block mask of which only the function is known yet; the blocks are made when torch's own operator asks for them."""

        def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.mask_mod, self._asked = args[0], (args, kwargs)

        @property
        def shape(self) -> tuple[int, ...]:
            _, batch, heads, rows, columns = self._asked[0][:5]
            return (batch or 1, heads or 1, rows, columns)

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__") or name == "_asked":
                raise AttributeError(name)
            if compat.flex_takers() is not None:
                raise refused(f"a block mask of which the model reads {name}", "a model that only hands it on")
            args, kwargs = self._asked
            self.__dict__.update(create_block_mask(*args, **kwargs).__dict__)
            return self.__dict__[name]

        def __repr__(self) -> str:
            return f"block mask of {name_of(self.mask_mod)} {self.shape}"

    return Described
