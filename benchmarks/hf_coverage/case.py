"""One model type on one mesh: planned by `mp.auto_plan`, lowered, and compared with one device."""

from __future__ import annotations

import math
import signal
import time
from collections.abc import Iterable, Iterator, Set
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

import meshplan as mp
from benchmarks.hf_coverage.overrides import FLOAT32, NOT_RUN
from benchmarks.hf_coverage.tiny import class_name, dtype_of, lifted, lifted_model, tiny_batch, tiny_model
from meshplan.compiler.bind import bind
from meshplan.errors import PlanError
from meshplan.plan.placements import Shard
from meshplan.verify.aligned import align
from meshplan.verify.pool import RankPool

COMPOSITIONS: dict[str, dict[str, Any]] = {
    "tp2": {"mesh": {"tp": 2}},
    "tp2+sp x dp_shard2": {"mesh": {"dp_shard": 2, "tp": 2}, "sequence": True},
}
TIGHT, LOOSE = 1e-9, 1e-5
"""Largest relative error that counts as exact: of what is computed in float64, and where a model casts to float32."""
GAVE_UP = "gave up"
CRASHED = ("rank-died", "rank-failed", "rank-timeout")
"""Codes of `PlanError` that refuse nothing: processes ended."""
SOLVER_SECONDS = 8.0


def run(model_type: str, composition: str, ranks: bool = False, seconds: int = 600) -> dict[str, Any]:
    """What became of it, as JSON values.

    Keys: `type`, `class`, `composition`, `built`, `planned`; `outcome` (exact, wrong, refused, failed, gave up, not built);
    `reason` and `code` of what was not exact; `loss` and `gradients` (relative errors; with `checked` calls, the largest of any
    call); `checked` (`calls`: every call on simulated ranks, in one process; `ranks`: processes over gloo); `share` of the bytes
    of matrices in use that is cut over tp; `regions`; `plan s`, `total s`.

    Arguments:
        ranks: compare on gloo ranks even where simulated ranks agreed.
        seconds: after which the case is given up.
    """
    found: dict[str, Any] = {"type": model_type, "class": class_name(model_type), "composition": composition}
    found |= {"built": False, "planned": False}
    start = time.perf_counter()
    if model_type in NOT_RUN:
        return found | {"outcome": "not built", "reason": NOT_RUN[model_type]}
    try:
        with _limit(seconds):
            _case(found, model_type, composition, ranks)
    except TimeoutError as error:
        found |= {"outcome": GAVE_UP, "reason": _first_line(error)}
    except PlanError as error:
        outcome = "failed" if error.code in CRASHED else "refused"
        found |= {"outcome": outcome, "code": error.code, "reason": _first_line(error)}
    except Exception as error:  # the table says what
        outcome = "failed" if found["built"] else "not built"
        found |= {"outcome": outcome, "reason": f"{type(error).__name__}: {_first_line(error)}"}
    return found | {"total s": round(time.perf_counter() - start, 1)}


def _case(found: dict[str, Any], model_type: str, composition: str, ranks: bool) -> None:
    model, batch = tiny_model(model_type), tiny_batch(model_type)
    model(**batch).loss.backward()
    used = {name for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    found["built"] = True
    options = COMPOSITIONS[composition]
    world = math.prod(options["mesh"].values())
    start = time.process_time()
    plan = mp.auto_plan(model, inputs=batch, seconds=SOLVER_SECONDS, **options)
    found["plan s"] = round(time.process_time() - start, 1)
    found["planned"] = True
    found |= {
        "share": round(share(model, plan, used), 3),
        "regions": "dtensor" if plan.regions == "dtensor" else "local",
    }
    doubtful = ranks or model_type in FLOAT32
    if not doubtful:
        try:
            aligned = align(model, plan, world, inputs=batch)
            found |= {"outcome": "exact", "loss": aligned.distance, "gradients": aligned.distance, "checked": "calls"}
            doubtful = aligned.distance > LOOSE
        except PlanError as error:
            # Rounding that a model blows up, or a fault: real ranks decide.
            doubtful, found["calls differ"] = True, _first_line(error)
    if doubtful:
        _on_ranks(found, model_type, plan, world)


def _on_ranks(found: dict[str, Any], model_type: str, plan: mp.Plan, world: int, exactly: bool = False) -> None:
    factory, rtol, dtype = (
        (lifted_model, TIGHT, torch.float64) if exactly else (tiny_model, LOOSE, dtype_of(model_type))
    )
    receipt = mp.verify(
        partial(factory, model_type), plan, nproc=world, inputs=partial(tiny_batch, model_type), steps=1, rtol=rtol,
        dtype=dtype, optimizer=_sgd,
    )  # fmt: skip
    loss, gradients = receipt.check("loss"), receipt.check("gradients")
    found |= {"loss": loss.error, "gradients": gradients.error, "checked": "ranks"}
    failed = [check for check in receipt.checks if not check.passed]
    found.pop("reason", None)
    found["outcome"] = "wrong" if not (loss.passed and gradients.passed) else "exact" if not failed else "failed"
    if failed:
        found["reason"] = "; ".join(f"{check.name}: {check.detail}" for check in failed)
    if found["outcome"] == "wrong" and not exactly:
        # Rounding that the model blows up, or a fault: without its casts to float32 there is no rounding to speak of.
        before = f"in float32 off by {max(loss.error or 0.0, gradients.error or 0.0):.0e}"
        with lifted(), RankPool(world, timeout=600.0):  # ranks of its own: a process that is lifted stays so
            _on_ranks(found, model_type, plan, world, exactly=True)
        found |= {"checked": "lifted", "reason": "; ".join([before, *filter(None, [found.get("reason")])])}


def _sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """A step as large as the gradient: one that divides by it would blow up the rounding of those near zero."""
    return torch.optim.SGD(parameters, lr=0.1, foreach=False)


def share(model: nn.Module, plan: mp.Plan, used: Set[str]) -> float:
    """Of the bytes of the parameters `used` (those that get a gradient) with at least two dims, the part that the plan cuts
    over tp."""
    total = cut = 0
    for param in bind(plan, model).params.values():
        if len(param.shape) > 1 and not used.isdisjoint(param.names):
            size = math.prod(param.shape)
            total += size
            cut += size if isinstance(param.placements.get("tp"), Shard) else 0
    return cut / total if total else 1.0


def _first_line(error: BaseException) -> str:
    text = str(error).splitlines()
    line = text[0] if text else ""
    return line.rpartition("site-packages/")[2][:240]


@contextmanager
def _limit(seconds: int) -> Iterator[None]:
    def late(*_: Any) -> None:
        raise TimeoutError(f"gave up after {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def quiet() -> None:
    """One thread, and none of transformers' advice."""
    import warnings

    import transformers

    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
