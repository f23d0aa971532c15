"""Module path patterns, against names worked out by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshplan.errors import PlanError
from meshplan.plan.patterns import match, nearest, unused

NAMES = [
    "",
    "embed",
    "layers",
    *(f"layers.{i}" for i in range(12)),
    *(f"layers.{i}.attention.{p}" for i in (0, 1, 10) for p in ("wq", "wk", "wo")),
    "layers.0.mlp.up",
    "head",
]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("", [""]),
        ("*", ["embed", "layers", "head"]),
        ("layers.*", [f"layers.{i}" for i in range(12)]),
        ("layers.[0-1]", ["layers.0", "layers.1"]),
        ("layers.[9-11]", ["layers.9", "layers.10", "layers.11"]),
        ("layers.[10]", ["layers.10"]),
        ("layers.[1-10].attention.wo", ["layers.1.attention.wo", "layers.10.attention.wo"]),
        ("**.wo", ["layers.0.attention.wo", "layers.1.attention.wo", "layers.10.attention.wo"]),
        ("layers.0.**", ["layers.0", *(f"layers.0.attention.{p}" for p in ("wq", "wk", "wo")), "layers.0.mlp.up"]),
        ("**.attention.**.wq", ["layers.0.attention.wq", "layers.1.attention.wq", "layers.10.attention.wq"]),
        ("layers.1.attention.w*", [f"layers.1.attention.{p}" for p in ("wq", "wk", "wo")]),
        ("{head,embed}", ["embed", "head"]),
        ("layers.0.{attention.w{q,k},mlp.up}", ["layers.0.attention.wq", "layers.0.attention.wk", "layers.0.mlp.up"]),
        ("layers.*.up", []),
        ("ead", []),
        ("layers.1?", []),
    ],
)
def test_a_pattern_matches_these_names_and_no_other(pattern, expected):
    assert match(pattern, NAMES) == expected


def test_two_stars_match_everything_the_model_itself_too():
    assert match("**", NAMES) == NAMES


def test_an_index_range_reads_whole_numbers():
    assert match("block[0-7]", ["block3", "block17", "block8", "block"]) == ["block3"]
    assert match("*[0-7]", ["x17", "x7"]) == ["x7"]


@pytest.mark.parametrize(
    "pattern", ["a..b", ".a", "a.", "{a", "a}", "a}.{b", "[7-0]", "[a]", "a[1", "a]", "a.x**", "[-1]", "{a,b}" * 11]
)
def test_a_malformed_pattern_is_refused(pattern):
    with pytest.raises(PlanError) as error:
        match(pattern, NAMES)
    assert error.value.code == "bad-pattern"
    assert repr(pattern) in str(error.value)


def test_a_pattern_that_unfolds_without_end_is_refused_quickly():
    for pattern in ("{a,b}" * 60, "{" * 5000, "{a,b}" * 5000):
        with pytest.raises(PlanError) as error:
            match(pattern, ["a"])
        assert error.value.code == "bad-pattern"


def test_alternatives_that_lead_nowhere_are_told():
    assert unused("layers.*.attention.{wq,wk,wv}", NAMES) == ["wv"]
    assert unused("layers.0.{attention.w{q,x},mlp.down}", NAMES) == ["x", "mlp.down"]
    assert unused("layers.{0,1}.{attention.wq,mlp.up}", NAMES) == []
    assert unused("layers.*", NAMES) == []


def test_the_nearest_name_comes_first_and_layers_are_told_once():
    assert nearest("layers.*.up", NAMES)[0] == "layers.*.mlp.up"
    assert nearest("layers.0.mlp.upp", NAMES)[0] == "layers.0.mlp.up"
    assert nearest("layers.*.attention.{wq,wkk}", NAMES, n=2) == ["layers.*.attention.wq", "layers.*.attention.wk"]
    assert nearest("{unclosed", NAMES, n=1)
    assert nearest("x", []) == []


segments = st.lists(st.sampled_from(["a", "b1", "0", "17", "c_d"]), min_size=1, max_size=4)


@given(segments, st.data())
def test_a_name_is_matched_by_itself_and_by_itself_with_any_segment_starred(parts, data):
    name = ".".join(parts)
    assert match(name, [name]) == [name]
    i = data.draw(st.integers(0, len(parts) - 1))
    starred = [*parts[:i], "*", *parts[i + 1 :]]
    assert match(".".join(starred), [name]) == [name]
    assert match(".".join([*starred, "*"]), [name]) == []
    assert match(".".join([*parts[:i], "**"]), [name]) == [name]
