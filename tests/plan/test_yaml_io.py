"""Plan files: exact round trips, places in errors, and nothing in them that could run or unfold without end."""

import string

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshplan.errors import PlanError
from meshplan.plan import yaml_io
from meshplan.plan.layouts import AXES
from meshplan.plan.placements import P, R, S
from meshplan.plan.plan import Input, Plan, Rule
from meshplan.plan.rules import SHORTHANDS
from meshplan.plan.sections import (
    BALANCES,
    DISPATCHES,
    GATHERS,
    POLICIES,
    SCHEDULES,
    STRATEGIES,
    Compile,
    Context,
    Experts,
    Fsdp,
    Pipeline,
    Recompute,
)
from meshplan.plan.values import DTYPES

TEXT = """\
# a comment
mesh: {dp_replicate: 1, dp_shard: -1, cp: 1, tp: 4}
inputs:
  tokens: {dtype: int64, shape: [8, 2048], place: {dp: S(0), cp: S(1)}}
rules:
  - {at: tok_embeddings, params: {weight: {tp: S(0)}}, output: {tp: S(1)}}
  - {at: "layers.*.attention.{wq,wk,wv}", use: colwise}
  - at: layers.*.qkv
    params:
      weight: {tp: S(0), parts: [8, 8, 8]}
    output: {0: {tp: "S(-1, parts=[8, 8, 8])"}}
fsdp: {units: ["layers.*"], strategy: zero3, param_dtype: bfloat16, reduce_dtype: float32}
pipeline: {schedule: 1f1b, microbatches: 8, split: auto}
"""


