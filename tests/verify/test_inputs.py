"""The batch of a verification: legal ids, unequal label counts, the same for a seed, cut down where asked."""

import pytest
import torch
from torch import nn

from meshplan.errors import PlanError
from meshplan.mesh.spec import MeshSpec
from meshplan.plan.placements import S
from meshplan.plan.rules import Input
from meshplan.verify.inputs import describe, id_ranges, make_batch, small_inputs

SPEC = MeshSpec((("dp_shard", 2), ("cp", 2), ("tp", 2)))
PLACE = {"dp": S(0), "cp": S(1)}


class _Model(nn.Module):
    def __init__(self, classes: int = 7) -> None:
        super().__init__()
        self.words, self.places, self.head = nn.Embedding(31, 4), nn.Embedding(11, 4), nn.Linear(4, classes)


def _batch(seed: int = 0) -> dict:
    inputs = {
        "tokens": Input((6, 20), torch.int64, PLACE),
        "labels": Input((6, 20), torch.int64, PLACE),
        "position_ids": Input((6, 20), torch.int32, PLACE),
        "attention_mask": Input((6, 20), torch.bool, PLACE),
        "pixels": Input((6, 3, 5), torch.float32, {"dp": S(0)}),
        "flags": Input((64,), torch.bool, {}),
    }
    return make_batch(inputs, SPEC, _Model(), seed)


def test_ids_stay_below_the_smallest_table_and_floats_keep_shape_and_dtype():
    batch = _batch()
    assert batch["tokens"].min() >= 0
    assert batch["tokens"].max() < 11
    assert batch["labels"].max() < 7
    assert batch["tokens"].unique().numel() > 5
    assert batch["position_ids"].tolist() == [list(range(20))] * 6
    assert batch["position_ids"].dtype == torch.int32
    assert batch["attention_mask"].all()
    assert 0 < batch["flags"].sum() < 64
    assert (batch["pixels"].shape, batch["pixels"].dtype) == ((6, 3, 5), torch.float32)


def test_every_data_rank_ignores_another_number_of_labels_and_keeps_some():
    labels = _batch()["labels"]
    blocks = [labels[i : i + 3, j : j + 10] for i in (0, 3) for j in (0, 10)]
    # Of 30 labels in each of four blocks: 30 x d / 10, d from 1 to 4.
    assert [(block == -100).sum().item() for block in blocks] == [3, 6, 9, 12]


def test_counts_differ_even_where_ranks_hold_two_labels():
    inputs = {"labels": Input((4,), torch.int64, {"dp": S(0)})}
    labels = make_batch(inputs, MeshSpec((("dp_replicate", 1), ("dp_shard", 2))), _Model(), 0)["labels"]
    assert [(block == -100).sum().item() for block in labels.split(2)] == [0, 1]


def test_one_label_a_rank_is_kept():
    inputs = {"targets": Input((4,), torch.int64, {"dp": S(0)})}
    labels = make_batch(inputs, MeshSpec((("dp_shard", 4),)), _Model(), 0)["targets"]
    assert (labels != -100).all()


def test_a_seed_gives_the_same_batch_and_another_seed_another():
    first, again, other = _batch(), _batch(), _batch(1)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["tokens"], other["tokens"])


def test_an_input_without_a_shape_is_refused():
    with pytest.raises(PlanError) as caught:
        make_batch({"tokens": Input(None, torch.int64)}, SPEC, _Model(), 0)
    assert caught.value.code == "no-shape"


def test_id_ranges_stand_in_for_each_other():
    assert id_ranges(_Model()) == (11, 7)
    assert id_ranges(nn.Linear(4, 5)) == (5, 5)
    assert id_ranges(nn.Embedding(9, 2)) == (9, 9)
    assert id_ranges(nn.ReLU()) == (2, 2)


def test_small_inputs_keep_what_divides_them():
    inputs = {
        "tokens": Input((16, 8192), torch.int64, PLACE),
        "odd": Input((3, 2999), torch.int64, {}),
        "pixels": Input((64, 3, 224, 224), torch.float32, {}),
    }
    small = small_inputs(inputs, SPEC)
    assert small["tokens"].shape == (16, 64)  # 2 x 8 ranks, 8 x 8 ranks
    assert small["odd"].shape == (3, 9)  # still divided by nothing
    assert small["pixels"].shape == (64, 3, 224, 224)
    assert small["tokens"].place == PLACE


def test_a_batch_in_words():
    batch = {"tokens": torch.zeros(2, 3, dtype=torch.int64), "causal": True}
    assert describe(batch) == {"tokens": "int64[2, 3]", "causal": "True"}
