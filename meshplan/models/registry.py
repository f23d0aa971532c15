"""From what a user writes after `--model` to a function that builds the model."""

from __future__ import annotations

import copy
import difflib
import importlib
import inspect
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

from meshplan.errors import PlanError
from meshplan.models.deepseek import deepseek_tiny, deepseek_v3
from meshplan.models.gpt import gpt_tiny
from meshplan.models.gpt_oss import gpt_oss_20b, gpt_oss_120b, gpt_oss_tiny
from meshplan.models.hybrid import EXAMPLE, HybridConfig, hybrid, hybrid_large
from meshplan.models.llama import llama3_8b, llama31_405b, llama_tiny
from meshplan.models.moe_llama import mixtral_8x7b, mixtral_tiny, qwen3_30b_a3b, qwen3_235b_a22b, qwen3_moe_tiny

Factory = Callable[[], nn.Module]

MODELS: dict[str, Factory] = {
    "gpt-tiny": gpt_tiny,
    "llama-tiny": llama_tiny,
    "llama3-8b": llama3_8b,
    "llama3.1-405b": llama31_405b,
    "mixtral-tiny": mixtral_tiny,
    "mixtral-8x7b": mixtral_8x7b,
    "qwen3-moe-tiny": qwen3_moe_tiny,
    "qwen3-30b-a3b": qwen3_30b_a3b,
    "qwen3-235b-a22b": qwen3_235b_a22b,
    "deepseek-tiny": deepseek_tiny,
    "deepseek-v3": deepseek_v3,
    "gpt-oss-tiny": gpt_oss_tiny,
    "gpt-oss-20b": gpt_oss_20b,
    "gpt-oss-120b": gpt_oss_120b,
    "hybrid-tiny": partial(hybrid, EXAMPLE),
    "hybrid-large": partial(hybrid_large, EXAMPLE),
}

ATTENTIONS = ("eager", "sdpa")
"""Attentions of transformers that are torch calls, which a plan can be lowered through."""

HYBRIDS = {"tiny": hybrid, "large": hybrid_large}
"""Sizes of the blocks of a pattern."""

_FORMS = "a shipped name, package.module:factory, hybrid:PATTERN, or hf:path/to/config.json"


def resolve_model(name: str) -> Factory:
    """The zero-argument factory that `name` stands for. Nothing is built here.

    Arguments:
        name: a key of `MODELS`; or `package.module:factory`, which **imports and later calls code that the user named
            on purpose** (modules are also looked for in the working directory, as `python -m` does); or
            `hf:path/to/config.json` (a file, or a folder holding one), a transformers causal language model built with
            random weights from that local file alone: no download, no weights, and never any remote code. After a `?`
            it takes the attention to use: `hf:path?attn_implementation=eager`; or `hybrid:PATTERN`, a model of the
            blocks that the letters name (`meshplan.models.hybrid`), and `hybrid:PATTERN?size=large` one of large blocks.

    Raises:
        PlanError: `no-such-model` if nothing has that name, `bad-model` if what has it cannot serve as a factory.
    """
    if name in MODELS:
        return MODELS[name]
    if name.startswith("hf:"):
        return _hugging_face(name.removeprefix("hf:"))
    if name.startswith("hybrid:"):
        return _hybrid(name.removeprefix("hybrid:"))
    if ":" in name:
        return _imported(name)
    near = difflib.get_close_matches(name, MODELS, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    raise PlanError(
        f"no model is called {name!r}{hint}", code="no-such-model", legal=f"{_FORMS}; shipped: {', '.join(MODELS)}"
    )


def _imported(name: str) -> Factory:
    module_name, _, attribute = name.partition(":")
    if not module_name or not attribute or module_name.startswith("."):
        raise PlanError(f"{name!r} names no factory", code="no-such-model", legal=_FORMS)
    if os.getcwd() not in sys.path and "" not in sys.path:
        # A console script, unlike `python -m`, does not see the folder it is started in.
        sys.path.insert(0, os.getcwd())
    try:
        found: object = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name == error.name or module_name.startswith(f"{error.name}.")):
            raise  # the user's module exists, and misses something of its own: their traceback says it best
        raise PlanError(f"no module {error.name!r} for model {name!r}", code="no-such-model", legal=_FORMS) from None
    for part in attribute.split("."):
        if not hasattr(found, part):
            near = difflib.get_close_matches(part, dir(found), n=3)
            raise PlanError(
                f"{module_name} has no {attribute!r}", code="no-such-model", legal=near or "a callable of that module"
            )
        found = getattr(found, part)
    return _checked_factory(name, found)


def _checked_factory(name: str, found: object) -> Factory:
    if not callable(found):
        raise PlanError(
            f"{name!r} is a {type(found).__name__}, not a factory", code="bad-model", legal="a zero-argument callable"
        )
    try:
        needed = [
            p.name
            for p in inspect.signature(found).parameters.values()
            if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        ]
    except ValueError:  # a builtin without a signature: calling it will tell
        needed = []
    if needed:
        raise PlanError(
            f"{name!r} needs arguments: {', '.join(needed)}", code="bad-model", legal="a zero-argument callable"
        )
    return found


def _hybrid(name: str) -> Factory:
    pattern, asked, size = name.partition("?size=")
    if asked and size not in HYBRIDS:
        raise PlanError(f"patterns have no size {size!r}", code="bad-model", legal=", ".join(HYBRIDS))
    HybridConfig(pattern=pattern)  # refuses other letters
    return partial(HYBRIDS[size or "tiny"], pattern)


def _hugging_face(name: str) -> Factory:
    path, asked, attention = name.partition("?attn_implementation=")
    if asked and attention not in ATTENTIONS:
        raise PlanError(f"attn_implementation={attention!r}", code="bad-model", legal=", ".join(ATTENTIONS))
    config = transformers_config(path)
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise PlanError(
            f"transformers has no causal language model of type {config.model_type!r}",
            code="bad-model",
            legal="a causal language model's config.json",
        )

    options: dict[str, Any] = {"attn_implementation": attention} if asked else {}

    def factory() -> nn.Module:
        # Building a model writes into its configuration: each call gets a fresh one.
        return AutoModelForCausalLM.from_config(copy.deepcopy(config), trust_remote_code=False, **options)

    return factory


def transformers_config(path: str) -> Any:
    """The configuration at `path`, a `config.json` or a folder that holds one: read locally, remote code is never run.

    Raises:
        PlanError: `no-such-model` if there is none, `bad-model` if transformers cannot read it by itself.
    """
    file = Path(path)
    file = file / "config.json" if file.is_dir() else file
    if not file.is_file():
        raise PlanError(f"no configuration file at {path!r}", code="no-such-model", legal="hf:path/to/config.json")
    try:
        from transformers import AutoConfig
    except ImportError:
        raise PlanError(
            "hf: models need the transformers package", code="bad-model", legal="pip install transformers"
        ) from None
    try:
        return AutoConfig.from_pretrained(str(file), local_files_only=True, trust_remote_code=False)
    except (ValueError, KeyError, OSError) as error:
        raise PlanError(
            f"{path!r} is no configuration transformers can read by itself: {str(error).splitlines()[0]}",
            code="bad-model",
            legal="a config.json whose model_type transformers ships; remote code is never run",
        ) from error
