"""Experts that are a gated MLP are recognised by what they compute, whatever they are called and however they lie."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshplan.compiler.experts_mlp import mlp_of
from meshplan.models.experts import PackedExperts
from meshplan.ops.experts.call import MlpNames
from tests.distributed.moe import Experts


def random(module: nn.Module) -> Callable[[torch.dtype], nn.Module]:
    def made(dtype: torch.dtype) -> nn.Module:
        torch.manual_seed(0)
        found = copy.deepcopy(module).to(dtype)
        for p in found.parameters():
            nn.init.normal_(p)
        return found

    return made


FORMS = list(product(("swiglu", "clamped_swiglu"), *[(False, True)] * 3))


@pytest.mark.parametrize("gate, bias, concatenated, transposed", FORMS)
@pytest.mark.parametrize("inner", [5, 12])  # 12: as wide as a token, so that matrices have no more than one reading in shape
def test_every_form_of_packed_experts(gate, bias, concatenated, transposed, inner):
    module = PackedExperts(
        6, 12, inner, gate=gate, has_bias=bias, is_concatenated=concatenated, is_transposed=transposed
    )
    names = mlp_of(random(module), 6, 12)
    assert names == MlpNames(
        "gate_up_proj", "down_proj", *(("gate_up_proj_bias", "down_proj_bias") if bias else (None, None)),
        interleaved=not concatenated, clamped=gate == "clamped_swiglu", turned=transposed,
    )  # fmt: skip


def test_names_do_not_matter_and_one_bias_may_be_missing():
    assert mlp_of(random(Experts(8, 12, 10)), 8, 12) == MlpNames("up", "down", None, "bias", False, False, True)


class Gelu(Experts):
    """The same shapes, another unit."""

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e in range(self.number):
            t, j = torch.where(chosen == e)
            gate, up = (x[t] @ self.up[e]).chunk(2, -1)
            out = out.index_add(0, t, ((F.gelu(gate) * up) @ self.down[e] + self.bias[e]) * weights[t, j, None])
        return out


class Swapped(Experts):
    """Up before gate."""

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e in range(self.number):
            t, j = torch.where(chosen == e)
            up, gate = (x[t] @ self.up[e]).chunk(2, -1)
            out = out.index_add(0, t, ((F.silu(gate) * up) @ self.down[e] + self.bias[e]) * weights[t, j, None])
        return out


@pytest.mark.parametrize("kind", [Gelu, Swapped])
def test_what_computes_anything_else_is_not_taken_for_it(kind):
    assert mlp_of(random(kind(8, 12, 10)), 8, 12) is None
