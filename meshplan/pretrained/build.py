"""A transformers model from its folder, parallelised from the start: no rank ever holds a full copy."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from meshplan.errors import PlanError
from meshplan.lowering.parallelize import parallelize
from meshplan.models.registry import transformers_config
from meshplan.plan.plan import Plan
from meshplan.pretrained.files import SafeTensors
from meshplan.pretrained.load import load_pretrained, refuse_quantised
from meshplan.runtime.init import init_weights
from meshplan.runtime.meta import build_on_meta


def from_pretrained(
    path: str | os.PathLike[str],
    plan: Plan | Callable[[nn.Module], Plan],
    inputs: Any = None,
    *,
    model_class: Any = None,
    dtype: str | torch.dtype = "auto",
    attn_implementation: str | None = None,
    strict: bool = True,
    seed: int = 0,
    device: str | torch.device | None = None,
    regions: str | None = None,
    check: str = "values",
) -> nn.Module:
    """The transformers model that lies in the local folder `path`, parallelised under `plan`, in evaluation mode.

    It is built on meta from its `config.json`, lowered, and each rank reads its pieces of the safetensors. Values,
    dtypes and ties are those of transformers' own `from_pretrained`. Every rank calls it; call `.train()` to train.

    Arguments:
        plan: a plan, or what makes one of the (meta) model: `lambda m: mp.Plan.from_tp_plan(m, mesh=..., inputs=...)`.
        inputs: as in `parallelize`.
        model_class: a class of transformers; default `AutoModelForCausalLM`.
        dtype: of the parameters; "auto" is what the configuration says, or else the files.
        attn_implementation: `eager` or `sdpa`; default what transformers chooses.
        strict: refuse keys that are missing or unexpected. Otherwise what is missing is initialised from `seed`.
        seed, device, regions, check: as in `parallelize`.

    Raises PlanError: what `parallelize` and `load_pretrained` raise, `no-such-model`, `bad-model`.
    """
    folder = Path(path)
    config = transformers_config(str(path))
    refuse_quantised(config)
    chosen = dtype if isinstance(dtype, torch.dtype) else _dtype(dtype, config, folder)
    model = build_on_meta(lambda: _built(model_class, config, chosen, attn_implementation), seed)
    _keep_wide(model, chosen)
    _own_generation_config(model, folder)
    model.eval()
    made = plan if isinstance(plan, Plan) else plan(model)
    model = parallelize(
        model, made, inputs, seed=seed, device=device, regions=regions, check=check, init=False
    )  # fmt: skip
    if not strict:
        init_weights(model, seed)
    load_pretrained(model, folder, strict=strict)
    return model


def _built(model_class: Any, config: Any, dtype: torch.dtype, attention: str | None) -> nn.Module:
    import transformers

    # Building a model writes into its configuration.
    config = copy.deepcopy(config)
    cls: Any = model_class or transformers.AutoModelForCausalLM
    more = {} if attention is None else {"attn_implementation": attention}
    make = cls._from_config if issubclass(cls, transformers.PreTrainedModel) else cls.from_config
    try:
        return make(config, dtype=dtype, **more)
    except ValueError as error:
        raise PlanError(
            f"{cls.__name__} cannot be built from this configuration: {str(error).splitlines()[0]}",
            code="bad-model",
            legal="model_class= with a class of transformers for this model_type, attn_implementation='eager' or 'sdpa'",
        ) from error


def _dtype(name: str, config: Any, folder: Path) -> torch.dtype:
    if name != "auto":
        found = getattr(torch, name, None)
        if not isinstance(found, torch.dtype):
            raise PlanError(f"{name!r} is no dtype", code="bad-value", legal='"auto", or a dtype of torch')
        return found
    if isinstance(getattr(config, "dtype", None), torch.dtype):
        return config.dtype
    floating = [s.dtype for s in SafeTensors(folder).tensors.values() if s.dtype.is_floating_point]
    return floating[0] if floating else torch.get_default_dtype()


def _keep_wide(model: nn.Module, dtype: torch.dtype) -> None:
    """Parameters that a transformers model keeps in float32 whatever dtype was asked for."""
    plan: dict[str, torch.dtype] = getattr(model, "_get_dtype_plan", lambda dtype: {})(dtype)
    made: dict[int, nn.Parameter] = {}
    for path, module in model.named_modules():
        for name, p in module._parameters.items():
            full = f"{path}.{name}" if path else name
            wide = next((to for pattern, to in plan.items() if _matches(pattern, full)), None)
            if p is not None and wide is not None and p.dtype != wide:
                if id(p) not in made:
                    made[id(p)] = nn.Parameter(p.detach().to(wide), requires_grad=p.requires_grad)
                module._parameters[name] = made[id(p)]


def _matches(pattern: str, name: str) -> bool:
    return re.search(pattern.replace("*", ".*"), name) is not None


def _own_generation_config(model: nn.Module, folder: Path) -> None:
    if (folder / "generation_config.json").is_file() and getattr(model, "generation_config", None) is not None:
        from transformers import GenerationConfig

        model.generation_config = GenerationConfig.from_pretrained(str(folder), local_files_only=True)  # type: ignore[assignment]
