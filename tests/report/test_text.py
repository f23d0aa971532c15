"""`explain`: exact text for a hand-written program, figures worked out by hand, and no line too wide for any name."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from meshplan.report.text import explain_text
from tests.report.example import collective, llama

# x is 2 x 1024 x 512 float32 = 4 MiB on a data rank, a unit 600,000 parameters = 2.29 MiB. tp: 10 places, there and
# back, 80 MiB, and norm.weight's gradient; a rank sends half of a gather. dp_shard: 2 units x 3. Nodes of 2 ranks.
EXPECTED = """\
llama-tiny   dp_shard 2 x tp 2   4 ranks on 2 nodes   bytes counted from the program
input tokens: i64[4, 1024] {dp: S(0)}

module                    in -> out        forward                 backward                per step
tok_embeddings output     P -> S(1) tp     reduce_scatter 4.0 MiB  all_gather 4.0 MiB       8.0 MiB
layers.[0-1]  x2  local
  fsdp (600 k params)     S -> R dp_shard  all_gather 2.3 MiB      all_gather 2.3 MiB        14 MiB
                                                                   reduce_scatter 2.3 MiB
  attention input         S(1) -> R tp     all_gather 4.0 MiB      reduce_scatter 4.0 MiB    16 MiB
  attention.wo output     P -> S(1) tp     reduce_scatter 4.0 MiB  all_gather 4.0 MiB        16 MiB
  feed_forward input      S(1) -> R tp     all_gather 4.0 MiB      reduce_scatter 4.0 MiB    16 MiB
  feed_forward.w2 output  P -> S(1) tp     reduce_scatter 4.0 MiB  all_gather 4.0 MiB        16 MiB
output input              S(1) -> R tp     all_gather 4.0 MiB      reduce_scatter 4.0 MiB   8.0 MiB
norm                      P -> R tp        -                       all_reduce 4.0 KiB       4.0 KiB

axis        link     collectives  per step  a rank sends
tp 2        NVLink            21    80 MiB        40 MiB
dp_shard 2  network            6    14 MiB       6.9 MiB
all                           27    94 MiB        47 MiB

regions: 2 local, 0 dtensor   implicit redistributions: 0
note: padding: none
"""

OPENED = """\
  attention input         S(1) -> R tp     all_gather 4.0 MiB      reduce_scatter 4.0 MiB    16 MiB
    x  llama.py:31                         1,048,576 f32           1,048,576 f32
                                           sends 2.0 MiB           sends 2.0 MiB
"""

PLACEMENTS = """\
placements
parameter                         shape        on a rank   layout
tok_embeddings.weight             [1000, 512]  [250, 512]  {dp_shard: S(0), tp: S(0)}
layers.[0-1].attention.wo.weight  [512, 512]   [256, 256]  {dp_shard: S(0), tp: S(1)}
norm.weight                       [512]        [256]       {dp_shard: S(0), tp: R}

symbolic count            elements
layers.*.attention.x  x2  batch*seq*512

rules
  layers.*.attention.wo: weight {tp: S(1)}, output {tp: S(1)}

conditions
  seq % tp == 0
"""


def test_a_llama_reads_at_a_glance():
    assert explain_text(llama()) == EXPECTED


def test_verbose_opens_lines_to_tensors_source_lines_formulas_and_placements():
    text = explain_text(llama(), verbose=1)
    assert OPENED in text
    assert PLACEMENTS in text


def test_twice_verbose_also_lists_boundaries_that_move_nothing():
    d = llama()
    layout = {"from": "S(1)", "to": "S(1)"}
    quiet = {"module": "norm", "side": "input", "tensor": "h", "axis": "tp", "where": "a.py:3", "implicit": False}
    d["boundaries"].append({**quiet, **layout})
    assert "norm input" not in explain_text(d, verbose=1)
    line = next(x for x in explain_text(d, verbose=2).splitlines() if x.startswith("norm input"))
    assert line.split() == ["norm", "input", "h", "S(1)", "->", "S(1)", "tp", "a.py:3"]


def test_a_layer_that_differs_is_shown_apart():
    d = llama(4)
    odd = next(c for c in d["collectives"] if c["module"] == "layers.2.attention" and c["phase"] == "forward")
    odd["bytes"] *= 2
    text = explain_text(d)
    assert "layers.[0-1,3]  x3  local" in text and "layers.2  local" in text
    assert "per step" in text and "all_gather 8.0 MiB" in text


def test_bytes_that_routing_decides_are_said_to_be_so():
    d = llama()
    routed = collective("forward", "all_gather", "tp", 0, "moe", "x")
    d["collectives"] = [{**routed, "elements": None, "bytes": None, "wire_bytes": None}]
    lines = explain_text(d).splitlines()
    assert next(x for x in lines if x.startswith("moe")).split("  ")[-1].strip() == "by routing"
    assert next(x for x in lines if x.startswith("tp 2")).split()[3:] == ["1", "by", "routing", "by", "routing"]


def test_implicit_redistributions_are_marked_and_counted():
    d = llama()
    for b in d["boundaries"]:
        b["implicit"] = b["module"] == "output"
    text = explain_text(d)
    assert "implicit redistributions: 1" in text
    assert text.count("(implicit)") == 1


def test_warnings_and_an_empty_program():
    d = {**llama(), "collectives": [], "warnings": ["tp spans nodes"]}
    text = explain_text(d)
    assert "no collectives" in text and "warning: tp spans nodes" in text


def test_colour_only_on_request():
    assert "\x1b[" not in explain_text(llama()) and "\x1b[1m" in explain_text(llama(), color=True)


@pytest.mark.parametrize("evil", ["a\x1b[2Jb", "a\nb", "[red]a[/red]", "a\u202eb"])
def test_a_name_cannot_act_on_the_terminal(evil):
    d = llama()
    d["model"] = evil
    d["collectives"] = [{**c, "module": evil} for c in d["collectives"][:1]]
    text = explain_text(d)
    assert "\x1b" not in text and "\u202e" not in text
    if evil.startswith("["):
        assert evil in text


names = st.text(st.characters(codec="utf-8", exclude_characters="\n"), min_size=1, max_size=150)


@settings(max_examples=40, deadline=None)
@given(names, names, names, names, st.integers(60, 140), st.integers(0, 2), st.integers(1, 2**50))
def test_no_line_is_wider_than_asked(module, tensor, where, layout, width, verbose, elements):
    d = llama()
    for c in (d["collectives"][0], d["collectives"][3]):
        c.update(module=module, tensor=tensor, where=where, elements=elements, bytes=4 * elements, wire_bytes=elements)
    d["placements"][0]["name"] = module
    d["boundaries"][0].update(module=module, tensor=tensor, **{"from": layout})
    d["warnings"], d["model"] = [where], module
    assert max(cell_len(line) for line in explain_text(d, verbose, width).splitlines()) <= width
