"""Checkpoints across meshes: values are positions (1, 2, 3, ...), so a lost, doubled or permuted row is seen."""

from __future__ import annotations

import os
import pickle
import warnings

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from meshplan.errors import PlanError
from meshplan.runtime import checkpoint
from meshplan.runtime.checkpoint import load, load_plan_of, save
from tests.runtime.checkpoint_ranks import Holder, adamw, all_cases, net, numbered, train


@pytest.fixture(scope="module")
def ranks(pool, tmp_path_factory):
    """The folder that four gloo ranks saved to, and what each noted there."""
    folder = tmp_path_factory.mktemp("ranks")
    return folder, pool.run(all_cases, folder)


def model_of(**parameters: torch.Tensor) -> Holder:
    return Holder(**{name: torch.zeros_like(value) for name, value in parameters.items()})


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: t.detach().clone() for name, t in model.state_dict().items()}


def plain_adam(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=0.1)


# --- across meshes ---


def test_seven_rows_saved_on_two_load_on_three_four_and_one(ranks):
    folder, seen = ranks
    assert [s["seven_rows"]["saved"] for s in seen] == [[1, 2, 3, 4], [5, 6, 7], [], []]
    assert [s["seven_rows"]["three"] for s in seen] == [[1, 2, 3], [4, 5, 6], [7], []]
    assert [s["seven_rows"]["four"] for s in seen] == [[1, 2], [3, 4], [5, 6], [7]]
    one = Holder(w=torch.zeros(7, 1, dtype=torch.float64))
    load(folder / "seven", one)
    assert one.w.flatten().tolist() == [1, 2, 3, 4, 5, 6, 7]


def test_ranks_without_a_row_save_and_load(ranks):
    folder, seen = ranks
    assert [s["empty_shard"]["rows"] for s in seen] == [[1, 3], [5, 7], [9], []]
    one, single_row = Holder(w=torch.zeros(5, 2, dtype=torch.float64)), Holder(w=torch.zeros(1, 3, dtype=torch.float64))
    load(folder / "fsdp5", one)
    load(folder / "one_row", single_row)
    assert torch.equal(one.w, numbered(5, 2)) and torch.equal(single_row.w, numbered(1, 3))


def test_fused_parts_return_to_the_users_row_order(ranks):
    folder, seen = ranks
    one = Holder(qkv__weight=torch.zeros(8, 2, dtype=torch.float64))
    load(folder / "fused", one)
    assert torch.equal(one.qkv.weight, numbered(8, 2))
    # First column of rows 0 1 4 6 on tp rank 0 and of 2 3 5 7 on tp rank 1; FSDP2 halves each.
    assert [s["fused"]["rows"] for s in seen] == [[1, 3, 9, 13], [5, 7, 11, 15]] * 2
    assert [s["fused"]["shard"] for s in seen] == [[1, 3], [5, 7], [9, 13], [11, 15]]


@pytest.mark.parametrize("saved_on", ["2d", "tp4"])
def test_fsdp_and_tp_with_adam_load_on_one_device(ranks, saved_on):
    """The reference is three AdamW steps on one device; elementwise in float64, so layouts can differ by rounding."""
    folder, _ = ranks
    reference = net()
    expected = adamw(reference)
    train(reference, expected, range(3))
    one = net(fill=False)
    optimizer = adamw(one)
    load(folder / saved_on, one, optimizer)
    for a, b in zip(reference.parameters(), one.parameters(), strict=True):
        torch.testing.assert_close(b, a, rtol=1e-14, atol=0)
        for field in ("exp_avg", "exp_avg_sq"):
            torch.testing.assert_close(optimizer.state[b][field], expected.state[a][field], rtol=1e-14, atol=0)
        assert optimizer.state[b]["step"].item() == 3


def test_resharding_moves_bits_unchanged(ranks):
    folder, _ = ranks
    a, b = net(fill=False), net(fill=False)
    first, second = adamw(a), adamw(b)
    load(folder / "2d", a, first)
    load(folder / "tp4", b, second)
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))
    for x, y in zip(a.parameters(), b.parameters(), strict=True):
        assert all(torch.equal(first.state[x][f], second.state[y][f]) for f in first.state[x])


def test_adamw_continues_bit_exactly_with_sharded_moments(ranks):
    _, seen = ranks
    for rank in seen:
        case = rank["two_dimensional"]
        assert case["resumed"] and case["moment_is_sharded"]
        assert case["options"] == [[0.05, 0.3], [0.02, 0.01]]
        assert case["extra"] == [3, [0.5, 0.25], [0, 1, 2]]


