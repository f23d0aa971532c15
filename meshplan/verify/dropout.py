"""Dropout of the single-device program from meshplan's own streams, so that it drops what the ranks drop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from meshplan.ops.dropout import DropoutStreams, dropout
from meshplan.ops.dropout_attention import scaled_dot_product_attention


@contextmanager
def single_device_dropout(model: nn.Module, seed: int) -> Iterator[DropoutStreams]:
    """Within the block `model` draws its dropout masks from `DropoutStreams(seed)`, keyed by the path of the innermost
    module that runs; call `begin_step` on the yielded streams before each step. The model must be on one device."""
    streams, running = DropoutStreams(seed), [""]
    handles = []
    for path, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(_enter(running, path)))
        handles.append(module.register_forward_hook(_leave(running), always_call=True))
    try:
        with _OwnDropout(streams, running):
            yield streams
    finally:
        for handle in handles:
            handle.remove()


def _enter(running: list[str], path: str) -> Callable[..., None]:
    def hook(*_: object) -> None:
        running.append(path)

    return hook


def _leave(running: list[str]) -> Callable[..., None]:
    def hook(*_: object) -> None:
        running.pop()

    return hook


class _OwnDropout(TorchFunctionMode):
    def __init__(self, streams: DropoutStreams, running: list[str]) -> None:
        super().__init__()
        self.streams, self.running = streams, running

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.dropout:
            return self._dropout(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            return self._attention(*args, **kwargs)
        return func(*args, **kwargs)

    def _dropout(self, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or p == 0.0:
            return input
        return dropout(
            input,
            p,
            training,
            key=self.streams.key(self.running[-1]),
            global_shape=input.shape,
            offsets=[0] * input.ndim,
            inplace=inplace,
        )

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        **kwargs: Any,
    ) -> Tensor:
        if dropout_p == 0.0:
            return F.scaled_dot_product_attention(query, key, value, attn_mask=attn_mask, **kwargs)
        shape = (*query.shape[:-1], key.shape[-2])
        return scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask,
            dropout_p,
            **kwargs,
            stream=self.streams.key(self.running[-1]),
            global_shape=shape,
            offsets=[0] * len(shape),
        )
