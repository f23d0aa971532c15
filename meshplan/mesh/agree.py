"""All ranks agree before the first collective, or all raise: through the store, so that no rank is left waiting.

Each rank posts the hash of the program it is about to run, or the error that stopped it. Rank 0 collects the posts and
publishes one verdict, which every rank reads: a constant number of store operations a rank, rank 0 apart.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import Store

from meshplan.errors import PlanError
from meshplan.mesh.ranktext import ranks_text

_BATCH = 1024
_GRACE_S = 10.0
_SHOWN = 300


@dataclass(frozen=True)
class _Post:
    """What one rank posted: the hash of its program, or the error that stopped it."""

    program_hash: str
    error: str | None


def agree(
    store: Store,
    rank: int,
    world_size: int,
    *,
    program_hash: str,
    facts: Mapping[str, str],
    error: str | None,
    tag: str,
    timeout_s: float = 60,
) -> None:
    """Return when every rank posted the same program hash and no error; otherwise raise the same error on every rank.

    Every rank calls this, also one that failed: it passes its `error`. The same `tag` may be used again, as long as
    every rank does so equally often.

    Arguments:
        store: the store of the default process group (a `TCPStore`, `FileStore` or `HashStore`, or a prefix of one).
        rank, world_size: this rank, and how many there are.
        program_hash: a stable hash of what this rank will run, without what may differ between ranks.
        facts: what the hash was made of, as text by name; used only to say what differs.
        error: why this rank cannot go on, or None.
        tag: names the occasion, for example `lower`.
        timeout_s: seconds to wait for the slowest rank.

    Raises PlanError on every rank: `rank-failed` with the errors of the ranks that had one, `ranks-differ` with the
    facts that differ, their values and the ranks that have them, `rank-missing` with the ranks that never came.
    """
    # Counted per rank in the store: a second round under one tag must not read the first one's posts.
    turn = store.add(f"meshplan/{tag}/turn/{rank}", 1)
    base = f"meshplan/{tag}/{turn}"
    facts_key = f"{base}/facts/{program_hash}"
    # One rank's facts serve all that have its hash; two ranks racing here write the same bytes.
    if error is None and not store.check([facts_key]):
        store.set(facts_key, json.dumps(dict(facts)))
    store.set(f"{base}/post/{rank}", json.dumps([program_hash, error]))
    if rank == 0:
        failure = _collect(store, base, world_size, timeout_s)
        store.set(f"{base}/verdict", json.dumps(failure))
    else:
        failure = _await_verdict(store, base, tag, timeout_s)
    if failure is not None:
        raise PlanError(failure["message"], code=failure["code"], legal=failure["legal"])


def _collect(store: Store, base: str, world_size: int, timeout_s: float) -> dict[str, str] | None:
    """Rank 0: wait for all posts and judge them. None is agreement."""
    keys = [f"{base}/post/{rank}" for rank in range(world_size)]
    missing = [] if _arrived(store, keys, timeout_s) else [r for r, key in enumerate(keys) if not store.check([key])]
    gone = set(missing)
    here = [rank for rank in range(world_size) if rank not in gone]
    values = _read(store, [keys[rank] for rank in here])
    posts = {rank: _Post(*json.loads(value)) for rank, value in zip(here, values, strict=True)}
    if any(post.error is not None for post in posts.values()):
        return _failed(posts, missing)
    if missing:
        return _missing(missing, world_size, timeout_s)
    if len({post.program_hash for post in posts.values()}) > 1:
        return _differ(store, base, posts)
    return None


def _await_verdict(store: Store, base: str, tag: str, timeout_s: float) -> dict[str, str] | None:
    """Ranks other than 0: rank 0 has its own `timeout_s`, which begins when it arrives."""
    if not _arrived(store, [f"{base}/post/0"], timeout_s):
        return _missing([0], None, timeout_s)
    if not _arrived(store, [f"{base}/verdict"], timeout_s + _GRACE_S):
        return {
            "code": "rank-missing",
            "message": f"rank 0 arrived at '{tag}' and ended before it said whether the ranks agree",
            "legal": "see rank 0's own output",
        }
    return json.loads(store.get(f"{base}/verdict"))


def _arrived(store: Store, keys: list[str], timeout_s: float) -> bool:
    """Whether all `keys` are set within `timeout_s`."""
    try:
        store.wait(keys, timedelta(seconds=timeout_s))
    except RuntimeError:
        # A time-out, by whatever name the store has for it. A store that is gone fails again here, as it should.
        return store.check(keys)
    return True


def _read(store: Store, keys: list[str]) -> list[bytes]:
    """The values of `keys`, all set, in as few calls as the store offers."""
    if not store.has_extended_api():  # type: ignore[attr-defined]  # missing from the stubs of torch 2.13
        return [store.get(key) for key in keys]
    return [value for at in range(0, len(keys), _BATCH) for value in store.multi_get(keys[at : at + _BATCH])]


def _failed(posts: Mapping[int, _Post], missing: list[int]) -> dict[str, str]:
    errors: dict[str, list[int]] = {}
    for rank, post in posts.items():
        if post.error is not None:
            errors.setdefault(post.error, []).append(rank)
    lines = [f"{_subject(ranks)} failed: {error}" for error, ranks in list(errors.items())[:4]]
    if len(errors) > 4:
        lines.append(f"and {len(errors) - 4} other errors")
    if missing:
        lines.append(f"{_subject(missing)} never arrived")
    return {"code": "rank-failed", "message": "\n".join(lines), "legal": "what is said above, on the ranks named"}


def _missing(missing: list[int], world_size: int | None, timeout_s: float) -> dict[str, str]:
    of = f" of {world_size}" if world_size else ""
    return {
        "code": "rank-missing",
        "message": f"{_subject(missing)}{of} did not arrive within {timeout_s:g} s",
        "legal": "every rank makes the same meshplan calls; see the missing rank's own output",
    }


def _differ(store: Store, base: str, posts: Mapping[int, _Post]) -> dict[str, str]:
    by_hash: dict[str, list[int]] = {}
    for rank, post in posts.items():
        by_hash.setdefault(post.program_hash, []).append(rank)
    values = _read(store, [f"{base}/facts/{program}" for program in by_hash])
    facts = dict(zip(by_hash, (json.loads(value) for value in values), strict=True))
    lines = ["the ranks are about to run different programs"]
    for name in sorted({name for known in facts.values() for name in known}):
        holders: dict[str, list[int]] = {}
        for program, ranks in by_hash.items():
            holders.setdefault(_cut(facts[program].get(name, "(nothing)")), []).extend(ranks)
        if len(holders) > 1:
            said = "; ".join(f"{value} on {_subject(ranks)}" for value, ranks in list(holders.items())[:4])
            lines.append(f"  {name}: {said}" + ("; ..." if len(holders) > 4 else ""))
    if len(lines) == 1:
        hashes = list(by_hash.items())[:4]
        lines += [f"  program {_cut(program)} on {_subject(ranks)}" for program, ranks in hashes]
    return {
        "code": "ranks-differ",
        "message": "\n".join(lines),
        "legal": "the same plan, model, global input shapes and versions on every rank; where the model's code iterates over a "
        "set, one PYTHONHASHSEED in the environment of all",
    }


def _subject(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {ranks_text(ranks)}"


def _cut(value: str) -> str:
    return value if len(value) <= _SHOWN else f"{value[:_SHOWN]}... ({len(value)} characters)"
