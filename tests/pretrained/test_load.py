"""Safetensors folders loaded shard by shard: the values of transformers' own `from_pretrained`, from fewer bytes."""

import json
import shutil

import pytest
import torch

import meshplan as mp

transformers = pytest.importorskip("transformers")

from safetensors.torch import load_file, save_file  # noqa: E402

from tests.pretrained import ranks  # noqa: E402

COMPOSITIONS = [
    ("llama", "dp_shard2 x tp2+sp"),  # tied, odd vocabulary
    ("gpt2", "dp_shard2 x tp2+sp"),  # q|k|v in one tensor, weights [in, out]
    ("qwen3", "tp4"),  # fewer key heads than ranks: copies
    ("llama", "zero2"),
    ("gpt2", "ddp4"),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {kind: tmp_path_factory.mktemp(kind) for kind in ranks.FIELDS}
    for kind, folder in made.items():
        ranks.saved(kind, folder)
    return made


@pytest.mark.parametrize(("kind", "composition"), COMPOSITIONS)
def test_every_value_is_that_of_transformers_and_a_rank_reads_no_more_than_it_holds(folders, pool, kind, composition):
    folder = folders[kind]
    want = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    state, loss = want.state_dict(), want(**ranks.BATCH).loss.item()
    said = pool.run(ranks.loaded, str(folder), kind, composition)
    for got in said:
        assert {name: t.dtype for name, t in got["state"].items()} == {name: t.dtype for name, t in state.items()}
        assert all(torch.equal(got["state"][name], t) for name, t in state.items())
        assert not got["training"] and got["tied"] == (kind != "qwen3")
        assert got["read"] == 4 * got["held"]
        # Norms and biases are whole on tp; all else is split over the ranks, or held by each under DDP.
        assert got["read"] == 4 * got["whole"] if composition == "ddp4" else got["read"] < 4 * got["whole"] * 0.55
    assert sum(got["loss"] for got in said) / len(said) == pytest.approx(loss, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_another_dtype_is_that_of_transformers(folders, pool, dtype):
    want = transformers.AutoModelForCausalLM.from_pretrained(folders["llama"], dtype=dtype).state_dict()
    for got in pool.run(ranks.loaded, str(folders["llama"]), "llama", "dp_shard2 x tp2+sp", dtype):
        assert all(torch.equal(got["state"][name], t) and got["state"][name].dtype == dtype for name, t in want.items())
        assert got["read"] == 4 * got["held"]


def test_shards_with_an_index_are_one_checkpoint(tmp_path, pool):
    ranks.saved("llama", tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    want = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    for got in pool.run(ranks.loaded, str(tmp_path), "llama", "tp2+sp", world=2):
        assert all(torch.equal(got["state"][name], t) for name, t in want.items())


def test_experts_that_are_stored_one_by_one_are_packed_without_reading_them_all(tmp_path, pool):
    torch.manual_seed(0)
    ranks.mixtral().save_pretrained(tmp_path)
    assert any(".experts.4.w2." in name for name in ranks.names_in(tmp_path / "model.safetensors"))
    want = transformers.MixtralForCausalLM.from_pretrained(tmp_path).state_dict()
    said = pool.run(ranks.experts, str(tmp_path))
    for state, _, _ in said:
        assert all(torch.equal(state[name], t) for name, t in want.items())
    # Four shards of dim 0 without a copy: together the ranks read the model once.
    assert sum(read for _, read, _ in said) == said[0][2]


def test_a_base_models_folder_loads_into_a_model_with_a_head_if_the_head_is_tied(tmp_path, pool):
    model = ranks.saved("llama", tmp_path)
    model.model.save_pretrained(tmp_path)
    assert all(not name.startswith("model.") for name in ranks.names_in(tmp_path / "model.safetensors"))
    for got in pool.run(ranks.loaded, str(tmp_path), "llama", "tp2+sp", world=2):
        assert all(torch.equal(got["state"][name], t) for name, t in model.state_dict().items())


def _edit(folder, source, edit):
    shutil.copytree(source, folder, dirs_exist_ok=True)
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _drop(tensors):
    tensors["model.layers.1.mlp.up.weight"] = tensors.pop("model.layers.1.mlp.up_proj.weight")


def _widen(tensors):
    tensors["model.norm.weight"] = torch.ones(33)


def _integers(tensors):
    tensors["model.norm.weight"] = torch.ones(32, dtype=torch.int8)


def _add(tensors):
    tensors["model.extra"] = torch.ones(2)


def _untie(tensors):
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1


@pytest.mark.parametrize(
    ("edit", "code", "words"),
    [
        (_drop, "missing-key", ["model.layers.1.mlp.up_proj.weight", "nearest: model.layers.1.mlp.up.weight"]),
        (_widen, "shape-mismatch", ["model.norm.weight is [33]", "[32] in the model"]),
        (_integers, "dtype-mismatch", ["model.norm.weight is torch.int8", "torch.float32"]),
        (_add, "unexpected-key", ["model.extra"]),
    ],
)
def test_what_does_not_fit_is_refused_on_every_rank_before_a_value_changes(folders, tmp_path, pool, edit, code, words):
    folder = _edit(tmp_path, folders["llama"], edit)
    for found, text in pool.run(ranks.refused, str(folder), "llama", "tp2+sp", world=2):
        assert found == code and all(word in text for word in words), text


def test_tied_weights_that_differ_in_the_folder_are_refused(folders, tmp_path, pool):
    folder = _edit(tmp_path, folders["llama"], _untie)
    model = ranks.hf("llama", tie_word_embeddings=True)
    with pytest.raises(mp.PlanError) as refused:
        mp.load_pretrained(model, folder)
    assert refused.value.code == "tied-mismatch" and "lm_head.weight" in refused.value.message


def test_a_rank_that_cannot_read_makes_all_of_them_raise(folders, tmp_path, pool):
    said = pool.run(ranks.refused, str(folders["llama"]), "llama", "tp2+sp", str(tmp_path), world=2)
    assert [code for code, _ in said] == ["no-checkpoint"] * 2


def test_ranks_whose_folders_hold_other_tensors_are_told(folders, tmp_path, pool):
    other = _edit(tmp_path, folders["llama"], lambda t: t.update({"model.rotary_emb.inv_freq": torch.ones(2)}))
    said = pool.run(ranks.refused, str(folders["llama"]), "llama", "tp2+sp", str(other), world=2)
    assert [code for code, _ in said] == ["ranks-disagree"] * 2


def test_without_strict_what_is_missing_stays_and_is_told(folders, tmp_path):
    folder = _edit(tmp_path, folders["llama"], _drop)
    model = ranks.hf("llama", tie_word_embeddings=True)
    kept = model.model.layers[1].mlp.up_proj.weight.detach().clone()
    report = mp.load_pretrained(model, folder, strict=False)
    assert report.missing == ("model.layers.1.mlp.up_proj.weight",)
    assert report.unexpected == ("model.layers.1.mlp.up.weight",)
    assert torch.equal(model.model.layers[1].mlp.up_proj.weight, kept)
    assert torch.equal(model.model.norm.weight, load_file(folder / "model.safetensors")["model.norm.weight"])


def test_a_plain_module_is_loaded_by_name(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.BatchNorm1d(5))
    values = {name: torch.rand(t.shape) if t.ndim else torch.tensor(7) for name, t in model.state_dict().items()}
    save_file(values, tmp_path / "model.safetensors")
    report = mp.load_pretrained(model, tmp_path)
    assert all(torch.equal(t, values[name]) for name, t in model.state_dict().items())
    assert report.bytes_read == sum(t.numel() * t.element_size() for t in values.values())


def test_quantised_weights_are_refused(folders, tmp_path):
    shutil.copytree(folders["llama"], tmp_path, dirs_exist_ok=True)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [4, 4]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(mp.PlanError) as refused:
        mp.from_pretrained(tmp_path, ranks.plan_of("llama", "tp2+sp"))
    assert refused.value.code == "quantised-weights"
