"""meshplan: a sharding-plan compiler for PyTorch. This is the public surface; everything else may change.

plan = mp.load_plan("llama3/tp_sp_fsdp")                 # annotate
print(mp.lower(model, plan, world_size=8).explain())     # look, before any GPU runs
mp.verify(factory, plan, nproc=4)                        # prove, on a laptop
model = mp.parallelize(model, plan)                      # apply, under torchrun
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from meshplan.errors import PlanError, Where
from meshplan.plan.placements import P, R, S

if TYPE_CHECKING:
    from meshplan.compiler.lowered_graph import Lowered
    from meshplan.lowering.lower import lower
    from meshplan.lowering.parallelize import parallelize
    from meshplan.plan.annotate import place
    from meshplan.plan.plan import Plan
    from meshplan.plan.rules import Input, Rule
    from meshplan.plan.sections import Compile, Context, Experts, Fsdp, Pipeline, Recompute
    from meshplan.plan.yaml_io import load_plan
    from meshplan.pretrained.build import from_pretrained
    from meshplan.pretrained.load import load_pretrained
    from meshplan.pretrained.save import save_pretrained
    from meshplan.runtime.batch import lowered, shard_batch, token_mean
    from meshplan.runtime.checkpoint import load, load_plan_of, save
    from meshplan.runtime.clip import clip_grad_norm_
    from meshplan.runtime.init import init_weights
    from meshplan.runtime.loads import expert_load
    from meshplan.runtime.meta import build_on_meta as meta
    from meshplan.runtime.session import accumulate
    from meshplan.search.auto import auto_plan
    from meshplan.verify.run import verify

__version__ = "0.1.0"

# Where each public name lives; looked up on first use, so that `meshplan ranks` starts without importing torch.
_HOMES = {
    "Lowered": "meshplan.compiler.lowered_graph",
    "lower": "meshplan.lowering.lower",
    "parallelize": "meshplan.lowering.parallelize",
    "place": "meshplan.plan.annotate",
    "Plan": "meshplan.plan.plan",
    "Input": "meshplan.plan.rules",
    "Rule": "meshplan.plan.rules",
    **dict.fromkeys(("Compile", "Context", "Experts", "Fsdp", "Pipeline", "Recompute"), "meshplan.plan.sections"),
    "load_plan": "meshplan.plan.yaml_io",
    "from_pretrained": "meshplan.pretrained.build",
    "load_pretrained": "meshplan.pretrained.load",
    "save_pretrained": "meshplan.pretrained.save",
    "auto_plan": "meshplan.search.auto",
    "lowered": "meshplan.runtime.batch",
    "shard_batch": "meshplan.runtime.batch",
    "token_mean": "meshplan.runtime.batch",
    "load": "meshplan.runtime.checkpoint",
    "load_plan_of": "meshplan.runtime.checkpoint",
    "save": "meshplan.runtime.checkpoint",
    "clip_grad_norm_": "meshplan.runtime.clip",
    "init_weights": "meshplan.runtime.init",
    "expert_load": "meshplan.runtime.loads",
    "meta": "meshplan.runtime.meta",
    "accumulate": "meshplan.runtime.session",
}
_RENAMED = {"meta": "build_on_meta"}

__all__ = [
    "Compile", "Context", "Experts", "Fsdp", "Input", "Lowered", "P", "Pipeline", "Plan", "PlanError", "R", "Recompute",
    "Rule", "S", "Where", "accumulate", "auto_plan", "clip_grad_norm_", "expert_load", "from_pretrained", "init_weights", "load",
    "load_plan", "load_plan_of", "load_pretrained", "lower", "lowered", "meta", "parallelize", "place", "save", "save_pretrained",
    "shard_batch", "token_mean", "verify",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name == "verify":  # the package is callable: see its docstring
        return importlib.import_module("meshplan.verify")
    if name not in _HOMES:
        raise AttributeError(f"module 'meshplan' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), _RENAMED.get(name, name))
    globals()[name] = value
    return value
