"""`auto_plan`: what it derives is exact, splits what can be split, and is what a person would write or costs no more."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

import meshplan as mp
from meshplan.compiler.kinds import replicated
from meshplan.cost.machine import Machine
from meshplan.mesh.spec import MeshSpec
from meshplan.models.gpt import GPT, GPTConfig
from meshplan.models.llama import Llama, LlamaConfig
from meshplan.plan.placements import Shard
from meshplan.search import attempts
from meshplan.search.auto import derive
from tests.search.models import batch, stack

TP2_FSDP2 = {"dp_shard": 2, "tp": 2}


@pytest.mark.parametrize("block", ["fused", "parallel", "mixer"])
@pytest.mark.parametrize(("mesh", "sequence"), [({"tp": 2}, None), (TP2_FSDP2, True)], ids=["tp2", "tp2+sp+fsdp2"])
def test_derived_plans_are_exact_and_split_the_matrices(pool, block, mesh, sequence):
    factory = partial(stack, block, tied=block == "fused")
    found = derive(factory(), mesh, batch(), sequence=sequence)
    assert not found.refused
    receipt = mp.verify(factory, found.plan, nproc=2 if mesh == {"tp": 2} else 4, inputs=batch(), steps=2)
    assert receipt.passed, str(receipt)
    assert receipt.check("gradients").error < 1e-12
    matrices = sum(p.numel() for p in factory().parameters() if p.dim() > 1)
    whole = sum(n for _, n in found.whole) / 4  # float32
    assert whole <= 0.1 * matrices, found.plan.note


def llama(dim: int = 2048, ffn: int = 5632, vocab: int = 32000, layers: int = 12) -> Llama:
    config = LlamaConfig(dim=dim, n_layers=layers, n_heads=16, n_kv_heads=4, ffn_dim=ffn, vocab_size=vocab)
    with torch.device("meta"):
        return Llama(config)


def gpt() -> GPT:
    with torch.device("meta"):
        return GPT(GPTConfig(n_embd=1024, n_layer=6, n_head=16, vocab_size=50304, block_size=1024))


def tokens(rows: int, length: int) -> dict[str, torch.Tensor]:
    ids = torch.empty(rows, length, dtype=torch.int64, device="meta")
    return {"tokens": ids, "labels": ids}


def shards(low) -> dict[str, str]:
    return {p["name"]: p["layout"].get("tp", "R") for p in low.placements}


def seconds(low, machine: Machine, mesh: dict[str, int]) -> float:
    spec = MeshSpec.resolve(mesh, low.core.spec.world_size)
    link = machine.link(spec, "tp")
    return sum(link.seconds(c.op, c.bytes) for c in low.collectives if c.axis == "tp")


@pytest.mark.parametrize(
    ("model", "length", "by_hand"),
    [(llama, 4096, "llama3/tp_sp_fsdp"), (gpt, 1024, "gpt/tp_sp_fsdp")],
    ids=["llama", "gpt"],
)
def test_what_a_person_writes_is_found_or_costs_no_less(model, length, by_hand):
    mesh, inputs = {"dp_shard": 2, "tp": 4}, tokens(8, length)
    # The shipped plan of GPT is for the tiny model's fused projection.
    hand = mp.Plan.from_yaml(mp.load_plan(by_hand).to_yaml().replace("[64, 64, 64]", "[1024, 1024, 1024]"))
    placed = {name: mp.Input(shape=tuple(t.shape), dtype=t.dtype, place={"dp": mp.S(0)}) for name, t in inputs.items()}
    written = mp.Plan(mesh=mesh, inputs=placed, rules=hand.rules, fsdp=hand.fsdp)
    theirs = mp.lower(model(), written, 8)
    found = derive(model(), mesh, inputs)
    assert seconds(found.lowered, Machine(), mesh) <= 1.001 * seconds(theirs, Machine(), mesh)
    wire = [sum(c.to_json()["wire_bytes"] for c in low.collectives) for low in (found.lowered, theirs)]
    assert wire[0] <= 1.001 * wire[1]
    assert found.choice.gap <= 1e-3


def test_llama_is_split_as_megatron_splits_it():
    found = derive(llama(), {"dp_shard": 2, "tp": 4}, tokens(8, 4096))
    layout = shards(found.lowered)
    for name, place in layout.items():
        last = name.split(".")[-2]
        if last in ("wq", "wk", "wv", "w1", "w3", "output"):
            assert place == "S(0)", name
        elif last in ("wo", "w2"):
            assert place == "S(1)", name
        elif "norm" in last:
            assert place == "R", name
    # Long sequences: activations between the blocks are cut along the sequence.
    moves = {(str(m.have), str(m.want)) for m in found.choice.moves if found.choice.cost.wire}
    assert ("P", "S(1)") in moves and ("S(1)", "R") in moves


def test_sequence_parallelism_is_taken_where_it_pays_and_only_where_it_is_allowed():
    mesh = {"tp": 4}
    long, short = derive(llama(layers=2), mesh, tokens(4, 4096)), derive(llama(layers=2), mesh, tokens(1, 32))
    cut = [any(str(m.have) == "P" and str(m.want).startswith("S") for m in f.choice.moves) for f in (long, short)]
    assert cut == [True, False]
    forbidden = derive(llama(layers=2), mesh, tokens(4, 4096), sequence=False)
    assert not any(str(m.have) == "P" and str(m.want).startswith("S") for m in forbidden.choice.moves)
    asked = derive(llama(layers=2), mesh, tokens(1, 32), sequence=True)
    assert any(str(m.have) == "P" and str(m.want).startswith("S") for m in asked.choice.moves)


def test_the_memory_bound_decides_what_stays_whole():
    inputs = tokens(1, 8)
    total = sum(p.numel() * p.element_size() for p in llama(layers=2).parameters())
    free = derive(llama(layers=2), {"tp": 2}, inputs, memory=2 * total)
    tight = derive(llama(layers=2), {"tp": 2}, inputs)
    assert tight.choice.bytes <= 1.06 * total / 2 < free.choice.bytes + total
    assert all(replicated(k) or v in free.choice.sources for v, k in free.choice.sources.items())
    with pytest.raises(mp.PlanError, match="memory bound") as error:
        derive(llama(layers=2), {"tp": 2}, inputs, memory=total / 4)
    assert error.value.code == "no-placement"


def test_the_plan_is_a_plan_file_with_its_reasons(tmp_path):
    plan = mp.auto_plan(stack("fused"), {"tp": 2}, batch())
    text = plan.to_yaml()
    (tmp_path / "plan.yaml").write_text(text)
    again = mp.load_plan(tmp_path / "plan.yaml")
    assert again == plan
    assert "gap" in text and "of parameters split" in text and "parts=[24, 12, 12]" in text
    # The fused projection's parts follow the later split: q, k and v are cut one by one.
    assert mp.lower(stack("fused"), again, 2, batch()).core.params["blocks.0.qkv.weight"].shards[0][1].parts == (
        24,
        12,
        12,
    )


def test_outputs_may_stay_split():
    model = llama(layers=2)
    inputs = {"tokens": torch.empty(2, 64, dtype=torch.int64, device="meta")}
    kept = derive(model, {"tp": 4}, inputs, outputs={"": {"tp": mp.S(-1)}})
    gathered = derive(model, {"tp": 4}, inputs)
    logits = 2 * 64 * 32000 * 4
    sent = [sum(c.to_json()["wire_bytes"] for c in f.lowered.collectives) for f in (gathered, kept)]
    assert sent[0] - sent[1] >= logits * 3 // 4


def test_a_mesh_without_tp_gives_a_data_parallel_plan():
    plan = mp.auto_plan(stack("parallel"), {"dp_replicate": 2, "dp_shard": 2}, batch())
    assert plan.fsdp.units == ("blocks.*",) and not plan.rules
    assert plan.inputs["ids"].place == {"dp": mp.S(0)}


class Checks(nn.Module):
    """Holds what it computes to the length of what it was handed, as some attention does: no sequence can be cut in it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.up(self.norm(x))
        if h.shape[:2] != x.shape[:2]:
            raise ValueError(f"{h.shape} beside {x.shape}")
        return x + self.down(h.relu())


def test_sequences_that_cannot_be_cut_leave_the_rest_of_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "ATTEMPTS", 1)  # the second solution would keep one boundary whole, and lower
    model = nn.Sequential(Checks(), Checks())
    found = derive(model, {"tp": 2}, {"input": torch.empty(2, 16, 64)}, sequence=True)
    placed = {name: p.placements.get("tp") for name, p in found.lowered.core.bound.params.items() if name.endswith("weight")}
    assert all(isinstance(placed[f"{i}.{name}.weight"], Shard) for i in (0, 1) for name in ("up", "down"))
    assert {error.code for error in found.refused} == {"diverged"}
