"""Over how many ranks attention's heads can be exchanged, the refusal that lists them, and which need not travel."""

from __future__ import annotations

import math

from meshplan.errors import PlanError


def exchange_degrees(q_heads: int, kv_heads: int) -> list[int]:
    """The numbers of ranks among which `q_heads` and `kv_heads` can be dealt out: divisors of the query heads that divide the
    key heads, or are multiples of them (each key head then goes to several ranks)."""
    return [n for n in range(1, q_heads + 1) if q_heads % n == 0 and (kv_heads % n == 0 or n % kv_heads == 0)]


def check_heads(q_heads: int, kv_heads: int, degree: int, method: str, inner: int | None = None) -> None:
    """Raise PlanError `context-heads` unless `method` can run over `degree` ranks with these heads.

    `ring` and `allgather` take any heads. `ulysses` exchanges heads among all ranks, `hybrid` among `inner` neighbours, which
    divide the degree.

    Arguments:
        q_heads, kv_heads: of one rank before the exchange: what tp left of them.
    """
    if method in ("ring", "allgather"):
        return
    among, what = (degree, "cp") if method == "ulysses" else (inner or 0, "inner")
    legal = exchange_degrees(q_heads, kv_heads)
    if method == "hybrid":
        legal = [n for n in legal if degree % n == 0]
    if among in legal:
        return
    kv = "" if q_heads == kv_heads else f" and {kv_heads} key heads"
    ranks = f" of {degree} ranks on cp" if method == "hybrid" else ""
    raise PlanError(
        f"context method {method} exchanges heads among {among}{ranks}, and tp leaves {q_heads} query heads{kv} a rank",
        code="context-heads",
        legal=f"{what}: {' or '.join(map(str, legal))}; method ring or allgather takes any heads",
    )


def spared_heads(kv_heads: int, equal: int, exchanged: int) -> int:
    """Of how many neighbouring key heads a rank sends one, where they are equal in runs of `equal` on one device.

    Arguments:
        kv_heads: of one rank, a stretch that begins at a multiple of their number.
        exchanged: the ranks among which heads are exchanged, 1 for none: each of them is left at least one.
    """
    both = math.gcd(kv_heads, equal)
    return max((n for n in range(1, both + 1) if both % n == 0 and kv_heads // n % exchanged == 0), default=1)
