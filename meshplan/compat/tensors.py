"""Storage, assertions and fused operators of plain tensors: private or moving parts."""

from __future__ import annotations

import torch


def storage_key(tensor: object) -> int:
    """A number that two tensors share exactly while they are views of one storage. Unlike `data_ptr()` it also tells
    meta tensors apart. Valid as long as the storage lives (`UntypedStorage._cdata`, torch 2.11 to 2.13)."""
    return tensor.untyped_storage()._cdata  # type: ignore[attr-defined]


def assert_on_device(condition: torch.Tensor) -> None:
    """Queue an assertion on the condition's device, without a wait: as torch's own index checks on CUDA do. Replaces
    `torch._assert_async` (torch 2.11 to 2.13)."""
    torch._assert_async(condition)


def foreach_norm(tensors: list[torch.Tensor], order: float, dtype: torch.dtype) -> list[torch.Tensor]:
    """The `order`-norm of each tensor, accumulated and returned in `dtype`, in a few kernels; tensors share device and
    dtype. Replaces `torch._foreach_norm` (its `dtype` argument: torch 2.11 to 2.13)."""
    return list(torch._foreach_norm(tensors, order, dtype=dtype))


def foreach_scale_(tensors: list[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply each tensor by the 0-dim `factor`, in place, in a few kernels. Replaces `torch._foreach_mul_`."""
    torch._foreach_mul_(tensors, factor)


def packed(tensors: list[torch.Tensor]) -> torch.Tensor:
    """One 1-D tensor with the elements of all `tensors`, which share dtype and device, in turn. Replaces
    `torch._utils._flatten_dense_tensors` (the operator beneath it: torch 2.11 to 2.13)."""
    return torch._C._nn.flatten_dense_tensors(tensors)


def unpack_into(tensors: list[torch.Tensor], flat: torch.Tensor) -> None:
    """Copy what `packed` packed back into `tensors`, in a few kernels (`torch._foreach_copy_`, torch 2.11 to 2.13)."""
    torch._foreach_copy_(tensors, torch._C._nn.unflatten_dense_tensors(flat, tensors))


def detached(t: torch.Tensor) -> torch.Tensor:
    """`t.detach()` that no function mode sees. Private: `DisableTorchFunction`."""
    with torch._C.DisableTorchFunction():
        return t.detach()