def test_a_file_means_what_the_same_plan_in_python_means():
    assert yaml_io.parse_plan(TEXT) == Plan(
        mesh={"dp_replicate": 1, "dp_shard": -1, "cp": 1, "tp": 4},
        inputs={"tokens": Input((8, 2048), torch.int64, {"dp": S(0), "cp": S(1)})},
        rules=[
            Rule("tok_embeddings", {"weight": {"tp": S(0)}}, output={"tp": S(1)}),
            Rule("layers.*.attention.{wq,wk,wv}", use="colwise"),
            Rule("layers.*.qkv", {"weight": {"tp": S(0, [8, 8, 8])}}, output={0: {"tp": S(-1, [8, 8, 8])}}),
        ],
        fsdp=Fsdp("layers.*", param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        pipeline=Pipeline(microbatches=8),
    )


axes = st.sampled_from(["dp_replicate", "dp_shard", "cp", "tp"])
shards = st.builds(S, st.integers(-3, 3), st.none() | st.lists(st.integers(1, 64), min_size=1, max_size=3))
layouts = st.dictionaries(axes, st.one_of(st.just(R), st.just(P), shards), min_size=1, max_size=3)
param_layouts = st.fixed_dictionaries({"tp": st.one_of(st.just(R), shards)})
# Names that a careless writer would leave bare: numbers, truth values, nulls, indicators, other scripts.
words = st.text(string.ascii_letters + string.digits + "_-#:*&!?%@ ~éж'\"\\", min_size=1, max_size=6) | st.sampled_from(
    ["null", "true", "yes", "1", "0x1f", "1e3", "~", "*", "**", "-", "=", "<<", "1f1b", "2020-01-01", "[0-7]", "{a,b}"]
)
patterns = st.lists(
    st.sampled_from(["layers", "*", "**", "[0-7]", "{wq,wk}", "1", "no", "w*"]), min_size=0, max_size=4
).map(".".join)
boundaries = st.one_of(layouts, st.dictionaries(words | st.integers(0, 3), layouts, min_size=1, max_size=2))
rules = st.builds(
    Rule,
    patterns,
    st.dictionaries(words, param_layouts, max_size=2),
    boundaries,
    boundaries,
    st.none() | st.sampled_from(SHORTHANDS),
    st.booleans(),
)
units = st.lists(patterns, max_size=2)
dtypes = st.none() | st.sampled_from(list(DTYPES.values()))
inputs = st.builds(
    Input,
    st.none() | st.lists(st.integers(1, 9), max_size=3),
    dtypes,
    st.dictionaries(st.sampled_from(["dp", "cp", "tp"]), st.just(R) | shards, max_size=2),
)


@st.composite
def meshes(draw):
    names = draw(st.permutations(AXES))[: draw(st.integers(0, 5))]
    free = draw(st.sampled_from([*names, None]))
    return {name: -1 if name == free else draw(st.integers(1, 9)) for name in names}


plans = st.builds(
    Plan,
    mesh=meshes(),
    inputs=st.dictionaries(words, inputs, max_size=2),
    rules=st.lists(rules, max_size=3),
    fsdp=st.none()
    | st.builds(
        Fsdp,
        units,
        st.sampled_from(STRATEGIES),
        dtypes,
        dtypes,
        dtypes,
        st.none() | st.booleans(),
        st.none() | st.dictionaries(patterns, st.integers(-2, 2), max_size=2),
    ),
    context=st.none() | st.builds(Context, units, st.just("ring"), st.sampled_from(BALANCES)),
    experts=st.none()
    | st.builds(
        Experts, units, st.integers(1, 8), st.integers(1, 2), st.sampled_from(sorted({*DISPATCHES} - {"twolevel", "fused"})),
        payload=st.sampled_from([None, "fp8"]), overlap=st.booleans(),
    )
    | st.builds(Experts, units, dispatch=st.just("twolevel"), inner=st.integers(1, 4))
    | st.builds(Experts, units, dispatch=st.just("fused")),
    pipeline=st.none()
    | st.builds(Pipeline, st.sampled_from(SCHEDULES), st.integers(1, 9), st.just("auto") | units, st.none()),
    recompute=st.none()
    | st.builds(Recompute, units, st.just("none"), st.just("regather"))
    | st.builds(Recompute, units, st.sampled_from(sorted(set(POLICIES) - {"none"})), st.sampled_from(GATHERS)),
    compile=st.none() | st.builds(Compile, units, words, st.booleans()),
    regions=st.sampled_from(["auto", "dtensor"]),
)


@settings(max_examples=60, deadline=None)
@given(plans)
def test_any_plan_survives_the_trip_through_yaml_and_through_a_dict(plan):
    text = plan.to_yaml()
    again = Plan.from_yaml(text)
    assert again == plan
    assert list(again.mesh) == list(plan.mesh)
    assert again.to_yaml() == text
    data = plan.to_dict()
    assert Plan.from_dict(data) == plan
    assert Plan.from_dict(data).to_dict() == data == again.to_dict()


@pytest.mark.parametrize(
    ("old", "new", "code", "place"),
    [
        ('S(1)}}\n  - {at: "l', 'S1}}\n  - {at: "l', "bad-placement", (6, 69)),
        ("use: colwise", "use: colwize", "unknown-option", (7, 48)),
        ("tp: 4", "tpp: 4", "unknown-axis", (2, 46)),
        ("tp: 4", "tp: 0", "bad-degree", (2, 50)),
        ("{wq,wk,wv}", "{wq,wk,wv", "bad-pattern", (7, 10)),
        ("parts: [8, 8, 8]}", "parts: [8, 0, 8]}", "bad-value", (10, 37)),
        ("int64", "int65", "unknown-option", (4, 19)),
        ("strategy:", "strategi:", "unknown-key", (12, 29)),
        ("pipeline:", "fsdp:", "duplicate-key", (13, 1)),
        ("cp: 1, tp", "tp: 1, tp", "duplicate-key", (2, 46)),
        ("mesh:", "mash:", "unknown-key", (2, 1)),
        ("- at: layers.*.qkv", "- use: colwise", "missing-key", (8, 5)),
        ("int64", "!!str int64", "yaml-tag", (4, 19)),
        ("auto}", "!!python/object/apply:os.system [ls]}", "yaml-tag", (13, 52)),
        ("[8, 2048]", "&a [*a]", "yaml-limit", (4, 33)),
        ("pipeline: {", "pipeline: {{", "yaml-syntax", (14, 1)),
        ("mesh:", "%YAML 1.1\n---\nmesh:", "yaml-syntax", (3, 1)),
        ("fsdp:", "---\nfsdp:", "yaml-syntax", (12, 1)),
        ("{tp: S(0)}}, out", "{true: S(0)}}, out", "bad-value", (6, 44)),
        ("{tp: S(0)}}, out", "{tp: }}, out", "bad-placement", (6, 47)),
    ],
)
def test_an_error_names_the_file_the_line_and_the_column(old, new, code, place):
    assert TEXT.count(old) >= 1
    with pytest.raises(PlanError) as error:
        yaml_io.parse_plan(TEXT.replace(old, new, 1), "plan.yaml")
    assert error.value.code == code
    assert (error.value.where.line, error.value.where.column) == place
    assert str(error.value).startswith(f"plan.yaml:{place[0]}:{place[1]}: ")


def test_the_offending_line_is_shown_with_a_pointer_under_it():
    with pytest.raises(PlanError) as error:
        yaml_io.parse_plan("mesh: {tp: 2}\nrules:\n  - {at: x, use: colwize}\n", "p.yaml")
    lines = str(error.value).splitlines()
    assert lines[1] == "      - {at: x, use: colwize}"
    assert lines[2].index("^") == lines[1].index("colwize")


def test_every_placement_of_a_rule_knows_its_own_place():
    rule = yaml_io.parse_plan(TEXT, "p").rules[2]
    assert str(rule.where) == "p:8:5"
    assert str(rule.source.child("params", "weight", "tp").where) == "p:10:20"
    assert str(rule.source.child("output", "0", "tp").where) == "p:11:22"


def test_words_that_yaml_1_1_takes_for_truth_values_are_names():
    assert yaml_io.parse_plan("mesh: {tp: 2}\nrules: [{at: on.no.yes, use: colwise}]").rules[0].at == "on.no.yes"


def test_aliases_may_be_used_and_cannot_unfold_without_end(monkeypatch):
    shared = yaml_io.parse_plan(
        "mesh: {tp: 2}\nrules:\n - {at: a, output: &seq {tp: S(1)}}\n - {at: b, output: *seq}\n"
    )
    assert shared.rules[1].output == {"": {"tp": S(1)}}
    bomb = "x0: &x0 [a, a, a, a, a, a, a, a, a, a]\n" + "".join(
        f"x{i}: &x{i} [{', '.join([f'*x{i - 1}'] * 10)}]\n" for i in range(1, 12)
    )
    monkeypatch.setattr(yaml_io, "MAX_NODES", 1000)
    with pytest.raises(PlanError) as error:
        yaml_io.parse_plan(bomb)
    assert error.value.code == "yaml-limit"


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("", "missing-key"),
        ("# only a comment\n", "missing-key"),
        ("3", "bad-value"),
        ("[1, 2]", "bad-value"),
        ("[" * 3000, "yaml-limit"),
        ("[" * 3000 + "]" * 3000, "yaml-limit"),
        (b"mesh: {tp: 2}\n# \xff\n", "yaml-syntax"),
        ("mesh: {tp: \x00}", "yaml-syntax"),
    ],
)
def test_files_that_are_no_plan_are_refused(text, code):
    with pytest.raises(PlanError) as error:
        yaml_io.parse_plan(text)
    assert error.value.code == code


