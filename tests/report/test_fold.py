"""Repeated layers are shown once, and only if they are equal."""

from meshplan.report.fold import fold, index_text, split_index, star


def test_first_index_of_a_path():
    assert split_index("layers.3.attention.wq") == ("layers", 3, "attention.wq")
    assert split_index("a.12") == ("a", 12, "")
    assert split_index("0.weight") == ("", 0, "weight")
    assert split_index("conv2d.w1") is None and split_index("") is None
    assert split_index("x.²") is None  # a digit to str.isdigit, not an index
    assert star("layers.3.experts.11.w1") == "layers.*.experts.*.w1"


def test_indices_in_short():
    assert [index_text(i) for i in ([4], [2, 0, 1], [0, 2, 4, 5], [7, 7])] == ["4", "[0-2]", "[0,2,4-5]", "7"]


def items(*paths: str) -> list[tuple[str, str]]:
    return [(path, path.rsplit(".", 1)[-1]) for path in paths]


def test_equal_layers_fold_also_when_others_stand_between():
    folds = fold(items("emb", "l.0.a", "l.1.b", "l.0.c", "l.2.a", "l.2.c", "l.3.b", "head", "tail"), key=str)
    assert [(f.label, f.count) for f in folds] == [("", 1), ("l.[0,2]", 2), ("l.[1,3]", 2), ("", 1)]
    assert [path for path, _ in folds[1].items] == ["a", "c"]
    assert [path for path, _ in folds[3].items] == ["head", "tail"]


def test_layers_with_other_content_order_or_prefix_stay_apart():
    pairs = [("l.0.a", 1), ("l.1.a", 2), ("m.0.a", 1), ("l.2.a", 1), ("l.2.b", 1), ("l.3.b", 1), ("l.3.a", 1)]
    assert [f.label for f in fold(pairs, key=lambda n: n)] == ["l.0", "l.1", "m.0", "l.2", "l.3"]


def test_nested_indices_fold_level_by_level():
    paths = [f"l.{i}.experts.{j}.w" for i in range(2) for j in range(3)]
    (outer,) = fold(items(*paths), key=str)
    (inner,) = fold(outer.items, key=str)
    assert (outer.label, outer.count, inner.label, inner.count) == ("l.[0-1]", 2, "experts.[0-2]", 3)
    assert inner.items == (("w", "w"),)
