"""Runs a benchmark script as a user does, in a process of its own, and reads its JSON."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def report_of(name: str, *arguments: str) -> dict[str, Any]:
    """The JSON that `python -m benchmarks.<name> --json` prints."""
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", "--json", *arguments],
        cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
