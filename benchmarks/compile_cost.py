"""What does lowering cost, and does it grow with ranks or with layers? Llama 3.1 405B on 16,384 ranks and on 8.

Each case runs in a process of its own: peak memory is that of one lowering, imports included.
"""

from __future__ import annotations

import dataclasses
import json
import resource
import subprocess
import sys
import time
from typing import Any

import torch

import meshplan as mp
from benchmarks.common import Report, arguments
from meshplan.cli.output import emit
from meshplan.models.llama import Llama
from meshplan.models.registry import resolve_model

SECONDS, GIB, OF_FEW_RANKS, OF_FEW_LAYERS = 6.0, 2.0, 1.2, 2.0
LARGE, SMALL, FEW, SEQ = 16384, 8, 4, 8192


def lowering(model: str, layers: int | None, world: int) -> dict[str, Any]:
    """Lower `llama3/tp_sp_fsdp` in this process, for `layers` blocks of a shipped Llama (None: all of them)."""
    start = time.perf_counter()
    with torch.device("meta"):
        built = resolve_model(model)()
        if layers is not None:
            built = Llama(dataclasses.replace(built.config, n_layers=layers))
    plan = mp.load_plan("llama3/tp_sp_fsdp")
    # One row of tokens for each data rank, as a rank has it on any number of ranks.
    rows = world // plan.mesh["tp"]
    inputs = {name: dataclasses.replace(item, shape=(rows, SEQ)) for name, item in plan.inputs.items()}
    made, cpu = time.perf_counter(), time.process_time()
    low = mp.lower(built, dataclasses.replace(plan, inputs=inputs), world_size=world)
    done, cpu = time.perf_counter(), time.process_time() - cpu
    listed = len(low.collectives)
    return {
        "layers": len(built.layers),
        "ranks": world,
        "construct s": made - start,
        "lower s": done - made,
        "lower cpu s": cpu,
        "list collectives s": time.perf_counter() - done,
        "peak GiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "collectives": listed,
    }


def in_process(model: str, layers: int | None, world: int) -> dict[str, Any]:
    """`lowering` in a fresh interpreter."""
    call = f"lowering({model!r}, {layers}, {world})"
    code = f"import json; from benchmarks.compile_cost import lowering; print(json.dumps({call}))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def measure(model: str, few: int) -> Report:
    """Three cases: all layers on many and on few ranks, and `few` layers on many ranks."""
    many, small, short = (in_process(model, *case) for case in ((None, LARGE), (None, SMALL), (few, LARGE)))
    return Report(
        f"lowering {model} by llama3/tp_sp_fsdp",
        [many, small, short],
        notes=[
            "measured: wall seconds on this machine, and CPU seconds, which cases are compared by; resident memory",
            "counted: collectives of one step of one rank",
        ],
        facts={
            f"at most {SECONDS} s": many["lower s"] <= SECONDS,
            f"at most {GIB} GiB": many["peak GiB"] <= GIB,
            f"at most {OF_FEW_RANKS}x of {SMALL} ranks": many["lower cpu s"] <= OF_FEW_RANKS * small["lower cpu s"],
            f"at most {OF_FEW_LAYERS}x of {few} layers": many["lower cpu s"] <= OF_FEW_LAYERS * short["lower cpu s"],
        },
    )


if __name__ == "__main__":
    parser = arguments(__doc__)
    parser.add_argument("--model", default="llama3.1-405b", help="a shipped Llama's name")
    parser.add_argument("--few", type=int, default=FEW, help="layers of the small case")
    given = parser.parse_args()
    emit(measure(given.model, given.few), given.json)
