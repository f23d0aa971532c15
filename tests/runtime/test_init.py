"""Initialisation: the same bits on any mesh, true fans, each module's own initialiser, ties, and refusals."""

import math
import random

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from meshplan.errors import PlanError
from meshplan.models.gpt import gpt_tiny
from meshplan.models.llama import Llama, LlamaConfig
from meshplan.runtime.init import init_weights


def plain(model: nn.Module, seed: int = 0, **options) -> dict[str, torch.Tensor]:
    init_weights(model, seed, **options)
    return {name: p.detach().clone() for name, p in model.named_parameters(remove_duplicate=False)}


def spread(model: nn.Module, mesh, layouts: dict[str, list]) -> nn.Module:
    """Replace parameters by DTensors full of zeros; ties stay, other parameters stay plain."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        if name in layouts:
            zeros = torch.zeros_like(parameter)
            if parameter not in made:
                made[parameter] = nn.Parameter(distribute_tensor(zeros, mesh, layouts[name], src_data_rank=None))
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, made[parameter])
    return model


def full(model: nn.Module) -> dict[str, torch.Tensor]:
    return {
        name: (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for name, p in model.named_parameters(remove_duplicate=False)
    }


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# On ranks


def _linear(placements: list, world: int):
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    model = spread(nn.Linear(4, 8), mesh, {"weight": placements})
    init_weights(model, seed=0)
    return model.weight.to_local().detach(), full(model)


@pytest.mark.parametrize("placements", [[Shard(0)], [Shard(1)], [Replicate()]], ids=str)
@pytest.mark.parametrize("world", [2, 3, 4])
def test_a_gathered_weight_is_that_of_one_rank_and_shards_differ(pool, placements, world):
    want = plain(nn.Linear(4, 8))
    results = pool.run(_linear, placements, world, world=world)
    assert all(same(gathered, want) for _, gathered in results)
    if placements != [Replicate()]:
        assert not torch.equal(results[0][0], results[1][0])


def _uneven_and_empty():
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    model = nn.Sequential(nn.Embedding(127, 6), nn.Linear(6, 5), nn.Linear(5, 2))
    spread(model, mesh, {"0.weight": [Shard(0)], "1.weight": [Shard(0)], "2.weight": [Shard(0)], "2.bias": [Shard(0)]})
    init_weights(model, seed=3)
    return [tuple(p.to_local().shape) for p in model.parameters() if isinstance(p, DTensor)], full(model)


def test_uneven_and_empty_shards_are_filled(pool):
    want = plain(nn.Sequential(nn.Embedding(127, 6), nn.Linear(6, 5), nn.Linear(5, 2)), seed=3)
    results = pool.run(_uneven_and_empty)
    assert results[3][0] == [(31, 6), (0, 6), (0, 5), (0,)]
    assert all(same(gathered, want) for _, gathered in results)


CONFIG = LlamaConfig(dim=16, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=14, vocab_size=126, tied=True)


def _fsdp_over_tp(forward_first: bool):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    model, cut = Llama(CONFIG), {}
    for name, _ in model.named_parameters(remove_duplicate=False):
        column = any(part in name for part in ("wq", "wk", "wv", "w1", "w3", "output", "tok"))
        cut[name] = [Shard(0)] if column else [Shard(1)] if name.endswith(("wo.weight", "w2.weight")) else [Replicate()]
    spread(model, mesh["tp"], cut)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["dp_shard"], reshard_after_forward=False)
    fully_shard(model, mesh=mesh["dp_shard"])
    if forward_first:
        model.layers[0].unshard()  # as between forward and backward: whole parameters are registered
    init_weights(model, seed=5)
    model.layers[0].reshard()  # back to the shards, whichever tensors were written to
    return full(model), model.output.weight is model.tok_embeddings.weight


@pytest.mark.parametrize("forward_first", [False, True], ids=["fresh", "gathered"])
def test_fully_sharded_over_tensor_parallel_equals_one_rank(pool, forward_first):
    want = plain(Llama(CONFIG), seed=5)
    for gathered, tied in pool.run(_fsdp_over_tp, forward_first):
        assert tied and same(gathered, want)


def _uneven_strided():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    model = spread(nn.Embedding(7, 3), mesh["tp"], {"weight": [Shard(0)]})
    fully_shard(model, mesh=mesh["dp_shard"])
    init_weights(model, seed=5)
    return tuple(mesh.get_coordinate()), model.weight.to_local().detach()


def test_uneven_rows_go_where_fsdp_over_tp_holds_them(pool):
    want = plain(nn.Embedding(7, 3), seed=5)["weight"]
    # tp cuts 7 rows 4 + 3, then dp_shard cuts 2 + 2 and 2 + 1.
    rows = {(0, 0): [0, 1], (1, 0): [2, 3], (0, 1): [4, 5], (1, 1): [6]}
    for coordinate, local in pool.run(_uneven_strided):
        assert torch.equal(local, want[rows[coordinate]])


def _fused(parts: dict):
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = spread(nn.Sequential(nn.Linear(3, 8)), mesh, {"0.weight": [Shard(0)], "0.bias": [Shard(0)]})
    init_weights(model, parts=parts)
    return [p.to_local().detach() for p in model.parameters()]


def test_a_fused_weight_is_cut_part_by_part(pool):
    want = plain(nn.Sequential(nn.Linear(3, 8)))
    parts = {name: {"tp": (4, 2, 2)} for name in want}
    rows = [[0, 1, 4, 6], [2, 3, 5, 7]]
    for rank, (weight, bias) in enumerate(pool.run(_fused, parts, world=2)):
        assert torch.equal(weight, want["0.weight"][rows[rank]]) and torch.equal(bias, want["0.bias"][rows[rank]])


def _wide():
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    model = spread(nn.Linear(4096, 8, bias=False), mesh, {"weight": [Shard(1)]})
    init_weights(model)
    return model.weight.to_local().std().item()


def test_fan_in_is_that_of_the_full_shape(pool):
    # kaiming_uniform_(a=sqrt(5)): uniform within 1/sqrt(4096), so std 1/(64 sqrt(3)) = 0.0090; a local fan has 0.0180.
    for std in pool.run(_wide):
        assert std == pytest.approx(1 / (64 * math.sqrt(3)), rel=0.03)


def _partial():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    local = torch.zeros(2, 2)
    model[1].weight = nn.Parameter(DTensor.from_local(local, mesh, [Partial()], run_check=False))
    before = model[0].weight.detach().clone()
    try:
        init_weights(model)
    except PlanError as error:
        return error.code, torch.equal(before, model[0].weight)


def test_a_partial_parameter_is_refused_before_anything_changes(pool):
    assert pool.run(_partial, world=2) == [("partial-tensor", True)] * 2


# On one device


def test_the_default_generators_are_left_as_they_were():
    class Restless(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = (nn.Parameter(torch.empty(3)) for _ in range(3))

        def reset_parameters(self):
            self.a.copy_(torch.rand(3))
            self.b.copy_(torch.tensor([random.random() for _ in range(3)]))
            self.c.copy_(torch.from_numpy(np.random.rand(3)))

    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    one = plain(Restless(), 7)
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == random.getstate() and (states[2] == np.random.get_state()[1]).all()
    torch.rand(1), random.random(), np.random.rand()
    assert same(plain(Restless(), 7), one) and not same(plain(Restless(), 8), one)
    assert not torch.equal(one["a"], one["b"])


def test_equal_modules_at_other_paths_draw_other_numbers_and_wrappers_do_not_count():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    def two():
        return nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))

    bare, wrapped = plain(two()), two()
    wrapped[1] = checkpoint_wrapper(wrapped[1])
    init_weights(wrapped)
    assert not torch.equal(bare["0.weight"], bare["1.weight"])
    assert torch.equal(dict(wrapped.named_parameters())["1._checkpoint_wrapped_module.weight"], bare["1.weight"])


def test_old_values_do_not_matter():
    a, b = gpt_tiny(), gpt_tiny()
    with torch.no_grad():
        for parameter in b.parameters():
            parameter.fill_(9.0)
    assert same(plain(a), plain(b))


def test_a_parents_initialiser_may_write_to_its_childrens_parameters():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(3, 3)
            self.gain = nn.Parameter(torch.empty(1))

        def reset_parameters(self):
            self.gain.fill_(2.0)
            self.inner.bias.data[1] = 5.0
            self.inner.weight.mul_(100.0)

    model = nn.Sequential(Scaled())
    got, inner = plain(model), plain(nn.Sequential(nn.ModuleDict({"inner": nn.Linear(3, 3)})))
    assert torch.equal(got["0.inner.weight"], inner["0.inner.weight"] * 100)
    assert got["0.inner.bias"][1] == 5 and got["0.inner.bias"][0] == inner["0.inner.bias"][0]
    assert got["0.gain"] == 2


def test_multihead_attention_and_recurrent_layers_have_their_own_initialisers():
    attention = plain(nn.MultiheadAttention(6, 2))
    assert not attention["out_proj.bias"].any() and not attention["in_proj_bias"].any()
    bound = math.sqrt(6 / (6 + 18))  # xavier of the fused [18, 6]
    assert 0.9 * bound < attention["in_proj_weight"].abs().max() <= bound
    assert plain(nn.LSTM(4, 5, 2))["weight_hh_l1"].abs().max() <= 1 / math.sqrt(5)


def test_init_goes_first_and_reset_parameters_fills_what_it_leaves():
    def init(module):
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, 3.0)
        elif isinstance(module, nn.Embedding):
            module.weight[2] = 0.0

    got = plain(nn.Sequential(nn.Embedding(4, 3), nn.Linear(3, 5), nn.LayerNorm(5)), init=init)
    assert (got["1.weight"] == 3).all()
    assert got["1.bias"].abs().max() <= 1 / math.sqrt(3) and got["1.bias"].any()
    assert not got["0.weight"][2].any() and got["0.weight"][[0, 1, 3]].all()
    assert (got["2.weight"] == 1).all() and not got["2.bias"].any()


@pytest.mark.parametrize("how", ["data", "rebind"])
def test_initialisers_that_replace_tensors_work_and_parameters_stay_the_same_objects(how):
    def init(module):
        values = torch.arange(6.0).view(2, 3)
        if how == "data":
            module.weight.data = values
        else:
            module.weight = nn.Parameter(values)

    model = nn.Linear(3, 2, bias=False)
    weight = model.weight
    init_weights(model, init=init)
    assert model.weight is weight and torch.equal(weight, torch.arange(6.0).view(2, 3))


def test_the_last_owner_of_a_tied_parameter_decides():
    tied = nn.Sequential(nn.Embedding(5, 5), nn.Linear(5, 5, bias=False))
    tied[0].weight = tied[1].weight
    got = plain(tied)
    assert tied[0].weight is tied[1].weight
    want = plain(nn.Sequential(nn.Identity(), nn.Linear(5, 5, bias=False)))
    assert torch.equal(got["0.weight"], want["1.weight"]) and torch.equal(got["1.weight"], want["1.weight"])


def test_transformers_models_use_their_own_initialisers_and_the_source_of_a_tie():
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaForCausalLM
    from transformers import LlamaConfig as HfLlamaConfig

    ids = {"bos_token_id": 0, "eos_token_id": 0}
    gpt = plain(GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=8, n_head=2, vocab_size=50, n_positions=8, **ids)))
    # The residual projection is scaled by its parent: 0.02 / sqrt(2 * 8).
    assert gpt["transformer.h.3.mlp.c_proj.weight"].std().item() == pytest.approx(0.005, rel=0.05)
    assert gpt["transformer.h.3.mlp.c_fc.weight"].std().item() == pytest.approx(0.02, rel=0.05)

    sizes = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = HfLlamaConfig(vocab_size=30, pad_token_id=3, tie_word_embeddings=True, **sizes)
    model = LlamaForCausalLM(config)
    llama = plain(model, seed=1)
    # The head comes last and draws no padding row of zeros: only the embedding's values keep it.
    assert not llama["lm_head.weight"][3].any() and llama["lm_head.weight"][2].all()
    assert not any(hasattr(p, "_is_hf_initialized") for p in model.parameters())
    assert same(plain(model, seed=1), llama)


class Bare(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))


def test_a_parameter_that_nothing_initialises_is_refused_by_name():
    model = nn.Sequential(nn.Linear(2, 3), Bare())
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with pytest.raises(PlanError, match=r"1\.scale") as error:
        init_weights(model)
    assert error.value.code == "no-initialiser" and error.value.module == "1"
    assert same(before, dict(model.named_parameters()))


def test_a_partly_written_parameter_is_refused():
    def init(module):
        if isinstance(module, Bare):
            module.scale[1:] = 2.0

    with pytest.raises(PlanError, match="all of scale") as error:
        init_weights(Bare(), init=init)
    assert error.value.code == "no-initialiser"


def test_integer_parameters_are_watched_too():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.n = nn.Parameter(torch.zeros(3, dtype=torch.int64), requires_grad=False)

    assert plain(Counts(), init=lambda m: m.n.copy_(torch.arange(3)))["n"].tolist() == [0, 1, 2]
    with pytest.raises(PlanError, match="all of n"):
        init_weights(Counts(), init=lambda m: m.n[:2].zero_())


def test_an_initialiser_that_reads_values_runs_although_meta_cannot():
    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(2, 2)
            self.norm = nn.Parameter(torch.empty(()))

        def reset_parameters(self):
            self.norm.fill_(self.inner.weight.norm().item())

    got = plain(nn.Sequential(Reads()))
    assert got["0.norm"].item() == pytest.approx(got["0.inner.weight"].norm().item())


def test_a_meta_parameter_is_refused_with_the_cure():
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    with pytest.raises(PlanError, match="materialise") as error:
        init_weights(model)
    assert error.value.code == "parameter-on-meta"
