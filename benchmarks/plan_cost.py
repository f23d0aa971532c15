"""What does deriving a plan cost, and is it as good as one written by hand? Llama 3.1 405B, 126 blocks, tp 8 x dp_shard 16.

The shipped model is held to the shipped plan. transformers' own LlamaForCausalLM of the same sizes, unmodified, has no plan but
the derived one. Each case runs in a process of its own. Seconds are measured, tracing, solving, lowering and value checks
included; times of collectives are modelled on an H100 node, bytes counted.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import time
from typing import Any

import torch
from torch import nn

import meshplan as mp
from benchmarks.common import Report, arguments
from meshplan.cli.output import emit
from meshplan.cost.machine import Machine
from meshplan.mesh.spec import MeshSpec
from meshplan.models.registry import resolve_model
from meshplan.search.auto import derive

SECONDS = 5.0
MESH = {"dp_shard": 16, "tp": 8}
ROWS, SEQ = 32, 8192


def shipped(name: str) -> nn.Module:
    """A shipped Llama on meta."""
    with torch.device("meta"):
        return resolve_model(name)()


def hugging_face(name: str) -> nn.Module:
    """transformers' Llama with the sizes of a shipped one, on meta, in bfloat16."""
    from transformers import LlamaConfig, LlamaForCausalLM

    own = shipped(name).config
    config = LlamaConfig(
        hidden_size=own.dim, intermediate_size=own.ffn_dim, num_hidden_layers=own.n_layers, num_attention_heads=own.n_heads,
        num_key_value_heads=own.n_kv_heads, vocab_size=own.vocab_size, use_cache=False,
    )  # fmt: skip
    config._attn_implementation = "sdpa"
    with torch.device("meta"):
        return LlamaForCausalLM(config).to(torch.bfloat16)


def case(name: str, family: str) -> dict[str, Any]:
    """Derive a plan in this process; `by hand` figures where there is a shipped plan."""
    model = shipped(name) if family == "shipped" else hugging_face(name)
    ids = torch.empty(ROWS, SEQ, dtype=torch.int64, device="meta")
    inputs = {"tokens" if family == "shipped" else "input_ids": ids, "labels": ids}
    start, cpu = time.perf_counter(), time.process_time()
    found = derive(model, MESH, inputs)
    row: dict[str, Any] = {
        "model": f"{family} {name}",
        "derive s": time.perf_counter() - start,
        "derive cpu s": time.process_time() - cpu,
        "gap %": 100 * found.choice.gap if found.choice else None,
        "variables": found.choice.size[1] if found.choice else 0,
        "tp s (modelled)": _seconds(found.lowered),
        "GiB sent": _sent(found.lowered) / 2**30,
        "by hand: tp s": None,
        "by hand: GiB sent": None,
    }
    if family == "shipped":
        hand = mp.load_plan("llama3/tp_sp_fsdp")
        placed = {k: dataclasses.replace(v, shape=(ROWS, SEQ)) for k, v in hand.inputs.items()}
        theirs = mp.lower(model, dataclasses.replace(hand, mesh=MESH, inputs=placed), 128)
        row |= {"by hand: tp s": _seconds(theirs), "by hand: GiB sent": _sent(theirs) / 2**30}
    return row


def _seconds(low: mp.Lowered) -> float:
    link = Machine().link(MeshSpec.resolve(MESH, 128), "tp")
    return sum(link.seconds(c.op, c.bytes) for c in low.collectives if c.axis == "tp")


def _sent(low: mp.Lowered) -> int:
    return sum(int(c.to_json()["wire_bytes"]) for c in low.collectives)  # type: ignore[call-overload]


def in_process(name: str, family: str) -> dict[str, Any]:
    """`case` in a fresh interpreter."""
    code = f"import json; from benchmarks.plan_cost import case; print(json.dumps(case({name!r}, {family!r})))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def measure(name: str) -> Report:
    own, theirs = in_process(name, "shipped"), in_process(name, "transformers")
    return Report(
        f"auto_plan for {name}, tp 8 x dp_shard 16",
        [own, theirs],
        notes=[
            "measured: seconds of this machine, tracing, solving, lowering and value checks included",
            "modelled: seconds of the tp collectives one after another; counted: GiB that one rank sends a step, over all axes",
        ],
        facts={
            f"at most {SECONDS} s": max(own["derive s"], theirs["derive s"]) <= SECONDS,
            "no more bytes than by hand": own["GiB sent"] <= 1.001 * own["by hand: GiB sent"],
            "no longer than by hand": own["tp s (modelled)"] <= 1.001 * own["by hand: tp s"],
        },
    )


if __name__ == "__main__":
    parser = arguments(__doc__)
    parser.add_argument("--model", default="llama3.1-405b", help="a shipped Llama's name")
    given = parser.parse_args()
    emit(measure(given.model), given.json)
