"""Numbers as people read them: bytes in powers of 1024, counts in powers of 1000, dtypes in short."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

_DTYPES = {"float": "f", "int": "i", "uint": "u", "complex": "c"}


def bytes_text(n: int | float) -> str:
    """`n` bytes as `0 B`, `512 B`, `1.5 KiB`, `64 MiB`, `1.0 GiB`: one decimal below 10, none above."""
    return _scaled(n, 1024, [" B", " KiB", " MiB", " GiB", " TiB", " PiB"])


def count_text(n: int) -> str:
    """`n` things as `7`, `1.5 k`, `218 M`, `8.0 G`."""
    return _scaled(n, 1000, ["", " k", " M", " G", " T"])


def dtype_text(dtype: str) -> str:
    """torch's bare dtype name in short: `float32` -> `f32`, `bfloat16` -> `bf16`, `int64` -> `i64`, `bool` as it is."""
    if dtype.startswith("bfloat"):
        return "bf" + dtype[6:]
    for long, short in _DTYPES.items():
        if dtype.startswith(long) and dtype[len(long) :][:1].isdigit():
            return short + dtype[len(long) :]
    return dtype


def tensor_text(dtype: str | None, shape: Iterable[int], layout: Mapping[str, str] | None) -> str:
    """The one notation of a tensor: `f32[4, 2048, 512] {dp: S(0), tp: S(2)}`."""
    text = f"{dtype_text(dtype) if dtype else ''}[{', '.join(map(str, shape))}]"
    return f"{text} {layout_text(layout)}" if layout else text


def layout_text(layout: Mapping[str, str]) -> str:
    """`{dp: S(0), tp: R}`."""
    return "{" + ", ".join(f"{axis}: {short_placement(p)}" for axis, p in layout.items()) + "}"


def short_placement(text: str) -> str:
    """A placement or a change of it without the sizes that everyone can work out: `S(1, zigzag=[8, 8])` is `S(1, zigzag)`,
    and many equal parts are counted, `S(0, parts=[16]x8)`."""

    def counted(found: re.Match[str]) -> str:
        sizes = found[2].split(", ")
        if len(set(sizes)) > 1 or len(sizes) < 4:
            return found[0] if found[1] == "parts" else found[1]
        return f"{found[1]}=[{sizes[0]}]x{len(sizes)}"

    return re.sub(r"(zigzag|parts)=\[([\d, ]+)\]", counted, text)


def plain(text: object) -> str:
    """`text` with anything that a terminal could act on made visible (`\\x1b`), so names cannot repaint the screen."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in str(text))


def _scaled(n: int | float, base: int, units: list[str]) -> str:
    sign, value, unit = "-" if n < 0 else "", abs(n), 0
    while unit < len(units) - 1 and round(value, 0 if value >= 10 else 1) >= base:
        value, unit = value / base, unit + 1
    decimals = 1 if unit and round(value, 1) < 10 else 0
    return f"{sign}{value:.{decimals}f}{units[unit]}"