def test_a_plan_is_loaded_from_a_file_with_or_without_a_byte_order_mark(tmp_path):
    for data in (TEXT.encode(), b"\xef\xbb\xbf" + TEXT.encode(), TEXT.replace("\n", "\r\n").encode()):
        path = tmp_path / "plan.yaml"
        path.write_bytes(data)
        plan = yaml_io.load_plan(path)
        assert plan == yaml_io.parse_plan(TEXT)
        assert str(plan.rules[0].where) == f"{path}:6:5"


def test_a_shipped_plan_goes_by_its_name_and_an_unknown_one_names_the_nearest(tmp_path, monkeypatch):
    folder = tmp_path / "meshplan" / "plans" / "gpt"
    folder.mkdir(parents=True)
    (folder / "tp.yaml").write_text("mesh: {tp: 2}")
    (folder / "notes.txt").write_text("not a plan")
    monkeypatch.setattr(yaml_io.resources, "files", lambda name: tmp_path / name)
    monkeypatch.chdir(tmp_path)
    assert yaml_io.shipped_plans() == ["gpt/tp"]
    for name in ("gpt/tp", "gpt/tp.yaml", "plans/gpt/tp.yaml"):
        assert yaml_io.load_plan(name) == Plan({"tp": 2})
    with pytest.raises(PlanError) as error:
        yaml_io.load_plan("gpt/tpp")
    assert error.value.code == "no-such-plan"
    assert "did you mean 'gpt/tp'" in str(error.value)
    assert error.value.legal == ["gpt/tp"]
