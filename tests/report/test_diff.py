"""What one plan moves more than another."""

from meshplan.report.diff import diff_json, diff_text
from tests.report.example import collective, llama


def changed():
    """Layer 1's attention gathers twice as much, layer 0's w2 is not gathered in backward, a new axis comes in."""
    d = llama()
    d["mesh"] = {"dp_shard": 2, "cp": 1, "tp": 2}
    for c in d["collectives"]:
        if (c["module"], c["phase"]) == ("layers.1.attention", "forward"):
            c.update(bytes=2 * c["bytes"], wire_bytes=2 * c["wire_bytes"])
    d["collectives"].remove(next(c for c in d["collectives"][14:] if c["module"] == "layers.0.feed_forward.w2"))
    d["collectives"].append(collective("optimizer", "all_reduce", "dp_shard+tp", 3, "", "norm"))
    d["placements"][1]["layout"] = {"tp": "R"}
    return d


def test_changes_by_axis_and_by_module_largest_first():
    found = diff_json(llama(), changed())
    x = 2**22
    axes = {e["axis"]: (e["change"]["bytes"], e["change"]["wire_bytes"], e["change"]["calls"]) for e in found["axes"]}
    assert axes == {"tp": (0, 0, -1), "dp_shard": (0, 0, 0), "dp_shard+tp": (12, 12, 1)}
    assert [(e["module"], e["axis"], e["change"]["bytes"], e["change"]["calls"]) for e in found["modules"]] == [
        ("layers.*.attention", "tp", x, 0),
        ("layers.*.feed_forward.w2", "tp", -x, -1),
        ("", "dp_shard+tp", 12, 1),
    ]
    assert found["total"]["change"] == {"bytes": 12, "wire_bytes": 12, "calls": 0}
    assert found["placements"] == [
        {
            "name": "layers.*.attention.wo.weight",
            "a": "dp_shard: S(0), tp: S(1)",
            "b": "tp: R or dp_shard: S(0), tp: S(1)",
        }
    ]


def test_a_plan_does_not_differ_from_itself():
    found = diff_json(llama(), llama())
    assert found["modules"] == found["placements"] == []
    assert found["total"]["change"] == {"bytes": 0, "wire_bytes": 0, "calls": 0}
    assert "no module moves more or less" in diff_text(llama(), llama())


def test_the_text_says_what_grew_and_what_shrank():
    lines = [" ".join(line.split()) for line in diff_text(llama(), changed()).splitlines()]
    assert "layers.*.attention tp 16 MiB 20 MiB +4.0 MiB 4 -> 4 +2.0 MiB" in lines
    # Two layers there and back are 16 MiB; one backward gather less is 12.
    assert "layers.*.feed_forward.w2 tp 16 MiB 12 MiB -4.0 MiB 4 -> 3 -2.0 MiB" in lines
    assert "(the model itself) dp_shard+tp 0 B 12 B +12 B 0 -> 1 +12 B" in lines
    assert max(map(len, diff_text(llama(), changed(), width=100).splitlines())) <= 100


def test_programs_without_communication():
    alone = {**llama(), "collectives": []}
    assert diff_json(alone, alone)["total"]["change"]["bytes"] == 0
    assert diff_json(alone, llama())["total"]["a"]["calls"] == 0
