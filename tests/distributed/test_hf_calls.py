"""How a transformers model may be called once it is parallelised: what it takes, what it returns, and generation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshplan as mp
from tests.distributed.models import FAMILIES, hf, hf_rules
from tests.distributed.training import built, full

pytest.importorskip("transformers")

S = mp.S
ROWS, LENGTH = 4, 9
MESHES = [{"tp": 2}, {"dp_shard": 2, "tp": 2}]


def tokens() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids, labels = (torch.randint(127, (ROWS, LENGTH), generator=generator) for _ in range(2))
    for row in range(ROWS):
        labels[row, : 2 * row] = -100
    padding = torch.ones(ROWS, LENGTH, dtype=torch.int64)
    padding[1, 6:] = padding[3, 4:] = 0  # on the right: in float64 eager attention has no number for a row of nothing
    # Two sequences in each row.
    packed = torch.cat([torch.arange(4), torch.arange(LENGTH - 4)]).expand(ROWS, LENGTH).contiguous()
    whole = torch.arange(LENGTH).expand(ROWS, LENGTH).contiguous()
    everyone = torch.ones_like(padding)
    return {
        "input_ids": ids, "labels": labels, "padding": padding, "everyone": everyone, "packed": packed, "whole": whole
    }  # fmt: skip


CALLS: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
    "labels": ({"input_ids": "input_ids", "labels": "labels"}, {}),
    "padding": ({"input_ids": "input_ids", "labels": "labels", "attention_mask": "padding"}, {}),
    "a mask of ones": ({"input_ids": "input_ids", "labels": "labels", "attention_mask": "everyone"}, {}),
    "positions": ({"input_ids": "input_ids", "labels": "labels", "position_ids": "whole"}, {}),
    "packed rows": ({"input_ids": "input_ids", "labels": "labels", "position_ids": "packed"}, {}),
    "a count of items": ({"input_ids": "input_ids", "labels": "labels"}, {"num_items_in_batch": 11}),
    "a count in a tensor": ({"input_ids": "input_ids", "labels": "labels"}, {"num_items_in_batch": torch.tensor(11)}),
    "hidden states": ({"input_ids": "input_ids"}, {"output_hidden_states": True}),
    "the last logits": ({"input_ids": "input_ids"}, {"logits_to_keep": 1}),
    "a tuple": ({"input_ids": "input_ids", "labels": "labels"}, {"return_dict": False}),
    "a cache that is not asked for": ({"input_ids": "input_ids", "labels": "labels"}, {"use_cache": True}),
}


def _called(kind: str, attention: str, mesh: dict[str, int] | None, calls: tuple[str, ...]) -> list[dict[str, Any]]:
    """Outputs and gradients of each call in turn, on one device without a mesh."""
    model: nn.Module = built(lambda: hf(kind, attn_implementation=attention))
    if mesh is not None:
        place = {"dp": S(0)} if "dp_shard" in mesh else {}
        names = ("input_ids", "labels", "attention_mask", "position_ids")
        inputs = {n: mp.Input(shape=(ROWS, LENGTH), dtype=torch.int64, place=place) for n in names}
        unit = "model.layers.*"
        plan = mp.Plan(mesh, inputs, hf_rules(False), fsdp=mp.Fsdp(units=[unit]) if "dp_shard" in mesh else None)
        model = mp.parallelize(model, plan)
    out = []
    for call in calls:
        model.zero_grad()
        given, constants = CALLS[call]
        data = {name: tokens()[key] for name, key in given.items()}
        result = model(**(data if mesh is None else mp.shard_batch(model, data)), **constants)
        found: dict[str, Any] = {}
        named = dict(result) if hasattr(result, "keys") else {"loss": result[0], "logits": result[1]}
        if "loss" in named:
            named["loss"].backward()
            found["loss"] = named["loss"].item()
            found["gradients"] = {n: full(p.grad) for n, p in model.named_parameters()}
        tensors = {"logits": named["logits"]}
        for key in ("hidden_states", "attentions"):
            tensors |= {f"{key}.{i}": t for i, t in enumerate(named.get(key) or ())}
        out.append({**found, "tensors": {k: t.detach().clone() for k, t in tensors.items()}})
    return out


@pytest.mark.parametrize("mesh", MESHES, ids=lambda m: " x ".join(m))
@pytest.mark.parametrize(("kind", "attention"), [("llama", "sdpa"), ("llama", "eager"), ("gemma2", "eager")])
def test_every_way_to_call_gives_the_outputs_and_gradients_of_one_device(pool, mesh, kind, attention):
    calls = tuple(CALLS) if kind == "llama" else ("a mask of ones", "positions", "packed rows")
    want = _called(kind, attention, None, calls)
    ranks = pool.run(_called, kind, attention, mesh, calls, world=2 * len(mesh), timeout=280)
    _compare(ranks, want, calls, len(mesh))


def test_attentions_are_whole_where_they_are_returned(pool):
    CALLS["attentions"] = ({"input_ids": "input_ids"}, {"output_attentions": True})
    want = _called("llama", "eager", None, ("attentions",))
    ranks = pool.run(_attentions, {"dp_shard": 2, "tp": 2})
    assert want[0]["tensors"]["attentions.1"].shape == (ROWS, 4, LENGTH, LENGTH)
    _compare(ranks, want, ("attentions",), 2)


def _attentions(mesh: dict[str, int]) -> list[dict[str, Any]]:
    CALLS["attentions"] = ({"input_ids": "input_ids"}, {"output_attentions": True})
    return _called("llama", "eager", mesh, ("attentions",))


def _compare(ranks: list[Any], want: list[Any], calls: tuple[str, ...], axes: int) -> None:
    for i, call in enumerate(calls):
        if "loss" in want[i]:
            assert sum(r[i]["loss"] for r in ranks) / len(ranks) == pytest.approx(want[i]["loss"], rel=2e-6), call
        for rank, got in enumerate(ranks):
            assert set(got[i]["tensors"]) == set(want[i]["tensors"]), call
            for name, whole in want[i]["tensors"].items():
                mine = whole if axes == 1 else whole.chunk(2)[rank // 2]
                torch.testing.assert_close(got[i]["tensors"][name], mine, rtol=2e-6, atol=2e-6, msg=f"{call}: {name}")
            for name, gradient in want[i].get("gradients", {}).items():
                torch.testing.assert_close(
                    got[i]["gradients"][name], gradient, rtol=1e-5, atol=1e-6, msg=f"{call}: gradient of {name}"
                )


def _generated(kind: str, mesh: dict[str, int] | None, **options: Any) -> Any:
    model = built(lambda: hf(kind), torch.float32).eval()
    if mesh is not None:
        plan = mp.Plan(mesh, {"input_ids": mp.Input(shape=(2, 5), dtype=torch.int64)}, hf_rules(False))
        model = mp.parallelize(model, plan)
    ids = torch.arange(10).reshape(2, 5) * 7 % 127
    mask = torch.ones_like(ids)
    mask[1, :2] = 0
    try:
        found = model.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False, **options)
    except mp.PlanError as error:
        return error.code, error.legal
    if mesh is None:
        return found
    known = len(model.__dict__["_meshplan_session"].known)
    again = model.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False, **options)
    assert torch.equal(found, again) and len(model.__dict__["_meshplan_session"].known) == known
    return found


def test_greedy_generation_gives_the_tokens_of_one_device_and_lowers_each_length_once(pool):
    want = _generated("llama", None, use_cache=False)
    assert want.shape == (2, 9)
    for got in pool.run(_generated, "llama", {"tp": 2}, world=2, use_cache=False):
        assert torch.equal(got, want)


def test_generation_with_a_cache_is_refused_with_the_cure(pool):
    for code, legal in pool.run(_generated, "llama", {"tp": 2}, world=2, use_cache=True):
        assert code == "argument-state" and "use_cache=False" in legal


class Holder:
    def __init__(self, x: Tensor) -> None:
        self.inner = {"x": [x]}


def test_an_object_with_tensors_out_of_sight_is_refused():
    model = FAMILIES["llama"].model()()
    plan = FAMILIES["llama"].plan("tp2")
    with pytest.raises(mp.PlanError) as refused:
        mp.lower(model, plan, world_size=2, inputs={"labels": Holder(torch.ones(2))})
    assert refused.value.code == "argument-state" and "labels is a Holder" in refused.value.message
