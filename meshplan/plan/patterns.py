"""Module path patterns: `*` one segment, `**` any number, `{a,b}` alternatives, `[0-7]` an index range."""

from __future__ import annotations

import difflib
import functools
import itertools
import re
from collections.abc import Iterable, Sequence

from meshplan.errors import PlanError

LIMIT = 1024
"""Alternatives one pattern may expand to; more is a mistake, or an attack by a plan file."""
GROUPS = 64
"""Brace groups one pattern may have, for the same reason."""

Choice = tuple[int, str]
"""An option of a brace group: (position of the group in the pattern, option as written)."""


def match(pattern: str, names: Iterable[str]) -> list[str]:
    """The `names` that `pattern` matches whole, in their given order.

    A name is segments joined by dots; the empty name is the model itself, matched by `""` and by `**`. Inside a segment
    `*` is any run of characters; `[0-7]` is an integer from 0 to 7, both ends included; alternatives may span dots and
    nest. Raises PlanError `bad-pattern`.
    """
    compiled = [_compile(text) for text, _ in _expand(pattern)]
    return [name for name in names if any(_matches(one, name) for one in compiled)]


def unused(pattern: str, names: Iterable[str]) -> list[str]:
    """The alternatives in braces that lead to no name: in `layers.*.{up,dwn}` of a model without `dwn`, `["dwn"]`."""
    names = list(names)
    expanded = _expand(pattern)
    every = dict.fromkeys(choice for _, choices in expanded for choice in choices)
    used: set[Choice] = set()
    for text, choices in expanded:
        if used.issuperset(choices):
            continue
        compiled = _compile(text)
        if any(_matches(compiled, name) for name in names):
            used.update(choices)
    return [option for position, option in every if (position, option) not in used]


def nearest(pattern: str, names: Iterable[str], n: int = 3) -> list[str]:
    """Up to `n` names like `pattern`, the most alike first. Where the pattern has wildcards, indices of names are
    written `*`, so that `layers.*.up` is told of `layers.*.mlp.up` once and not once per layer."""
    starred = any(mark in pattern for mark in "*[")
    seen = dict.fromkeys(generic(name) if starred else name for name in names if name)
    try:
        forms = [re.sub(r"\[[^\]]*\]", "*", text) for text, _ in _expand(pattern)][:16]
    except PlanError:
        forms = [pattern]
    scored = sorted(seen, key=lambda name: -max(_likeness(form, name) for form in forms))
    return scored[:n]


def _likeness(pattern: str, name: str) -> float:
    """Alikeness in 0..2: whole strings, plus the last segments, which is where a name is most often misspelt."""
    whole = difflib.SequenceMatcher(None, pattern, name).ratio()
    last = difflib.SequenceMatcher(None, pattern.rpartition(".")[2], name.rpartition(".")[2]).ratio()
    return whole + last


def generic(name: str) -> str:
    """`name` with its numbers as stars: `layers.3.up` is `layers.*.up`."""
    return ".".join("*" if segment.isdigit() else segment for segment in name.split("."))


def within(path: str, module: str) -> bool:
    """Whether `path`, of a module or a parameter, is `module` or lies in it; everything lies in the model itself, `""`."""
    return module == "" or path == module or path.startswith(f"{module}.")


def _bad(pattern: str, why: str) -> PlanError:
    return PlanError(
        f"{pattern!r} is not a module path pattern: {why}",
        code="bad-pattern",
        legal="segments joined by dots, with * ** {a,b} [0-7]",
    )


@functools.lru_cache(maxsize=4096)
def _expand(pattern: str) -> tuple[tuple[str, tuple[Choice, ...]], ...]:
    """The pattern without braces: each alternative with the options that were taken for it."""
    if pattern.count("{") > GROUPS:
        raise _bad(pattern, f"it has more than {GROUPS} groups of alternatives")
    return tuple(_expand_at(pattern, pattern, 0))


def _expand_at(text: str, whole: str, offset: int) -> list[tuple[str, tuple[Choice, ...]]]:
    start = text.find("{")
    if start < 0:
        if "}" in text:
            raise _bad(whole, "a } without its {")
        return [(text, ())]
    if "}" in text[:start]:
        raise _bad(whole, "a } without its {")
    options, end = _options(text, start, whole)
    heads: list[tuple[str, tuple[Choice, ...]]] = []
    for begin, option in options:
        for inner, choices in _expand_at(option, whole, offset + begin):
            heads.append((inner, ((offset + start, option), *choices)))
    tails = _expand_at(text[end:], whole, offset + end)
    if len(heads) * len(tails) > LIMIT:
        raise _bad(whole, f"it has more than {LIMIT} alternatives")
    return [
        (text[:start] + inner + tail, choices + more)
        for (inner, choices), (tail, more) in itertools.product(heads, tails)
    ]


def _options(text: str, start: int, whole: str) -> tuple[list[tuple[int, str]], int]:
    """The alternatives of the brace group that opens at `start`, each with its index in `text`, and the index just past
    the closing brace."""
    depth, begin = 0, start + 1
    options: list[tuple[int, str]] = []
    for i in range(start, len(text)):
        if text[i] == "{":
            depth += 1
        elif text[i] == "}":
            depth -= 1
            if depth == 0:
                return [*options, (begin, text[begin:i])], i + 1
        elif text[i] == "," and depth == 1:
            options.append((begin, text[begin:i]))
            begin = i + 1
    raise _bad(whole, "a { without its }")


Segment = tuple[re.Pattern[str], tuple[tuple[int, int], ...]] | None
"""One segment: its regular expression with a group per index range, and the ranges. None is `**`."""


@functools.lru_cache(maxsize=4096)
def _compile(pattern: str) -> tuple[Segment, ...]:
    if pattern == "":
        return ()
    return tuple(_compile_segment(segment, pattern) for segment in pattern.split("."))


def _compile_segment(segment: str, pattern: str) -> Segment:
    if segment == "**":
        return None
    if not segment:
        raise _bad(pattern, "an empty segment")
    if "**" in segment:
        raise _bad(pattern, "** must be a whole segment")
    regex, ranges = "", []
    for token in re.findall(r"\*|\[[^\]]*\]|[^*\[\]]+|[\[\]]", segment):
        if token == "*":
            regex += ".*"
        elif token.startswith("["):
            bounds = re.fullmatch(r"\[(\d+)(?:-(\d+))?\]", token)
            if not bounds or int(bounds[1]) > int(bounds[2] or bounds[1]):
                raise _bad(pattern, f"{token!r} is not an index range such as [0-7]")
            ranges.append((int(bounds[1]), int(bounds[2] or bounds[1])))
            regex += r"(?<!\d)(\d+)(?!\d)"
        elif token == "]":
            raise _bad(pattern, "a ] without its [")
        else:
            regex += re.escape(token)
    return re.compile(regex), tuple(ranges)


def _matches(segments: Sequence[Segment], name: str) -> bool:
    parts = name.split(".") if name else []
    # reachable[j]: the segments so far can match the first j parts.
    reachable = [True] + [False] * len(parts)
    for segment in segments:
        if segment is None:
            reachable = list(itertools.accumulate(reachable, lambda a, b: a or b))
        else:
            reachable = [False] + [
                ok and _segment_matches(segment, part) for ok, part in zip(reachable, parts, strict=False)
            ]
    return reachable[-1]


def _segment_matches(segment: tuple[re.Pattern[str], tuple[tuple[int, int], ...]], part: str) -> bool:
    found = segment[0].fullmatch(part)
    return found is not None and all(
        low <= int(group) <= high for group, (low, high) in zip(found.groups(), segment[1], strict=True)
    )
