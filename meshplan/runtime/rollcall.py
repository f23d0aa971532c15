"""A roll-call of all ranks through the store: everyone is here and agrees to go on, or everyone raises, quickly.

Collectives block until the process group's time-out when a rank does not come; the store does not. No state is kept in
the process: rounds are counted in the store, so a call that was given up does not put the ranks out of step.
"""

from __future__ import annotations

import base64
import hashlib
import json
import zlib
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from meshplan import compat
from meshplan.errors import PlanError, Where

GO, GIVEN_UP = "go", "given up"


@dataclass(frozen=True)
class Ballot:
    """What one or more ranks said: `rank` is one of those that said it."""

    rank: int
    value: Any


def world_size() -> int:
    """Ranks in the default process group; 1 without one."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def roll_call(topic: str, value: Any, *, timeout: float = 15.0) -> list[Ballot]:
    """Wait until every rank of the default group has called this with the same `topic`; return what they said.

    Arguments:
        topic: what the ranks agree on, the same on all ranks.
        value: anything JSON can carry. Equal values are sent and returned once.
        timeout: seconds to wait for the others.

    Returns the distinct values, in rank-independent order. Every rank sends O(1) messages.
    Raises PlanError `ranks-missing` on every rank that came, naming those that did not; `no-real-ranks` on the fake
    process group, whose ranks do not exist.
    """
    n = world_size()
    if n == 1:
        return [Ballot(0, value)]
    if dist.get_backend() == "fake":
        raise PlanError(f"{topic} needs real ranks, not the fake process group", code="no-real-ranks")
    rank = dist.get_rank()
    store = dist.PrefixStore(f"meshplan/{topic}", compat.default_store())
    k = store.add("round", 0)
    payload = base64.b64encode(zlib.compress(json.dumps(value, sort_keys=True).encode())).decode()
    if store.add(f"{k}/said/{hashlib.sha256(payload.encode()).hexdigest()}", 1) == 1:
        store.set(f"{k}/value/{store.add(f'{k}/values', 1) - 1}", f"{rank} {payload}")
    store.set(f"here/{rank}", str(k))
    if store.add(f"{k}/here", 1) == n:
        _close(store, k, GO)
    try:
        store.wait([f"{k}/closed"], timedelta(seconds=timeout))
    except RuntimeError:  # every store's time-out derives from it
        _close(store, k, GIVEN_UP)
        store.wait([f"{k}/closed"], timedelta(seconds=60))
    if store.get(f"{k}/closed").decode() != GO:
        raise PlanError(
            f"{topic} was called by some ranks only: after {timeout:g} s ranks {_absent(store, k, n)} of {n} "
            "have not come",
            code="ranks-missing",
            legal="call it on every rank (not under `if rank == 0`), or give a longer timeout= if a rank is just late",
        )
    said = [store.get(f"{k}/value/{i}").split() for i in range(store.add(f"{k}/values", 0))]
    ballots = [Ballot(int(who), json.loads(zlib.decompress(base64.b64decode(what)))) for who, what in said]
    return sorted(ballots, key=lambda b: json.dumps(b.value, sort_keys=True))


def agree(topic: str, value: Any, error: PlanError | None, *, timeout: float = 15.0) -> list[Ballot]:
    """`roll_call` where a rank may come with an error instead of a value: then every rank raises that error."""
    say = {"value": value} if error is None else {"error": _packed(error)}
    ballots = roll_call(topic, say, timeout=timeout)
    if error is not None:
        raise error
    for ballot in ballots:
        if "error" in ballot.value:
            raise _unpacked(ballot.value["error"], ballot.rank)
    return [Ballot(b.rank, b.value["value"]) for b in ballots]


def _close(store: dist.Store, k: int, verdict: str) -> None:
    # The first to decide wins; the round moves on before anyone is let go, or a quick rank would join it twice.
    if store.add(f"{k}/decide", 1) == 1:
        store.add("round", 1)
        store.set(f"{k}/closed", verdict)


def _absent(store: dist.Store, k: int, n: int) -> str:
    gone = [r for r in range(n) if not (store.check([f"here/{r}"]) and int(store.get(f"here/{r}")) == k)]
    return ", ".join(map(str, gone[:8])) + (f" and {len(gone) - 8} more" if len(gone) > 8 else "")


def _packed(e: PlanError) -> dict[str, Any]:
    return {
        "message": e.message,
        "code": e.code,
        "where": e.where and [e.where.file, e.where.line, e.where.column, e.where.text],
        "module": e.module,
        "legal": e.legal,
    }


def _unpacked(d: dict[str, Any], rank: int) -> PlanError:
    where = Where(*d["where"]) if d["where"] else None
    return PlanError(f"rank {rank}: {d['message']}", code=d["code"], where=where, module=d["module"], legal=d["legal"])
