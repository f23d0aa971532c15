"""docs/experts.md tells the truth: its snippets run, its formulas are what is counted, its table is what is printed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import sympy
import torch
from sympy.parsing.sympy_parser import convert_xor, implicit_multiplication, parse_expr, standard_transformations
from torch import Tensor, nn

import meshplan as mp
from meshplan.ops.experts.cost import Routed, expression, sends
from meshplan.ops.experts.layout import TokenLayout
from meshplan.ops.experts.layout_cost import sends_around
from meshplan.ops.experts.payload import packed_width
from meshplan.runtime.comm import AxisGroup
from tests.distributed.moe_blocks import Looped, Masked
from tests.distributed.test_expert_load import chosen
from tests.distributed.test_experts import PLANS, batch, made

PAGE = (Path(__file__).parents[2] / "docs" / "experts.md").read_text(encoding="utf-8")
SNIPPETS = re.findall(r"```python\n(.*?)```", PAGE, re.S)
NAMES = {name: sympy.Symbol(name) for name in ("T", "k", "H", "b", "W", "i", "O", "I", "c", "e")}


def rows(heading: str) -> dict[str, list[sympy.Expr]]:
    """First cell of each row of the table under `heading`, and the formulas in its others."""
    section = PAGE[PAGE.index(f"## {heading}") :]
    lines = section[section.index("\n|") :].strip().split("\n\n")[0].splitlines()[2:]
    found = {}
    for line in lines:
        first, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        found[first] = [parsed(cell[1:-1]) for cell in cells if cell.startswith("`")]
    return found


def parsed(text: str) -> sympy.Expr:
    # A bracket behind a symbol is a factor, not an argument.
    text = re.sub(r"(?<=[A-Za-z]) \(", "*(", text)
    return parse_expr(text, NAMES, (*standard_transformations, convert_xor, implicit_multiplication))


METHODS = {
    "`alltoall`": "alltoall",
    "`alltoall`, `dedup`": "dedup",
    "`allgather`": "allgather",
    "`twolevel`, across nodes": "across",
    "`twolevel`, inside a node": "inside",
}


def test_formulas_of_methods_are_those_of_the_code_and_those_that_are_counted():
    """8 ranks in 2 nodes, 8 experts. Every ordered pair of experts is the choice of one token of each rank: as if drawn alike."""
    table = rows("Methods")
    assert set(table) == set(METHODS)
    pairs = torch.tensor([(a, b) for a in range(8) for b in range(8)])
    x = Routed.of([pairs] * 8, 8, 100, torch.bfloat16, torch.float32, nodes=2)
    numbers = {"T": 64, "k": 2, "H": 100, "b": 2, "W": 8, "O": 2, "I": 4, "i": 1}
    group, levels = AxisGroup("ep", 8, 5), (AxisGroup("out", 2, 1), AxisGroup("in", 4, 1))
    axes = {"across": "out", "inside": "in"}
    for cell, name in METHODS.items():
        [formula] = table[cell]
        assert sympy.simplify(formula - expression(name)) == 0
        method, options = (name, {}) if name not in axes else ("twolevel", {"levels": levels})
        for phase in ("forward", "backward"):
            sent = sends(method, x, group, phase=phase, **options)
            counted = [s.bytes for s in sent if s.call.dtype == torch.bfloat16 and s.call.axis == axes.get(name, "ep")]
            assert sum(counted) == float(formula.subs(numbers))


def test_formulas_of_layouts_are_counted():
    table = rows("Tokens that ranks")
    group = AxisGroup("tp", 4, 2)
    layouts = {
        "`copies`": TokenLayout(copies=group),
        "`etp`, tokens of their own": TokenLayout(etp=group, equal=True),
        "`etp`, `etp_copies`": TokenLayout(etp=group, etp_copies=True),
    }
    assert set(table) == set(layouts)
    for cell, layout in layouts.items():
        [formula] = table[cell]
        expected = formula.subs({"T": 64, "H": 100, "b": 2, "c": 4, "e": 4})
        for phase in ("forward", "backward"):
            around = sends_around(layout, (64,), 2, 100, torch.bfloat16, torch.float32, phase=phase)
            assert sum(s.bytes for part in around for s in part if s.call.dtype == torch.bfloat16) == expected


def _snippet() -> dict[str, Tensor]:
    torch.manual_seed(torch.distributed.get_rank())
    names: dict[str, Any] = {}
    exec(SNIPPETS[2], names)
    return {name: names[name].detach() for name in ("tokens", "weights", "indices", "up", "down", "out")}


def test_the_snippet_computes_what_it_says(pool):
    ranks = pool.run(_snippet)
    up, down = (torch.cat([r[name] for r in ranks]) for name in ("up", "down"))
    for rank, r in enumerate(ranks):
        assert len(r["out"]) == 10 + rank
        gate, other = torch.einsum("th,tkfh->tkf", r["tokens"], up[r["indices"]]).chunk(2, -1)
        each = torch.einsum("tkf,tkhf->tkh", torch.nn.functional.silu(gate) * other, down[r["indices"]])
        torch.testing.assert_close(r["out"], (r["weights"][..., None] * each).sum(1), rtol=1e-4, atol=1e-2)


def _counted() -> dict[str, Any]:
    model = mp.parallelize(made(), PLANS["ep 2 of tp, tokens whole"])
    names: dict[str, Any] = {"mp": mp, "model": model, "batch": mp.shard_batch(model, batch())}
    exec(SNIPPETS[0].replace("layers.3.moe.experts", "layers.1.experts"), names)
    return names["load"].to_json()  # type: ignore[no-any-return]


def test_the_report_of_a_step_counts_what_one_device_chooses(pool):
    want = chosen(made(), batch())["layers.1.experts"].tolist()
    assert [found["layers.1.experts"]["experts"] for found in pool.run(_counted, world=2)] == [want, want]


def test_the_block_of_the_page_is_taken_as_it_stands():
    names: dict[str, Any] = {"nn": nn, "torch": torch}
    exec(SNIPPETS[1], names)
    page = type("Page", (names["Block"], Masked), {})  # what it holds is that of Masked
    x, model, want = torch.randn(2, 3, 12), page(), Masked()
    want.load_state_dict(model.state_dict())
    logits, chosen = model(x)[1], model(x)[1].topk(2, -1).indices
    scale = logits.softmax(-1).gather(1, chosen).sum(-1)  # Masked divides by it
    torch.testing.assert_close(model(x)[0].flatten(0, 1), want(x)[0].flatten(0, 1) * scale[:, None])
    tokens = mp.Input(shape=(4, 6), dtype=torch.int64, place={"dp": mp.S(0)})
    experts = {"at": ["layers.*.moe"], "ep": 2}
    plan = mp.Plan(mesh={"dp_shard": 2}, inputs={"tokens": tokens, "labels": tokens}, experts=experts)
    modules = mp.lower(Looped(page), plan, 2).to_json()["experts"]["modules"]
    assert [m["module"] for m in modules] == ["layers.0.moe", "layers.1.moe"]


def test_the_table_is_what_is_printed(capsys):
    exec(SNIPPETS[3], {})
    assert capsys.readouterr().out == re.search(r"```text\n(.*?)```", PAGE, re.S)[1]


def test_bytes_of_eight_bits():
    found = re.search(r"(\d+) for (\d+) at H (\d+)", PAGE)
    width = int(found[3])
    assert (int(found[1]), int(found[2])) == (packed_width(width), 2 * width)


def test_codes_that_are_named_have_pages():
    named = set(re.findall(r"`(expert[a-z-]+)`", PAGE))
    pages = {path.stem for path in (Path(__file__).parents[2] / "docs" / "errors").iterdir()}
    assert {"expert-index", "experts-levels"} <= named & pages
