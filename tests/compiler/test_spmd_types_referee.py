"""An independent referee: a lowered Llama block passes the local type checker of spmd_types, and damaged ones do not.

Its types are those of the kinds (S is its varying V; what carries no gradient is R). It cannot see a mean over a split dim,
nor which dim is split: `check` can.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import spmd_types as spmd
import torch
from spmd_types.checker import no_typecheck, typecheck
from torch import Tensor

import meshplan as mp
from meshplan.compiler.compile import compile_core
from meshplan.compiler.lowered import Core
from meshplan.compiler.sites import Move
from meshplan.lowering.tensor import bind_program
from meshplan.mesh.build import abstract_groups
from meshplan.mesh.spec import MeshSpec
from meshplan.models.llama import Llama, LlamaConfig
from meshplan.ops.dropout import DropoutStreams
from meshplan.runtime.module import in_step, install
from meshplan.verify.simulate import local_model

TYPES = {"S": spmd.V, "R": spmd.R, "I": spmd.I, "P": spmd.P, "N": spmd.R}
TP = spmd.MeshAxis.of(2, 1)


@pytest.fixture(scope="module")
def lowered() -> tuple[Llama, Core]:
    model = Llama(LlamaConfig(dim=32, n_layers=1, n_heads=4, n_kv_heads=2, vocab_size=128, ffn_dim=48, qk_norm=True))
    seq = {"output": {"tp": mp.S(1)}}
    plan = mp.Plan(
        mesh={"tp": 2},
        inputs={"tokens": mp.Input(shape=(4, 12), dtype=torch.int64)},
        rules=[
            mp.Rule("tok_embeddings", use="embedding", **seq),
            mp.Rule("layers.*.attention.{wq,wk,wv}", use="colwise"),
            mp.Rule("layers.*.attention.wo", use="rowwise", **seq),
            mp.Rule("layers.*.feed_forward.{w1,w3}", use="colwise"),
            mp.Rule("layers.*.feed_forward.w2", use="rowwise", **seq),
            mp.Rule("layers.*.{attention_norm,ffn_norm}", use="sequence"),
            mp.Rule("norm", use="sequence"),
            mp.Rule("output", use="vocab_head"),
        ],
    )
    return model, compile_core(model, plan, MeshSpec.resolve(plan.mesh, 2))


def block_type(model: Llama, core: Core) -> Any:
    """The type of the block's result on tp, or what the checker raises."""
    local = local_model(model, core, 0)
    bind_program(local, core, abstract_groups(core.spec, 0), DropoutStreams(0), {}, False)
    moves = {(b.site.side, b.site.module, b.site.key): b.move for b in core.program.boundaries}
    for path, module in local.named_modules():
        duties = module.__dict__.get("_meshplan_duties")
        if duties is not None:
            inputs = {k: typed(c, moves["input", path, k]) for k, c in duties.inputs.items()}
            outputs = {k: typed(c, moves["output", path, k]) for k, c in duties.outputs.items()}
            install(module, replace(duties, inputs=inputs, outputs=outputs), module.__dict__["_meshplan_views"], False)
    for name, p in local.named_parameters():
        plan = core.params[name]
        spmd.assert_type(p, {TP: spmd.V if plan.shards else spmd.R if "tp" in plan.reduce else spmd.I})
    x = spmd.assert_type(torch.randn(4, 6, 32, requires_grad=True), {TP: spmd.V})
    cos, sin = (spmd.assert_type(torch.randn(12, 1, 4), {TP: spmd.R}) for _ in range(2))
    with typecheck():
        return spmd.get_axis_local_type(in_step(local.layers[0])(x, cos, sin), TP)


def typed(convert: Callable[[Tensor], Tensor], move: Move) -> Callable[[Tensor], Tensor]:
    """A boundary as the checker sees it: what comes in is of the one type, what goes on of the other."""

    def run(x: Tensor) -> Tensor:
        spmd.assert_type(x, {TP: TYPES[move.src]})
        with no_typecheck():
            moved = convert(x).detach().requires_grad_(x.requires_grad)
        return spmd.assert_type(moved, {TP: TYPES[move.dst]})

    return run


def test_a_lowered_block_is_well_typed(lowered: tuple[Llama, Core]) -> None:
    assert block_type(*lowered) is spmd.V


def test_a_norm_whose_gradient_is_not_reduced_is_ill_typed(lowered: tuple[Llama, Core]) -> None:
    model, core = lowered
    norm = "layers.0.ffn_norm.weight"
    assert core.params[norm].reduce == ("tp",)
    damaged = replace(core, params={**core.params, norm: replace(core.params[norm], reduce=())})
    with pytest.raises(spmd.SpmdTypeError):
        block_type(model, damaged)


def test_a_gathered_value_owned_as_invariant_is_ill_typed(lowered: tuple[Llama, Core]) -> None:
    model, core = lowered
    wrong = tuple(
        replace(b, move=replace(b.move, dst="I")) if b.site.module == "layers.0.attention" else b
        for b in core.program.boundaries
    )
    assert wrong != core.program.boundaries
    with pytest.raises(spmd.SpmdTypeError):
        block_type(model, replace(core, program=replace(core.program, boundaries=wrong)))
