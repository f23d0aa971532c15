"""Loss curves: what the characters say is read off again, and the picture is a picture of both."""

import sys

import pytest

from meshplan.report.curves import curves_png, curves_text


def _plot(text: str) -> list[str]:
    """The rows between the label and the axis, without their numbers."""
    return [line.partition("|")[2] for line in text.split("\n") if "|" in line]


def test_equal_curves_are_one_line_of_stars():
    text = curves_text({"a": [3.0, 2.0, 1.0], "b": [3.0, 2.0, 1.0]}, height=3)
    assert _plot(text) == ["*", " *", "  *"]
    assert "o a   x b   * all of them" in text


def test_curves_that_part_show_their_own_marks():
    # Step 2 is 1.0 for the first and 3.0 for the second: the lowest and the highest of three rows.
    text = curves_text({"a": [3.0, 1.0, 2.0], "b": [3.0, 3.0, 2.0]}, height=3)
    assert _plot(text) == ["*x", "  *", " o"]


def test_the_scale_runs_from_the_largest_to_the_smallest_value():
    lines = curves_text({"a": [5.25, 4.0, 1.25]}, height=5, label="loss").split("\n")
    assert lines[0] == "loss"
    assert [line.split("|")[0].strip() for line in lines[1:6]] == ["5.25", "", "3.25", "", "1.25"]


def test_many_steps_are_thinned_to_the_width_first_and_last_kept():
    text = curves_text({"a": [float(1000 - i) for i in range(1000)]}, width=50, height=4)
    assert max(map(len, text.split("\n"))) <= 50
    rows = _plot(text)
    assert rows[0][0] == "o"
    assert rows[-1][-1] == "o"
    assert "step 1000" in text


def test_a_curve_that_never_moves_lies_on_the_floor():
    assert _plot(curves_text({"a": [2.0] * 4}, height=3)) == ["", "", "oooo"]


@pytest.mark.parametrize(
    "series", [{}, {"a": [1.0]}, {"a": [1.0, 2.0], "b": [1.0]}, {name: [1.0, 2.0] for name in "abcd"}]
)
def test_what_cannot_be_drawn_is_an_error(series):
    with pytest.raises(ValueError, match="1 to 3 series of one length"):
        curves_text(series)


def test_the_picture_is_a_png_in_which_both_curves_have_their_colours(tmp_path):
    from matplotlib import image
    from matplotlib.colors import to_rgb

    path = tmp_path / "losses.png"
    assert curves_png(path, {"one": [3.0, 2.0, 1.5], "two": [3.0, 2.0, 1.5]}, "title")
    assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    pixels = image.imread(path)[..., :3]
    assert (abs(pixels - to_rgb("C1")).max(-1) < 0.02).sum() > 100
    broad = [0.4 * c + 0.6 for c in to_rgb("C0")]  # on white
    assert (abs(pixels - broad).max(-1) < 0.02).sum() > 1000


def test_without_matplotlib_nothing_is_written_and_the_caller_is_told(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert not curves_png(tmp_path / "losses.png", {"one": [2.0, 1.0]}, "title")
    assert not list(tmp_path.iterdir())
