"""Sections: the same keys in YAML, as a dict and as a dataclass; unknown words refused with the legal ones."""

import pytest
import torch

from meshplan.errors import PlanError
from meshplan.plan.sections import Compile, Context, Experts, Fsdp, Pipeline, Recompute, section_from
from meshplan.plan.source import Source

EXAMPLES = [
    Fsdp(("layers.*",), "zero2", torch.bfloat16, torch.float32, torch.float16, False, {"**.wk.weight": 1}),
    Context(("a",), "hybrid", "contiguous", inner=8),
    Context(("a",), "ring", transport="peer"),
    Experts(("moe",), ep=4, etp=2, dispatch="alltoall"),
    Pipeline("interleaved_1f1b", 8, ("layers.4", "layers.8"), chunks=2),
    Recompute(("layers.*",), "none", "regather"),
    Recompute(("layers.*",), "none", "regather"),
    Compile(("layers.*",), "aot_eager", False),
]


@pytest.mark.parametrize("section", EXAMPLES, ids=lambda s: s.name)
def test_a_section_reads_back_from_its_mapping(section):
    assert section_from(type(section), section.to_dict(), Source()) == section
    assert section_from(type(section), section, Source()) is section


def test_the_mapping_holds_plain_values_and_no_defaults():
    assert EXAMPLES[0].to_dict() == {
        "units": ["layers.*"],
        "strategy": "zero2",
        "param_dtype": "bfloat16",
        "reduce_dtype": "float32",
        "output_dtype": "float16",
        "reshard_after_forward": False,
        "shard_dims": {"**.wk.weight": 1},
    }
    assert Fsdp("layers.*").to_dict() == {"units": ["layers.*"]}
    assert Pipeline().to_dict() == {}


@pytest.mark.parametrize(
    ("cls", "value", "expected"),
    [
        (Fsdp, {"units": [], "mode": "full"}, "unknown-key"),
        (Fsdp, {"strategy": "zero3"}, "missing-key"),
        (Fsdp, {"units": [], "strategy": "no-shard"}, "unknown-option"),
        (Fsdp, {"units": [], "param_dtype": "bf16"}, "unknown-option"),
        (Fsdp, {"units": [], "reshard_after_forward": 1}, "bad-value"),
        (Fsdp, {"units": [], "shard_dims": {"a": "0"}}, "bad-value"),
        (Fsdp, {"units": ["a..b"]}, "bad-pattern"),
        (Fsdp, {"units": 3}, "bad-value"),
        (Fsdp, ["layers.*"], "bad-value"),
        (Context, {"attention": "a", "method": "rings"}, "unknown-option"),
        (Context, {"attention": "a", "method": "hybrid"}, "bad-value"),
        (Context, {"attention": "a", "inner": 2}, "bad-value"),
        (Context, {"attention": "a", "transport": "nvlink"}, "unknown-option"),
        (Context, {"attention": "a", "method": "ulysses", "transport": "peer"}, "bad-value"),
        (Context, {"attention": "a", "balance": "zig-zag"}, "unknown-option"),
        (Experts, {"at": "a", "ep": 0}, "bad-value"),
        (Experts, {"at": "a", "etp": True}, "bad-value"),
        (Experts, {"at": "a", "dispatch": "all_to_all"}, "unknown-option"),
        (Experts, {"at": "a", "dispatch": "twolevel"}, "bad-value"),
        (Experts, {"at": "a", "inner": 2}, "bad-value"),
        (Experts, {"at": "a", "dispatch": "twolevel", "inner": 0}, "bad-value"),
        (Experts, {"at": "a", "payload": "bf8"}, "unknown-option"),
        (Experts, {"at": "a", "dispatch": "fused", "payload": "fp8"}, "bad-value"),
        (Pipeline, {"schedule": "1F1B"}, "unknown-option"),
        (Pipeline, {"microbatches": 0}, "bad-value"),
        (Pipeline, {"split": "even"}, "unknown-option"),
        (Recompute, {"units": "a", "policy": "never"}, "unknown-option"),
        (Recompute, {"units": "a", "policy": "none"}, "bad-value"),
        (Recompute, {"units": "a", "gather": "keep"}, "unknown-option"),
        (Compile, {"units": "a", "backend": None}, "bad-value"),
    ],
)
def test_unknown_keys_and_values_are_refused_with_what_is_legal(cls, value, expected):
    with pytest.raises(PlanError) as error:
        section_from(cls, value, Source())
    assert error.value.code == expected
    assert error.value.legal


def test_the_nearest_legal_word_is_named():
    with pytest.raises(PlanError, match="did you mean 'zero3'"):
        Fsdp("a", strategy="zero-3")
    with pytest.raises(PlanError, match="did you mean 'strategy'"):
        section_from(Fsdp, {"units": "a", "stratgy": "zero3"}, Source())
