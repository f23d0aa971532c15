"""Sizes, counts and tensors as they are printed everywhere."""

import pytest

from meshplan.report.units import bytes_text, count_text, dtype_text, plain, tensor_text


@pytest.mark.parametrize(
    ("n", "text"),
    [
        (0, "0 B"),
        (7, "7 B"),
        (1023, "1023 B"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (64 * 2**20, "64 MiB"),
        (2**19, "512 KiB"),
        (2**20 - 1, "1.0 MiB"),  # not 1024 KiB
        (10189, "10 KiB"),  # 9.95 KiB rounds to 10, not to 10.0
        (5 * 2**60, "5120 PiB"),
        (-3 * 2**30, "-3.0 GiB"),
    ],
)
def test_bytes(n, text):
    assert bytes_text(n) == text


def test_counts():
    counts = {7: "7", 999: "999", 1500: "1.5 k", 218_112_000: "218 M", 8_030_261_248: "8.0 G"}
    assert {n: count_text(n) for n in counts} == counts


def test_tensors_in_the_one_notation():
    layout = {"dp": "S(0)", "tp": "S(2)"}
    assert tensor_text("float32", [4, 2048, 512], layout) == "f32[4, 2048, 512] {dp: S(0), tp: S(2)}"
    assert [dtype_text(d) for d in ("bfloat16", "int64", "uint8", "bool", "float8_e4m3fn", "complex64")] == [
        "bf16", "i64", "u8", "bool", "f8_e4m3fn", "c64",
    ]  # fmt: skip
    assert tensor_text(None, (3,), None) == "[3]"


def test_control_characters_are_made_visible():
    assert plain("a\x1b[0m\nb é") == "a\\x1b[0m\\nb é"
