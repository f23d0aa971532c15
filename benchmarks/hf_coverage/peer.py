"""What transformers' own tensor parallelism does with the same tiny model: `tp_plan="auto"` on two gloo ranks."""

from __future__ import annotations

import tempfile
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from benchmarks.hf_coverage.case import LOOSE
from benchmarks.hf_coverage.overrides import NOT_RUN, PARTS
from benchmarks.hf_coverage.tiny import class_name, dtype_of, tiny_batch, tiny_model
from meshplan.verify.pool import LocalPool

WORLD = 2


def run_peer(model_type: str) -> dict[str, Any]:
    """Keys: `type`, `class`, `composition` ("peer"), `outcome` (exact, wrong, failed, no plan, not built), `loss` and
    `gradients` (largest error, relative to the largest gradient of the model), `reason`."""
    found: dict[str, Any] = {"type": model_type, "class": class_name(model_type), "composition": "peer"}
    if model_type in NOT_RUN or model_type in PARTS:
        return found | {"outcome": "not built", "reason": NOT_RUN.get(model_type, "the auto class does not build it")}
    try:
        model = tiny_model(model_type)
    except Exception as error:  # the table says what
        return found | {"outcome": "not built", "reason": f"{type(error).__name__}: {error}"[:240]}
    if not getattr(model, "_tp_plan", None):
        return found | {"outcome": "no plan"}
    one = _step(model, model_type)
    try:
        with tempfile.TemporaryDirectory(prefix="meshplan-") as folder, LocalPool(WORLD, timeout=120.0) as pool:
            model.save_pretrained(folder)  # type: ignore[operator]
            ranks = pool.run(_rank, model_type, folder, world=WORLD, timeout=120.0)
    except Exception as error:  # the table says what
        return found | {"outcome": "failed", "reason": f"{type(error).__name__}: {error}".splitlines()[0][:240]}
    return found | _compared(one, ranks[0])


def _step(model: nn.Module, model_type: str) -> tuple[float, dict[str, Tensor]]:
    out = model(**tiny_batch(model_type))
    out.loss.backward()
    grads = {}
    for name, p in model.named_parameters():
        if p.grad is not None:
            grads[name] = (p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad).clone()
    loss = out.loss.detach()
    return float(loss.full_tensor() if hasattr(loss, "full_tensor") else loss), grads


def _rank(model_type: str, folder: str) -> tuple[float, dict[str, Tensor]]:
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(
        folder, distributed_config=DistributedConfig(tp_size=WORLD, tp_plan="auto"), dtype=dtype_of(model_type),
        attn_implementation="eager", experts_implementation="batched_mm",
    )  # fmt: skip
    for held in (model.config, *(m.config for m in model.modules() if hasattr(m, "config"))):
        vars(held)["use_cache"] = False
    return _step(model.train(), model_type)


def _compared(one: tuple[float, dict[str, Tensor]], rank: tuple[float, dict[str, Tensor]]) -> dict[str, Any]:
    loss = abs(one[0] - rank[0]) / max(abs(one[0]), 1e-30)
    largest = max(float(g.abs().max()) for g in one[1].values())
    apart = {}
    for name, want in one[1].items():
        have = rank[1].get(name)
        apart[name] = (
            float("inf") if have is None or have.shape != want.shape else float((have - want).abs().max()) / largest
        )
    worst = max(apart, key=lambda name: apart[name])
    found: dict[str, Any] = {"loss": loss, "gradients": apart[worst]}
    if loss <= LOOSE and apart[worst] <= LOOSE:
        return found | {"outcome": "exact"}
    return found | {"outcome": "wrong", "reason": f"{worst} is off by {apart[worst]:.1e} of the largest gradient"}
