"""Checked conversions of the values a user may write: each gives the normal form, or a PlanError with its place."""

from __future__ import annotations

import contextlib
import difflib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from meshplan.errors import PlanError
from meshplan.plan.source import Source

DTYPES: dict[str, torch.dtype] = {
    name: dtype
    for name in (
        *("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
        *("int64", "int32", "int16", "int8", "uint8", "bool", "complex64", "complex128"),
    )
    if isinstance(dtype := getattr(torch, name, None), torch.dtype)
}
"""The dtypes a plan may name, by torch's bare name."""


def nearest_word(word: object, legal: Iterable[str]) -> str:
    """`"; did you mean 'units'?"` for the closest legal word, or an empty string when none is close."""
    near = difflib.get_close_matches(str(word), list(legal), n=1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else ""


@contextlib.contextmanager
def placed(source: Source) -> Iterator[None]:
    """Gives a PlanError that was raised inside without a place the place of `source`."""
    try:
        yield
    except PlanError as error:
        if error.where is not None or source.where is None:
            raise
        raise error.at(source.where) from None


def wrong(what: str, value: object, source: Source, legal: str | list[str]) -> PlanError:
    """The `bad-value` error of a value of the wrong kind, at its place."""
    return PlanError(f"{what} cannot be {value!r}", code="bad-value", where=source.where, legal=legal)


def as_mapping(what: str, value: Any, source: Source) -> Mapping[Any, Any]:
    """`value` if it is a mapping."""
    if not isinstance(value, Mapping):
        raise wrong(what, value, source, "a mapping")
    return value


def check_keys(what: str, value: Mapping[Any, Any], legal: Iterable[str], source: Source) -> None:
    """Raise PlanError `unknown-key` for the first key of `value` that is not in `legal`, with the nearest one."""
    legal = list(legal)
    for key in value:
        if key not in legal:
            raise PlanError(
                f"{what} has no key {key!r}{nearest_word(key, legal)}",
                code="unknown-key",
                where=source.child(key).key_where,
                legal=legal,
            )


def as_choice(what: str, value: Any, legal: Iterable[str], source: Source) -> str:
    """`value` if it is one of the words `legal`, else PlanError `unknown-option` with the nearest one."""
    legal = list(legal)
    if not isinstance(value, str) or value not in legal:
        raise PlanError(
            f"{what} has no option {value!r}{nearest_word(value, legal)}",
            code="unknown-option",
            where=source.where,
            legal=legal,
        )
    return value


def as_int(what: str, value: Any, source: Source, least: int = 1) -> int:
    """`value` if it is an integer of at least `least`. A bool is not an integer here."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise wrong(what, value, source, f"an integer of at least {least}")
    return value


def as_bool(what: str, value: Any, source: Source) -> bool:
    """`value` if it is True or False."""
    if not isinstance(value, bool):
        raise wrong(what, value, source, "true or false")
    return value


def as_str(what: str, value: Any, source: Source) -> str:
    """`value` if it is a string."""
    if not isinstance(value, str):
        raise wrong(what, value, source, "a string")
    return value


def as_paths(what: str, value: Any, source: Source) -> tuple[str, ...]:
    """A list of module path patterns; one string stands for a list of one."""
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list | tuple):
        raise wrong(what, value, source, "a list of module paths")
    return tuple(as_str(f"{what}[{i}]", item, source.child(i)) for i, item in enumerate(items))


def as_dtype(what: str, value: Any, source: Source) -> torch.dtype | None:
    """A torch dtype, or its bare name (`bfloat16`); None stays None."""
    if value is None or isinstance(value, torch.dtype):
        return value
    name = value.removeprefix("torch.") if isinstance(value, str) else value
    return DTYPES[as_choice(what, name, DTYPES, source)]


def dtype_name(dtype: torch.dtype) -> str:
    """torch's bare name of `dtype`: `int64`, `bfloat16`."""
    return str(dtype).removeprefix("torch.")