def test_every_layer_of_every_pipeline_stage_is_saved(ranks):
    folder, seen = ranks
    assert all(s["pipeline"]["equal"] for s in seen)
    whole = Holder(**{f"layers__{i}__w": torch.zeros(2, 3, dtype=torch.float64) for i in range(4)})
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1, momentum=0.9)
    load(folder / "pp", whole, optimizer)
    for i, w in enumerate(whole.parameters()):
        start = numbered(2, 3) * (i + 1)
        torch.testing.assert_close(optimizer.state[w]["momentum_buffer"], start * 0.3, rtol=1e-15, atol=0)
        torch.testing.assert_close(w.detach(), start - 0.5 * start * 0.3, rtol=1e-15, atol=0)
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_saving_on_some_ranks_raises_soon_and_leaves_ranks_in_step(ranks):
    _, seen = ranks
    code, message, seconds = seen[0]["some_ranks_only"]["alone"]
    assert code == "ranks-missing" and "ranks 1, 2, 3 of 4" in message and seconds < 5
    assert not any(s["some_ranks_only"]["exists"] for s in seen)
    assert all(s["some_ranks_only"]["then"] for s in seen)


def test_what_one_rank_cannot_load_or_save_no_rank_does(ranks):
    _, seen = ranks
    for rank, s in enumerate(seen):
        case = s["one_rank_wrong"]
        assert case["load"][0] == "shape-mismatch" and "[3, 3]" in case["load"][1]
        assert ("rank 2: " in case["load"][1]) == (rank != 2)
        assert case["save"][0] == "ranks-disagree"
        assert case["unchanged"]
        assert case["packed"][0] == "shard-extent"


def test_the_plan_travels_inside(ranks):
    folder, seen = ranks
    assert load_plan_of(folder / "fused") == "mesh: {dp: 2, tp: 2}\n" == seen[3]["fused"]["plan"]
    with pytest.raises(PlanError, match="carries no plan") as e:
        load_plan_of(folder / "seven")
    assert e.value.code == "no-plan"


# --- names and ties ---


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(3, 2)
        self.register_buffer("kept", torch.ones(2))
        self.register_buffer("table", torch.ones(2), persistent=False)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda m: m,
        lambda m: checkpoint_wrapper(m),
        lambda m: torch.compile(m, backend="eager"),
        lambda m: torch.compile(checkpoint_wrapper(m), backend="eager"),
        lambda m: checkpoint_wrapper(torch.compile(m, backend="eager")),
    ],
    ids=["plain", "recompute", "compile", "compile-recompute", "recompute-compile"],
)
@pytest.mark.parametrize("level", ["root", "layer"])
def test_saved_keys_equal_the_eager_models_for_every_wrapper_order(tmp_path, wrap, level):
    layer = Layer()
    model = wrap(nn.Sequential(layer)) if level == "root" else nn.Sequential(wrap(layer))
    save(tmp_path / "c", model)
    keys = set(torch_dcp.FileSystemReader(tmp_path / "c").read_metadata().state_dict_metadata)
    assert keys == {"0.lin.weight", "0.lin.bias", "0.kept"}
    plain = nn.Sequential(Layer())
    load(tmp_path / "c", plain)
    assert torch.equal(plain[0].lin.weight, layer.lin.weight)


