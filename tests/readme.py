"""README.md as a program: its blocks in order, run in one folder. `python -m tests.readme` writes its outputs anew."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
FENCE = re.compile(r"^```(?P<language>\w+)(?: (?P<name>\S+))?\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)
# The receipt's worst parameter and its distance are rounding noise, and versions are the machine's.
NOISE = re.compile(r"^(loss|gradients|parameters) +(ok|WRONG) .*$|^versions: .*$", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block: `name` is the file it is, `output` the block after a command that quotes what it prints."""

    language: str
    name: str
    body: str
    start: int
    output: "Block | None" = None

    @property
    def commands(self) -> list[str]:
        """The commands of a bash block."""
        return [line for line in self.body.splitlines() if line.strip()]


def blocks(text: str) -> list[Block]:
    """The blocks of `text` in order; an output belongs to its command and is not listed by itself."""
    found = [Block(m["language"], m["name"] or "", m["body"], m.start("body")) for m in FENCE.finditer(text)]
    out: list[Block] = []
    for block in found:
        if block.language == "text" and not block.name:
            command = out.pop()
            assert command.language == "bash", f"a quoted output without a command: {block.body[:80]!r}"
            block = Block("bash", "", command.body, command.start, block)
        out.append(block)
    return out


def environment() -> dict[str, str]:
    """Where `meshplan`, `torchrun` and `python` are those of this interpreter, and each process has one thread."""
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
    return {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "100"}


def run(command: str, folder: Path) -> str:
    """What `command` prints in `folder`: stdout if it ended well, stderr if it was refused (status 2).

    Raises AssertionError if it failed in any other way: nobody should quote that.
    """
    ran = subprocess.run(
        command.split(), cwd=folder, env=environment(), capture_output=True, text=True, timeout=280, check=False
    )
    assert ran.returncode in (0, 2), f"{command} ended with {ran.returncode}:\n{ran.stderr}"
    return ran.stderr if ran.returncode else ran.stdout


def comparable(output: str) -> str:
    """The output without trailing blanks, and without what may differ from one run or machine to the next."""
    plain = "\n".join(line.rstrip() for line in output.strip().splitlines())
    return NOISE.sub(lambda m: " ".join(m.group(0).split()[:2] if m.group(1) else ["versions:"]), plain)


def is_make(block: Block) -> bool:
    """Whether these are targets of the Makefile, which need no test to run them."""
    return block.language == "bash" and all(command.startswith("make ") for command in block.commands)


def write_files(text: str, folder: Path) -> Iterator[Path]:
    """Write the blocks that are files into `folder`."""
    for block in blocks(text):
        if "." in block.name:
            file = folder / block.name
            file.write_text(block.body, encoding="utf-8")
            yield file


def renewed(text: str, folder: Path) -> str:
    """`text` with every quoted output as its command prints it now."""
    list(write_files(text, folder))
    for block in reversed(blocks(text)):
        if block.output is not None:
            plain = "\n".join(line.rstrip() for line in run(block.commands[0], folder).strip().splitlines())
            start, old = block.output.start, block.output.body
            text = f"{text[:start]}{plain}\n{text[start + len(old) :]}"
    return text


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as scratch:
        README.write_text(renewed(README.read_text(encoding="utf-8"), Path(scratch)), encoding="utf-8")
