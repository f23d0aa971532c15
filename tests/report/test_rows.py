"""Collectives gathered into rows, and what each axis sums to."""

from meshplan.report.rows import Call, Sum, axis_sums, link_of, rows
from tests.report.example import collective, llama


def test_forward_and_backward_of_one_boundary_are_one_row():
    row = next(r for r in rows(llama()) if r.module == "layers.1.attention")
    assert (row.what, row.tensor, row.axis, row.layout, row.where) == ("input", "x", "tp", "S(1) -> R", "llama.py:31")
    n = 2 * 1024 * 512
    assert row.of("forward") == (Call("all_gather", 1, "float32", n, 4 * n, 2 * n),)
    assert row.of("backward") == (Call("reduce_scatter", 1, "float32", n, 4 * n, 2 * n),)
    assert row.step == Sum(bytes=8 * n, wire=4 * n, calls=2)


def test_every_collective_is_in_exactly_one_row():
    d = llama(3)
    assert sum(r.step.calls for r in rows(d)) == len(d["collectives"])
    assert sum(r.step.bytes for r in rows(d)) == sum(c["bytes"] for c in d["collectives"])


def test_equal_calls_of_a_row_are_counted_not_repeated():
    d = llama()
    d["collectives"] = [collective("forward", "all_reduce", "tp", 10, "m", "x", count=n) for n in (1, 2)]
    (row,) = rows(d)
    assert [str(c) for c in row.of("forward")] == ["3x all_reduce 40 B"]
    assert row.step == Sum(bytes=120, wire=120, calls=3)


def test_an_operator_that_sends_over_a_data_axis_is_not_taken_for_the_fsdp_unit_around_it():
    d = llama()
    unit = d["fsdp_units"][0]["module"]
    counted = collective("forward", "all_reduce", "dp_shard", 1, unit, "cross_entropy") | {"what": "operator"}
    gathered = collective("forward", "all_gather", "dp_shard", 64, unit, "parameters") | {"what": "fsdp"}
    d["collectives"] = [counted, gathered]
    assert [(r.tensor, r.what.partition(" ")[0]) for r in rows(d)] == [("cross_entropy", ""), ("parameters", "fsdp")]


def test_rows_that_only_backward_has_follow_their_module():
    d = llama()
    for module in ("output", "layers.0.norm", "layers.0"):
        d["collectives"].append(collective("backward", "all_reduce", "tp", 1, module, "w"))
    order = [(r.module, r.tensor) for r in rows(d)]
    assert order.index(("layers.0", "w")) == order.index(("layers.0.feed_forward.w2", "0")) + 1
    assert order.index(("output", "w")) == order.index(("output", "x")) + 1
    assert order[-2:] == [("layers.0.norm", "w"), ("norm", "weight")]


def test_sums_by_axis_most_first():
    sums = axis_sums(llama())
    assert list(sums) == ["tp", "dp_shard"]
    assert sums["tp"] == Sum(bytes=20 * 2**22 + 4096, wire=20 * 2**21 + 4096, calls=21)
    assert sums["dp_shard"] == Sum(bytes=6 * 2_400_000, wire=6 * 1_200_000, calls=6)


def test_links_by_where_groups_lie():
    d = llama()
    links = {a: link_of(d, a) for a in ("tp", "dp_shard", "dp_shard+tp", "ep")}
    assert links == {"tp": "NVLink", "dp_shard": "network", "dp_shard+tp": "network", "ep": "unknown link"}
    assert link_of({**d, "links": {"ep": "NVLink"}}, "ep") == "NVLink"
    assert link_of({**d, "node_size": 4}, "dp_shard") == "NVLink"
