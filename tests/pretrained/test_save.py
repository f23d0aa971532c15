"""`mp.save_pretrained` of ranks writes what `save_pretrained` of one device writes."""

import pytest
import torch

import meshplan as mp

transformers = pytest.importorskip("transformers")

from safetensors.torch import load_file  # noqa: E402

from tests.pretrained import ranks  # noqa: E402


@pytest.mark.parametrize(
    ("kind", "composition"), [("llama", "dp_shard2 x tp2+sp"), ("gpt2", "dp_shard2 x tp2+sp"), ("qwen3", "tp4")]
)
def test_a_step_on_ranks_saves_the_folder_of_a_step_on_one_device(tmp_path, pool, kind, composition):
    ranks.saved(kind, tmp_path / "start")
    one = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "start", dtype=torch.float64).train()
    optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
    one(**ranks.BATCH).loss.backward()
    optimizer.step()
    one.save_pretrained(tmp_path / "one")
    pool.run(ranks.resaved, str(tmp_path / "start"), str(tmp_path / "many"), kind, composition)
    files = {f.name for f in (tmp_path / "one").iterdir()}
    assert {f.name for f in (tmp_path / "many").iterdir()} == files
    assert (tmp_path / "many" / "config.json").read_text() == (tmp_path / "one" / "config.json").read_text()
    want, got = (load_file(tmp_path / d / "model.safetensors") for d in ("one", "many"))
    assert set(got) == set(want)
    for name, t in want.items():
        # Losses are computed in float32.
        torch.testing.assert_close(got[name], t, rtol=2e-6, atol=2e-7)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "many")
    assert again.dtype == torch.float64


def test_only_a_transformers_model_has_such_a_folder(tmp_path):
    with pytest.raises(mp.PlanError) as refused:
        mp.save_pretrained(torch.nn.Linear(2, 2), tmp_path)
    assert refused.value.code == "bad-model"
