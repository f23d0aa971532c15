"""What `explain` says each way to dispatch tokens would send: closed formulas, and what the graph counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import meshplan as mp
from tests.distributed.moe import Moe

S = mp.S


def lowered(experts: dict[str, Any], mesh: dict[str, int], place: dict[str, Any]) -> Any:
    tokens = mp.Input(shape=(8, 6), dtype=torch.int64, place=place)
    plan = mp.Plan(mesh=mesh, inputs={"tokens": tokens, "labels": tokens}, experts={"at": ["layers.*"], **experts})
    ranks = 1
    for n in mesh.values():
        ranks *= n
    return mp.lower(Moe(layers=1, k=2), plan, ranks)


def sends(low: Any, imbalance: float = 1.0) -> dict[str, Any]:
    (module,) = low.to_json(imbalance=imbalance)["experts"]["modules"]
    return module["sends"]


def rows(low: Any, width: int) -> int:
    """Bytes that leave a rank forward in rows, as the graph counts them for an even routing."""
    found = [c.to_json() for c in low.collectives if c.routed and c.phase == "forward" and c.elements % width == 0]
    return sum(c["wire_bytes"] for c in found if c["dtype"] == "float32")


def test_bytes_are_the_formula_at_the_measured_imbalance_and_the_graph_where_it_is_even():
    low = lowered({"ep": 4, "dispatch": "alltoall"}, {"dp_shard": 4}, {"dp": S(0)})
    found = sends(low, 1.5)
    T, k, H, b, W = 12, 2, found["width"], 4, 4
    assert [found[key] for key in ("tokens", "k", "bytes", "ranks", "imbalance")] == [T, k, b, W, 1.5]
    assert found["methods"]["alltoall"] == {
        "formula": found["methods"]["alltoall"]["formula"], "used": True,
        "bytes": round(2.5 * T * k * H * b * 3 / 4), "backward": round(2.5 * T * k * H * b * 3 / 4),
    }  # fmt: skip
    assert found["methods"]["dedup"]["bytes"] == round(2.5 * T * 4 * (1 - 0.75**2) * H * b * 3 / 4)
    assert found["methods"]["allgather"]["bytes"] == 2 * 3 * T * H * b
    assert sends(low)["methods"]["alltoall"]["bytes"] == rows(low, H) == 2 * T * k * H * b * 3 // 4


def test_two_levels_are_told_apart_and_eight_bits_halve_what_is_dispatched():
    low = lowered({"ep": 4, "dispatch": "twolevel", "inner": 2, "payload": "fp8"}, {"dp_shard": 4}, {"dp": S(0)})
    found = sends(low)
    T, H, b = 12, found["width"], 4
    used = {name for name, m in found["methods"].items() if m["used"]}
    assert found["inner"] == 2 and used == {"across", "inside"}
    across = 2 * T * 2 * (1 - 0.5**2) * H * b / 2
    assert found["methods"]["across"]["backward"] == round(across)
    assert found["methods"]["across"]["bytes"] == round(across / 2 + across / 2 * (H + 1) / (H * b))


def test_ranks_of_etp_dispatch_the_tokens_of_both_and_copies_a_share():
    place = {"dp": S(0)}
    assert sends(lowered({"ep": 2, "etp": 2}, {"dp_shard": 2, "tp": 2}, place))["tokens"] == 24
    assert sends(lowered({"ep": 4}, {"dp_shard": 2, "tp": 2}, place))["tokens"] == 12
    assert sends(lowered({"ep": 1}, {"dp_shard": 2, "tp": 2}, place)) is None


def test_an_imbalance_below_one_is_refused():
    low = lowered({"ep": 2}, {"dp_shard": 2}, {"dp": S(0)})
    with pytest.raises(mp.PlanError) as caught:
        low.to_json(imbalance=0.5)
    assert caught.value.code == "bad-value"


def test_the_text_names_what_is_used_and_opens_to_formulas():
    low = lowered({"ep": 2}, {"dp_shard": 2}, {"dp": S(0)})
    said = low.explain()
    assert "sends forward (modelled, imbalance 1)" in said and "(used)" in said and "(W - 1)" not in said
    assert "(W - 1)" in low.explain(verbose=1) and max(map(len, low.explain(verbose=1).splitlines())) <= 100
