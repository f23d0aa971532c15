"""One block of attention in Triton: a stretch of queries meets a stretch of keys, and the outcome is added up.

The same functions as `meshplan.ops.attention.block`, which says what they compute, without bias and dropout. They run on
any GPU that Triton compiles for; on Hopper inputs come through tensor descriptors (TMA) into wgmma. On CPU tensors they
run where TRITON_INTERPRET=1 was set before Triton was imported.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from meshplan.errors import PlanError
from meshplan.kernels.attention.launch import Docs, backward_launches, delta_launch, finish_launch, forward_launches
from meshplan.kernels.launch import Machine
from meshplan.ops.attention.block import Span, State

__all__ = ["Span", "State", "backward", "delta", "finish", "forward", "new_state"]


def new_state(q: Tensor, v: Tensor) -> State:
    """The state of queries `q` [B, H, Lq, D] that have seen nothing yet of values like `v` [B, Hkv, Lk, Dv]."""
    rows = q.shape[:3]
    acc = q.new_zeros((*rows, v.shape[3]), dtype=torch.float32)
    return State(acc, acc.new_full(rows, float("-inf")), acc.new_zeros(rows))


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    span: Span,
    scale: float,
    state: State,
    q_docs: Tensor | None = None,
    k_docs: Tensor | None = None,
) -> None:
    """Fold the keys of one block into `state`, in place.

    Arguments:
        q: [B, H, Lq, D]; k: [B, Hkv, Lk, D]; v: [B, Hkv, Lk, Dv], H a multiple of Hkv, of one dtype of 16 or 32 bits.
        q_docs, k_docs: int32 [B, Lq] and [B, Lk], the document of each position: what is of another document, or of a
            negative one, is not seen.

    Tiles that `span` or the documents do not let see each other are not visited.

    Raises:
        PlanError: `attention-kernel` for tensors that the kernels do not take, `attention-heads` if Hkv does not divide H.
    """
    for launch in forward_launches(q, k, v, span, scale, state, _docs(q_docs, k_docs), machine(q.device)):
        launch.run()


def finish(state: State, dtype: torch.dtype, sink: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The result in `dtype` and the logarithm of each row's denominator, from a state that has seen all keys.

    Arguments:
        sink: a logit per head [H] that joins the denominator and has no value.

    Returns:
        out [B, H, Lq, Dv] and lse float32 [B, H, Lq]. A row that saw nothing is 0, and its lse -inf, or the sink.
    """
    machine(state.acc.device)
    # Values are rounded by torch where the interpreter would cut bits off.
    interpreted = triton.knobs.runtime.interpret
    out = torch.empty_like(state.acc, dtype=torch.float32 if interpreted else dtype)
    lse = torch.empty_like(state.m)
    finish_launch(state, out, lse, sink).run()
    return out.to(dtype), lse


def delta(out: Tensor, dout: Tensor) -> Tensor:
    """sum(out dout) of each row, float32 [B, H, Lq]."""
    machine(out.device)
    result = torch.empty(out.shape[:3], dtype=torch.float32, device=out.device)
    delta_launch(_unit(out), _unit(dout), result).run()
    return result


def backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    lse: Tensor,
    delta: Tensor,
    span: Span,
    scale: float,
    dq: Tensor,
    dk: Tensor,
    dv: Tensor,
    q_docs: Tensor | None = None,
    k_docs: Tensor | None = None,
) -> None:
    """Add the share that one block has in the gradients to `dq`, `dk` and `dv`, in place. Equal inputs give equal bits.

    Arguments:
        dout: [B, H, Lq, Dv] in the dtype of q; lse: of `finish`, over all keys; delta: of `delta`.
        dq, dk, dv: like q, k, v in float32.
        The others, and errors, as in `forward`.
    """
    docs = _docs(q_docs, k_docs)
    launches = backward_launches(
        q, k, v, dout.to(q.dtype), lse, delta, span, scale, dq, dk, dv, docs, machine(q.device)
    )
    for launch in launches:
        launch.run()


def machine(device: torch.device) -> Machine:
    """What the kernels run on for tensors of `device`.

    Raises:
        PlanError: `attention-kernel` if that is nothing.
    """
    return Machine.of(device, "attention", "meshplan.ops.attention.block")


def _docs(q_docs: Tensor | None, k_docs: Tensor | None) -> Docs | None:
    if q_docs is None and k_docs is None:
        return None
    if q_docs is None or k_docs is None:
        raise PlanError("documents of one side only", code="attention-kernel", legal="those of queries and of keys")
    return Docs(_unit(q_docs), _unit(k_docs))


def _unit(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()