def test_stock_dcp_reads_it_by_the_models_own_state_dict(tmp_path):
    model = Holder(w=numbered(3, 2))
    save(tmp_path / "c", model, plain_adam(model), extra={"a": torch.ones(2)})
    state = {"w": torch.zeros(3, 2, dtype=torch.float64)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch_dcp.load(state, checkpoint_id=tmp_path / "c", no_dist=True)
    assert torch.equal(state["w"], numbered(3, 2))


def tied(value: torch.Tensor) -> Holder:
    p = nn.Parameter(value)
    return Holder(embed__weight=p, head__weight=p)


def test_tied_parameters_are_saved_under_each_name_and_stay_tied(tmp_path):
    model = tied(numbered(3, 2))
    save(tmp_path / "c", model, plain_adam(model))
    other = tied(torch.zeros(3, 2, dtype=torch.float64))
    load(tmp_path / "c", other, plain_adam(other))
    assert other.embed.weight is other.head.weight and torch.equal(other.head.weight, numbered(3, 2))
    untied = model_of(embed__weight=numbered(3, 2), head__weight=numbered(3, 2))
    load(tmp_path / "c", untied)
    assert torch.equal(untied.head.weight, untied.embed.weight) and untied.head.weight is not untied.embed.weight


def test_two_values_for_one_tied_parameter_are_refused_untouched(tmp_path):
    save(tmp_path / "c", Holder(embed__weight=numbered(3, 2), head__weight=numbered(3, 2) + 1))
    model = tied(torch.zeros(3, 2, dtype=torch.float64))
    with pytest.raises(PlanError, match=r"embed.weight and head.weight are one tensor") as e:
        load(tmp_path / "c", model)
    assert e.value.code == "tied-mismatch" and not model.head.weight.any()


# --- refusals: before anything is written ---


@pytest.fixture
def saved(tmp_path):
    model = Holder(up__weight=numbered(3, 2), bias=numbered(3))
    optimizer = plain_adam(model)
    train(model, optimizer, range(2))
    save(tmp_path / "c", model, optimizer, extra={"epoch": 4})
    return tmp_path / "c", model, optimizer


@pytest.mark.parametrize(
    ("parameters", "code", "message"),
    [
        ({"up__weight": numbered(3, 3), "bias": numbered(3)}, "shape-mismatch", r"up.weight is \[3, 2\] .* \[3, 3\]"),
        ({"up__weight": numbered(3, 2), "bias": numbered(3).float()}, "dtype-mismatch", r"bias is \S+64 .* \S+32 in"),
        ({"up__weigth": numbered(3, 2), "bias": numbered(3)}, "missing-key", r"up.weigth \(nearest: up.weight\)"),
        ({"bias": numbered(3)}, "unexpected-key", "up.weight, which the model does not have"),
    ],
)
def test_mismatches_name_the_key_and_change_nothing(saved, parameters, code, message):
    model = model_of(**parameters)
    with pytest.raises(PlanError, match=message) as e:
        load(saved[0], model)
    assert e.value.code == code
    assert not any(p.any() for p in model.parameters())


def test_not_strict_loads_what_matches_and_says_the_rest(saved):
    model = model_of(up__weight=numbered(3, 2), gate=numbered(2))
    loaded = load(saved[0], model, strict=False)
    assert (loaded.missing, loaded.unexpected) == (("gate",), ("bias",))
    assert torch.equal(model.up.weight, saved[1].up.weight) and not model.gate.any()


def test_damage_is_found_before_anything_is_applied(saved):
    folder, old, _ = saved
    data = folder / "__0_0.distcp"
    whole = data.read_bytes()
    model = model_of(up__weight=numbered(3, 2), bias=numbered(3))
    optimizer = plain_adam(model)
    for damaged, message in ((None, "is missing"), (whole[:-40], "needs .* bytes"), (b"\0" * len(whole), "__0_0|c: ")):
        data.unlink()
        if damaged is not None:
            data.write_bytes(damaged)
        with pytest.raises(PlanError, match=message) as e:
            load(folder, model, optimizer)
        assert e.value.code == "damaged-checkpoint"
        assert not any(p.any() for p in model.parameters()) and not optimizer.state
        data.write_bytes(whole)
    load(folder, model, optimizer)
    assert torch.equal(model.bias, old.bias)


class Bomb:
    def __reduce__(self):
        return (os.system, ("touch exploded",))


def test_metadata_that_would_run_code_is_refused(saved, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (saved[0] / ".metadata").write_bytes(pickle.dumps({"x": Bomb()}))
    with pytest.raises(PlanError, match=r"\.system: reading it could run code") as e:
        load(saved[0], saved[1])
    assert e.value.code == "unsafe-checkpoint" and not (tmp_path / "exploded").exists()


def test_a_checkpoint_that_points_outside_its_folder_is_refused(saved):
    file = saved[0] / ".metadata"
    file.write_bytes(file.read_bytes().replace(b"__0_0.distcp", b"../secret.pt"))
    with pytest.raises(PlanError, match="not a plain file") as e:
        load(saved[0], saved[1])
    assert e.value.code == "damaged-checkpoint"


def test_meta_models_and_foreign_folders_are_refused(tmp_path, saved):
    with pytest.raises(PlanError) as e:
        load(saved[0], nn.Linear(2, 2, device="meta"))
    assert e.value.code == "meta-tensor"
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "thesis.tex").write_text("x")
    with pytest.raises(PlanError, match=r"'thesis.tex', which is no part of a checkpoint") as e:
        save(tmp_path / "work", saved[1])
    assert e.value.code == "not-a-checkpoint" and (tmp_path / "work" / "thesis.tex").exists()
    with pytest.raises(PlanError) as e:
        load(tmp_path / "nowhere", saved[1])
    assert e.value.code == "no-checkpoint"


def test_extra_is_plain_data_and_comes_back_equal(tmp_path):
    extra = {"t": (1, [2.5, None]), 3: {"x": float("inf")}, "w": torch.arange(3), "s": "é", "b": True}
    model = Holder(w=numbered(1))
    save(tmp_path / "c", model, extra=extra)
    back = load(tmp_path / "c", model).extra
    assert torch.equal(back.pop("w"), extra.pop("w")) and back == extra
    with pytest.raises(PlanError) as e:
        save(tmp_path / "c", model, extra={"path": tmp_path})
    assert e.value.code == "not-plain-data"


# --- optimizers ---


def test_an_optimizer_over_other_groups_is_refused(tmp_path):
    model = Holder(a=numbered(2), b=numbered(3))
    groups = [{"params": [model.a], "lr": 0.1}, {"params": [model.b], "lr": 0.2}]
    save(tmp_path / "c", model, torch.optim.SGD(groups))
    with pytest.raises(PlanError, match="mixes parameters of the saved groups") as e:
        load(tmp_path / "c", model, torch.optim.SGD(model.parameters(), lr=1.0))
    assert e.value.code == "optimizer-groups"
    swapped = torch.optim.SGD([{"params": [model.b]}, {"params": [model.a]}], lr=1.0)
    load(tmp_path / "c", model, swapped)
    assert [g["lr"] for g in swapped.param_groups] == [0.2, 0.1]


def test_state_of_a_stepped_optimizer_keeps_identity_and_unsaved_state_goes(tmp_path):
    model = Holder(a=numbered(2), b=numbered(3))
    optimizer = plain_adam(model)
    model.a.grad = torch.ones_like(model.a)
    optimizer.step()  # b has no gradient, so no state
    save(tmp_path / "c", model, optimizer)
    moment, expected = optimizer.state[model.a]["exp_avg"], optimizer.state[model.a]["exp_avg"].clone()
    train(model, optimizer, range(2))
    load(tmp_path / "c", model, optimizer)
    assert optimizer.state[model.a]["exp_avg"] is moment and torch.equal(moment, expected)
    assert model.b not in optimizer.state


def test_a_checkpoint_without_optimizer_cannot_fill_one(tmp_path):
    model = Holder(a=numbered(2))
    save(tmp_path / "c", model)
    with pytest.raises(PlanError) as e:
        load(tmp_path / "c", model, plain_adam(model))
    assert e.value.code == "no-optimizer"
    with pytest.raises(PlanError) as e:
        save(tmp_path / "d", model, plain_adam(Holder(z=numbered(4))))
    assert e.value.code == "unknown-parameter" and not (tmp_path / "d").exists()


# --- atomic ---


@pytest.mark.parametrize("cut_at", [1, 2])
def test_a_save_cut_at_any_rename_leaves_a_whole_checkpoint(saved, monkeypatch, cut_at):
    folder, old, _ = saved
    before = values(old)
    calls = []

    def replace(a, b, real=os.replace):
        calls.append(a)
        if len(calls) == cut_at:
            raise KeyboardInterrupt
        real(a, b)

    monkeypatch.setattr(checkpoint.os, "replace", replace)
    with pytest.raises(KeyboardInterrupt):
        save(folder, Holder(up__weight=numbered(3, 2) * 100, bias=numbered(3) * 100))
    monkeypatch.undo()
    model = model_of(up__weight=numbered(3, 2), bias=numbered(3))
    assert load(folder, model).extra == {"epoch": 4}
    assert all(torch.equal(value, before[name]) for name, value in values(model).items())
    save(folder, Holder(up__weight=numbered(3, 2) * 7, bias=numbered(3) * 7))
    load(folder, model)
    assert torch.equal(model.bias, numbered(3) * 7)
    assert sorted(f.name for f in folder.parent.iterdir()) == [folder.name]


def test_a_failed_write_leaves_the_old_checkpoint(saved, monkeypatch):
    def full(*args):
        raise OSError("No space left on device")

    monkeypatch.setattr(checkpoint.dcp, "write", full)
    with pytest.raises(PlanError, match="No space left") as e:
        save(saved[0], Holder(x=numbered(2)))
    assert e.value.code == "checkpoint-write"
    assert load(saved[0], saved[1]).extra == {"epoch": 4}


def test_what_was_written_is_checked_before_it_takes_its_place(saved, monkeypatch):
    real = checkpoint.dcp.write

    def lossy(folder, pieces, distributed):
        real(folder, {k: p for k, p in pieces.items() if k != "bias"}, distributed)

    monkeypatch.setattr(checkpoint.dcp, "write", lossy)
    with pytest.raises(PlanError, match=r"bias is torch.float64\[3\] in the model, None as written"):
        save(saved[0], saved[1])
    monkeypatch.undo()
    assert load(saved[0], saved[1]).extra == {"epoch": 4}
