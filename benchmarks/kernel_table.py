"""What kernels become on Hopper, counted without a GPU: launches compiled for sm_90, and tables for a page of docs."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.tools.tensor_descriptor import TensorDescriptor

from meshplan.kernels.launch import Launch

SHARED = 232_448
"""Bytes of shared memory that one program may take on an H100 or H200."""
TENSOR, MEMORY = 989e12, 4.8e12
"""FLOP/s in 16 bits and bytes/s of an H200."""

_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int32: "i32", torch.int64: "i64"}
_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@dataclass(frozen=True)
class Counted:
    """One compiled launch, counted in its machine code.

    Attributes:
        spills: LDL and STL; shared: bytes of shared memory; wgmma: HGMMA.
        bulk_loads, bulk_stores: UTMALDG and UTMASTG; async_copies: LDGSTS.
        global_loads, global_stores: those of the PTX by width, "16 B x 24, 4 B x 8"; asynchronous copies are loads.
    """

    registers: int
    spills: int
    shared: int
    wgmma: int
    bulk_loads: int
    bulk_stores: int
    async_copies: int
    global_loads: str
    global_stores: str


def _source(launch: Launch) -> ASTSource:
    """What Triton's launcher would compile for these arguments."""
    signature, constants, attributes = {}, {}, {}
    for at, parameter in enumerate(launch.kernel.params):
        name, value = parameter.name, launch.arguments[parameter.name]
        if isinstance(value, TensorDescriptor):
            signature[name] = f"tensordesc<{_NAMES[value.base.dtype]}{list(value.block_shape)}>"
        elif isinstance(value, torch.Tensor):
            signature[name] = "*" + _NAMES[value.dtype]
            attributes[(at,)] = [["tt.divisibility", 16]]
        elif parameter.is_constexpr or value is None or (value == 1 and not parameter.do_not_specialize):
            signature[name], constants[name] = "constexpr", value
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
            if isinstance(value, int) and value % 16 == 0 and not parameter.do_not_specialize:
                attributes[(at,)] = [["tt.divisibility", 16]]
    return ASTSource(launch.kernel, signature, constants, attributes)


def compiled(launch: Launch) -> Counted:
    """Compile one launch and count."""
    options = {"num_warps": launch.warps, "num_stages": launch.stages}
    made = triton.compile(_source(launch), target=GPUTarget("cuda", 90, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        usage = _tool("cuobjdump", "-res-usage", file.name)
        code = _tool("nvdisasm", file.name)
    registers = re.search(r"REG:(\d+)", usage)
    assert registers is not None, usage
    count = Counter(re.findall(r"\b(LDL|STL|HGMMA|UTMALDG|UTMASTG|LDGSTS)\b", code))
    return Counted(
        int(registers[1]),
        count["LDL"] + count["STL"],
        made.metadata.shared,
        count["HGMMA"],
        count["UTMALDG"],
        count["UTMASTG"],
        count["LDGSTS"],
        widths(made.asm["ptx"], "ld"),
        widths(made.asm["ptx"], "st"),
    )


def widths(ptx: str, kind: str) -> str:
    """How wide global loads ("ld", asynchronous copies included) or stores ("st") are: "16 B x 24, 4 B x 8"."""
    found: Counter[int] = Counter()
    form = rf"\b{kind}\.(?:\w+\.)*?global(?:\.\w+(?:::\w+)?)*?(?:\.(v\d))?\.[bu](\d+)\s"
    for vector, bits in re.findall(form, ptx):
        found[int(vector[1:] or 1) * int(bits) // 8 if vector else int(bits) // 8] += 1
    if kind == "ld":
        for size in re.findall(r"cp\.async\.c[ag]\.shared\.global[^;]*?,\s*(0x[0-9a-f]+|\d+)", ptx):
            found[int(size, 0)] += 1
    return ", ".join(f"{size} B x {n}" for size, n in sorted(found.items(), reverse=True))


@dataclass(frozen=True)
class Script:
    """A script that compiles cases and prints one table of what they became.

    Attributes:
        about: its docstring. only: what `--only` takes.
        chosen: the cases that a set of words picks, all for none.
        rows_of: the rows of a case, run in a process of its own; a row is a frozen dataclass.
        name, wrong: of a row, how to call it, and what it must not be.
        limits: rows of what the sizes allow. compiled_prose, limits_prose: what stands above both on a page.
    """

    about: str
    only: str
    chosen: Callable[[set[str]], Sequence[Any]]
    rows_of: Callable[[Any], list[Any]]
    name: Callable[[Any], str]
    wrong: Callable[[Any], list[str]]
    limits: Callable[[], list[dict[str, Any]]]
    compiled_prose: str
    limits_prose: str

    def main(self) -> int:
        """Exit status 1 where a row is wrong."""
        parser = argparse.ArgumentParser(description=self.about, formatter_class=argparse.RawDescriptionHelpFormatter)
        parser.add_argument("--only", default="", help=self.only)
        parser.add_argument("--jobs", type=int, default=2)
        parser.add_argument("--page", type=Path, help="write the tables into this page")
        parser.add_argument("--json", action="store_true")
        given = parser.parse_args()
        cases = self.chosen(set(filter(None, given.only.split("/"))))
        with ProcessPoolExecutor(given.jobs, multiprocessing.get_context("spawn")) as pool:
            found = [row for rows in pool.map(self.rows_of, cases) for row in rows]
        faults = [f"{self.name(row)}: {fault}" for row in found for fault in self.wrong(row)]
        rows, limits = [asdict(row) for row in found], self.limits()
        if given.json:
            print(json.dumps({"rows": rows, "roofline": limits, "faults": faults}, indent=1))
        else:
            print(table(rows), table(limits), *faults, sep="\n\n")
        if given.page is not None:
            write_section(given.page, "Compiled", self.compiled_prose + "\n" + table(rows))
            write_section(given.page, "Limits", self.limits_prose + "\n" + table(limits))
        return int(bool(faults))


def _tool(name: str, *arguments: str) -> str:
    return subprocess.run([_TOOLS / name, *arguments], capture_output=True, text=True, check=True).stdout


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Rows as a Markdown table."""
    head = list(rows[0])
    numbers = [not isinstance(rows[0][key], str) for key in head]

    def shown(value: Any) -> str:
        return f"{value:,.1f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)

    lines = [" | ".join(key.replace("_", " ") for key in head), " | ".join("---:" if n else "---" for n in numbers)]
    lines += [" | ".join(shown(row[key]) for key in head) for row in rows]
    return "\n".join(f"| {line} |" for line in lines)


def write_section(page: Path, title: str, body: str) -> None:
    """Replace the section `title` of a page, up to the next one, or add it at the end."""
    text = page.read_text(encoding="utf-8")
    section = f"## {title}\n\n{body.strip()}\n"
    found = re.search(rf"^## {re.escape(title)}\n.*?(?=^## |\Z)", text, re.S | re.M)
    after = "" if found is None or found.end() == len(text) else "\n"
    text = (
        f"{text.rstrip()}\n\n{section}"
        if found is None
        else text[: found.start()] + section + after + text[found.end() :]
    )
    page.write_text(text, encoding="utf-8")
