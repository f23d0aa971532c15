"""The trace keeps order and bytes, and claims no time."""

import json

from meshplan.report.trace import trace_json
from tests.report.example import llama


def test_one_tick_a_collective_in_program_order_on_its_axis():
    d = llama()
    trace = json.loads(json.dumps(trace_json(d)))
    ticks = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    tracks = {e["tid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert [(e["ts"], e["dur"]) for e in ticks] == [(i, 1) for i in range(27)]
    assert [(tracks[e["tid"]], e["args"]["bytes"], e["cat"]) for e in ticks] == [
        (c["axis"], c["bytes"], c["phase"]) for c in d["collectives"]
    ]
    assert "not a time" in trace["otherData"]["unit"]
    assert ticks[0]["name"] == "reduce_scatter tok_embeddings"
