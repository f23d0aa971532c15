"""The hand-written peer: torch's styles for a plan's splits, the same gradients as one device, or a refusal."""

import dataclasses

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

import meshplan as mp
from meshplan.errors import PlanError
from meshplan.models.llama import Llama, LlamaConfig
from meshplan.verify.inputs import make_batch
from meshplan.verify.peer import peer, tensor_styles

SHAPE = (4, 12)


def model() -> nn.Module:
    torch.manual_seed(3)
    config = LlamaConfig(dim=24, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=40, vocab_size=46, head_dim=6)
    return Llama(config).double()


def plan(name: str, mesh: dict[str, int]) -> mp.Plan:
    read = mp.load_plan(f"llama3/{name}")
    inputs = {key: dataclasses.replace(item, shape=SHAPE) for key, item in read.inputs.items()}
    return dataclasses.replace(read, mesh=mesh, inputs=inputs)


def test_each_split_module_gets_the_style_a_person_would_write():
    styles = tensor_styles(model(), mp.lower(model(), plan("tp_sp", {"tp": 2}), world_size=2).core)
    assert isinstance(styles["tok_embeddings"], RowwiseParallel)
    assert styles["tok_embeddings"].output_layouts == (Shard(1),)
    for name in ("wq", "wk", "wv"):
        assert isinstance(styles[f"layers.1.attention.{name}"], ColwiseParallel)
    assert styles["layers.0.feed_forward.w2"].output_layouts == (Shard(1),)
    assert isinstance(styles["layers.0.ffn_norm"], SequenceParallel)
    assert styles["output"].input_layouts == (Shard(1),)
    assert styles["output"].output_layouts == (Shard(-1),)
    assert "layers.0" not in styles and "rotary" not in styles


def test_without_sequence_parallelism_row_splits_return_replicas():
    styles = tensor_styles(model(), mp.lower(model(), plan("tp", {"tp": 2}), world_size=2).core)
    assert styles["layers.0.attention.wo"].output_layouts == (Replicate(),)
    assert not [s for s in styles.values() if isinstance(s, SequenceParallel)]


def _distances(name: str, mesh: dict[str, int]) -> dict[str, float]:
    chosen = plan(name, mesh)
    low = mp.lower(model(), chosen, world_size=4)
    batch = make_batch(chosen.inputs, low.core.spec, model(), seed=1)
    single = model()
    single(**batch).backward()
    by_hand = peer(model(), low.core)
    parallel = mp.parallelize(model(), chosen)
    by_hand.forward_backward(mp.shard_batch(parallel, batch))
    want = dict(single.named_parameters())
    found = {}
    for key, p in by_hand.model.named_parameters():
        grad = p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad
        expected = want[key.removeprefix("module.")].grad
        found[key] = ((grad - expected).abs().max() / expected.abs().max()).item()
    return found


@pytest.mark.parametrize("name, mesh", [("tp_sp_fsdp", {"dp_shard": 2, "tp": 2}), ("ddp", {"dp_replicate": 4})])
def test_gradients_equal_those_of_one_device_with_unequal_label_counts(pool, name, mesh):
    for distances in pool.run(_distances, name, mesh):
        assert len(distances) == 3 + 2 * 9
        assert max(distances.values()) < 1e-12


@pytest.mark.parametrize(
    "section, what",
    [
        ({"recompute": mp.Recompute(units=["layers.*"])}, "a section `recompute`"),
        ({"fsdp": mp.Fsdp(units=["layers.*"], strategy="zero1")}, "strategy zero1"),
        ({"fsdp": None, "mesh": {"dp_replicate": 2, "tp": 2}, "rules": plan("tp", {}).rules}, "without fully_shard"),
    ],
)
def test_what_torch_has_no_equivalent_for_is_refused(section, what):
    chosen = dataclasses.replace(plan("fsdp", {"dp_shard": 2}), **section)
    core = mp.lower(model(), chosen, world_size=4 if "rules" in section else 2).core
    with pytest.raises(PlanError, match=what) as refused:
        tensor_styles(model(), core)
    assert refused.value.code == "no-peer"
