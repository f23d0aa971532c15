"""Which compositions are exact: every model of the matrix under every mesh, on four gloo ranks, against one device.

python -m benchmarks.exactness [word in a row's name] ...
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import Any

import meshplan as mp
from meshplan.verify.pool import RankPool
from tests.distributed.models import FAMILIES, MESHES, Family

# transformers gives Gemma2, whose scores are capped, no fused attention.
ATTENTION = {**dict.fromkeys(("hf-llama", "hf-qwen3", "hf-gpt2"), ("sdpa", "eager")), "hf-gemma2": ("eager",)}


def rows() -> Iterator[tuple[str, Family, dict[str, Any], mp.Plan]]:
    """(name, family, changes to its configuration, plan) of every row of the table."""
    for name, family in FAMILIES.items():
        for attention in ATTENTION.get(name, ("",)):
            chosen = {"attn_implementation": attention} if attention else {}
            for composition, mesh in MESHES.items():
                for recompute in (False, True):
                    few = _few_heads(name) if mesh.get("tp") == 4 and "gpt" not in name else {}
                    words = (name, attention, composition, "kv2" if few else "", "recompute" if recompute else "")
                    plan = family.plan(composition, recompute=recompute)
                    yield " ".join(filter(None, words)), family, {**chosen, **few}, plan


def _few_heads(name: str) -> dict[str, int]:
    """8 heads on 2 kv heads: four tp ranks hold each kv head twice, and cut everything else evenly or not at all."""
    return {"num_attention_heads" if name.startswith("hf-") else "n_heads": 8, "vocab_size": 128}


def main(words: list[str]) -> int:
    wrong = 0
    print(f"{'composition':58} {'loss':>8} {'gradients':>9} {'after 2':>8}  collectives a step      s", flush=True)
    with RankPool(4):
        for label, family, changes, plan in rows():
            if not all(word in label.split() for word in words):
                continue
            start = time.perf_counter()
            try:
                receipt = family.verify(plan, **changes)
            except mp.PlanError as error:
                wrong += 1
                print(f"{label:58} refused: [{error.code}] {error}", flush=True)
                continue
            figures = " ".join(f"{receipt.check(c).error:8.1e}" for c in ("loss", "gradients", "parameters"))
            collectives = receipt.check("collectives")
            counted = collectives.detail.split(" a step")[0] if collectives.passed else "NOT AS PREDICTED"
            verdict = "" if receipt.passed else "  FAILED"
            print(f"{label:58} {figures}  {counted:>18} {time.perf_counter() - start:6.1f}{verdict}", flush=True)
            if not receipt.passed:
                wrong += 1
                print(*(f"    {c.name}: {c.detail}" for c in receipt.checks if not c.passed), sep="\n", flush=True)
    print(f"{wrong} wrong" if wrong else "all exact")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
