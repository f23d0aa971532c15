"""Patterns match the paths they were made for, and nothing else."""

from __future__ import annotations

import pytest

from meshplan.plan.patterns import match
from meshplan.search.paths import grouped, pattern_of

NAMES = [
    "",
    "emb",
    *(f"layers.{i}{tail}" for i in range(12) for tail in ("", ".attn", ".attn.q", ".attn.k", ".mlp")),
    "head",
]


@pytest.mark.parametrize(
    ("paths", "pattern"),
    [
        (["head"], "head"),
        ([f"layers.{i}.attn.q" for i in range(12)], "layers.*.attn.q"),
        ([f"layers.{i}.mlp" for i in range(1, 11)], "layers.[1-10].mlp"),
        ([f"layers.{i}.mlp" for i in (0, 3, 11)], "layers.{0,3,11}.mlp"),
        (["emb", "head"], "{emb,head}"),
    ],
)
def test_a_pattern_is_short_and_exact(paths, pattern):
    assert pattern_of(paths, NAMES) == pattern
    assert set(match(pattern, NAMES)) == set(paths)


def test_siblings_share_a_rule():
    assert grouped(["layers.*.attn.q", "layers.*.attn.k", "head"]) == [
        ("layers.*.attn.{q,k}", ["layers.*.attn.q", "layers.*.attn.k"]),
        ("head", ["head"]),
    ]
