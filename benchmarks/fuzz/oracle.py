"""The verdict on one case: exact, refused by a code, or wrong. Refusals come before any rank runs; all else is wrong."""

from __future__ import annotations

import functools
import signal
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from benchmarks.fuzz.case import Case, build
from benchmarks.fuzz.fitness import finite, scalar_loss, unstable
from meshplan.compiler.compile import compile_core
from meshplan.compiler.lowered import Core
from meshplan.compiler.lowered_graph import Lowered
from meshplan.compiler.sites import Move, Site
from meshplan.errors import PlanError
from meshplan.mesh.spec import MeshSpec
from meshplan.plan.plan import Plan
from meshplan.verify.aligned import align
from meshplan.verify.run import verify
from meshplan.verify.simulate import cores_of, randomised

LIMIT = 60  # seconds of CPU a case may take
DIFFERS = ("not-aligned", "ranks-apart")


@dataclass(frozen=True)
class Verdict:
    """What came of a case.

    Attributes:
        kind: `exact`, `refused`, `wrong`, or `discarded` where the program itself is not fit to be compared.
        code: of the refusal, or what went wrong in one word.
        detail: the message.
        real: whether it also ran on real ranks.
    """

    kind: str
    code: str = ""
    detail: str = ""
    real: bool = False


def judge(case: Case, real: bool = False, thorough: bool = False) -> Verdict:
    """Lower the case and run it on simulated ranks beside one device: results, outputs, gradients.

    Arguments:
        real: also on processes, with `mp.verify`, where the case has at most 4 ranks and a loss.
        thorough: also check the rules by value though ranks agree, and print the graph in every form.
    """
    try:
        with _limited(LIMIT):
            return _judge(case, real, thorough)
    except TimeoutError:
        return Verdict("wrong", "hang", f"no verdict within {LIMIT} s")
    except Exception as error:
        return Verdict("wrong", "crash", f"{type(error).__name__}: {error}\n{traceback.format_exc()}")


def _judge(case: Case, real: bool, thorough: bool) -> Verdict:
    model, batch = case.built(), case.batch()
    try:
        plan = case.made_plan()
        spec = MeshSpec.resolve(plan.mesh, case.world)
        if thorough:
            low = Lowered(model, compile_core(model, plan, spec, batch), 0)
            low.explain()
            low.to_json()
        align(model, plan, case.world, batch, case.seed)
    except PlanError as error:
        if error.code not in DIFFERS:
            return Verdict("refused", error.code, str(error))
        return _apart(case, plan, spec, error)
    if "for layer in" in case.source():
        try:
            once = compile_core(model, plan, spec, batch, check="off")
        except PlanError as error:
            return Verdict("refused", error.code, str(error))
        each = compile_core(model, plan, spec, batch, check="off", fold=False)
        if _program(once) != _program(each):
            # Not the same one: what a layer gathers inside is not known outside of its equals. Then it has to hold as it is.
            folded = iter(cores_of(model, plan, spec, case.batch(), case.world, fold=True))
            try:
                align(model, plan, case.world, case.batch(), case.seed, tamper=lambda core: next(folded))
            except PlanError as error:
                return Verdict("wrong", "folded", str(error))
    if not real or case.world > 4 or scalar_loss(randomised(model, case.seed), batch) is None:
        return Verdict("exact")
    return _on_ranks(case, plan)


def _apart(case: Case, plan: Plan, spec: MeshSpec, error: PlanError) -> Verdict:
    """Ranks differ from one device: whose fault is it?"""
    model, batch = case.built(), case.batch()
    single = randomised(model, case.seed)
    if not finite(single, batch, case.seed):
        return Verdict("discarded", "not finite", str(error))
    if unstable(single, batch, case.seed):
        return Verdict("discarded", "unstable", str(error))
    try:
        compile_core(model, plan, spec, batch)
    except PlanError as refusal:  # what `parallelize` would have said: simulated ranks were not asked
        return Verdict("refused", refusal.code, str(refusal))
    return Verdict("wrong", error.code, str(error))


def _on_ranks(case: Case, plan: Plan) -> Verdict:
    factory = functools.partial(build, case.source(), case.blocks[-1].name)
    try:
        receipt = verify(
            factory, plan, case.world, inputs=functools.partial(_batch, case), seed=case.seed, model_name="fuzz",
            timeout=LIMIT,
        )  # fmt: skip
    except PlanError as error:
        return Verdict("wrong" if error.code.startswith("rank") else "refused", error.code, str(error), True)
    failed = [check for check in receipt.checks if not check.passed]
    return Verdict("wrong", "ranks", "; ".join(map(str, failed)), True) if failed else Verdict("exact", real=True)


def _batch(case: Case) -> dict[str, Tensor]:
    return case.batch()


def _program(core: Core) -> Any:
    """What a program does, without the order it was found in. Who owns a gradient that never comes does not count."""
    p = core.program
    alive = {e.site for e in p.events if e.what == "move" and e.grad}

    def moved(site: Site, m: Move) -> tuple[str, str, str, str, int, object]:
        ends = ["whole" if k in "IRN" and site not in alive else k for k in (m.src, m.dst)]
        return str(site), m.axis, ends[0], ends[1], m.dim, m.parts

    boundaries = sorted((moved(b.site, b.move) for b in p.boundaries), key=str)
    edits = {
        path: {n: ([moved(Site("call", path, f"{n}:{at}"), m) for at, m in e.converts], e.replacement) for n, e in found.items()}
        for path, found in p.edits.items() if found
    }  # fmt: skip
    return boundaries, edits, core.params, p.outputs


@contextmanager
def _limited(seconds: int) -> Iterator[None]:
    """Raises TimeoutError after so many CPU seconds of this process, or ten times as many that it waits."""

    def stop(number: int, frame: Any) -> None:
        raise TimeoutError

    clocks = ((signal.SIGPROF, signal.ITIMER_PROF, seconds), (signal.SIGALRM, signal.ITIMER_REAL, 10 * seconds))
    before = [signal.signal(number, stop) for number, _, _ in clocks]
    for _, clock, limit in clocks:
        signal.setitimer(clock, limit)
    try:
        yield
    finally:
        for (number, clock, _), old in zip(clocks, before, strict=True):
            signal.setitimer(clock, 0)
            signal.signal(number, old)
