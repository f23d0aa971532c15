"""What `--model` accepts: shipped names, the user's own factories, local transformers configurations."""

import json
import sys

import pytest
import torch
from torch import nn

from meshplan.errors import PlanError
from meshplan.models.decoder import Decoder
from meshplan.models.gpt import GPT
from meshplan.models.llama import Llama
from meshplan.models.registry import MODELS, resolve_model


@pytest.mark.parametrize("name", MODELS)
def test_every_shipped_name_builds_on_meta(name):
    with torch.device("meta"):
        model = resolve_model(name)()
    assert isinstance(model, Llama | GPT | Decoder)


def test_a_misspelt_name_is_told_the_nearest_one():
    with pytest.raises(PlanError, match=r"did you mean 'llama-tiny'\?") as error:
        resolve_model("llama-tinny")
    assert error.value.code == "no-such-model"
    assert "llama3.1-405b" in error.value.legal


@pytest.fixture
def own_package(tmp_path, monkeypatch):
    package = tmp_path / "own_models_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "zoo.py").write_text(
        "from torch import nn\n"
        "size = 3\n"
        "def mlp(width=5): return nn.Linear(width, size)\n"
        "def needy(width): return nn.Linear(width, size)\n"
        "class Zoo:\n"
        "    @staticmethod\n"
        "    def bear(): return nn.Linear(2, 2)\n"
    )
    (package / "broken.py").write_text("import a_module_that_is_not_installed\n")
    monkeypatch.chdir(tmp_path)
    return "own_models_package"


def test_a_factory_is_found_in_the_working_directory_with_a_dotted_attribute(own_package, monkeypatch):
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    assert resolve_model(f"{own_package}.zoo:mlp")().weight.shape == (3, 5)
    assert resolve_model(f"{own_package}.zoo:Zoo.bear")().weight.shape == (2, 2)


@pytest.mark.parametrize(
    ("name", "code", "words"),
    [
        ("own_models_package.zoo:mpl", "no-such-model", "mlp"),
        ("own_models_package.zebra:mlp", "no-such-model", "own_models_package.zebra"),
        ("own_models_package.zoo:", "no-such-model", "names no factory"),
        (":mlp", "no-such-model", "names no factory"),
        ("own_models_package.zoo:size", "bad-model", "is a int"),
        ("own_models_package.zoo:needy", "bad-model", "needs arguments: width"),
        ("hf:nowhere/config.json", "no-such-model", "no configuration file"),
    ],
)
def test_what_cannot_be_a_factory_is_refused(own_package, name, code, words):
    with pytest.raises(PlanError, match=words) as error:
        resolve_model(name)
    assert error.value.code == code


def test_an_import_that_fails_inside_the_users_module_stays_theirs(own_package):
    with pytest.raises(ModuleNotFoundError, match="a_module_that_is_not_installed"):
        resolve_model(f"{own_package}.broken:mlp")


def hf_config(folder, **fields):
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def test_a_local_config_gives_fresh_models_of_its_sizes(tmp_path):
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    hf_config(tmp_path, model_type="llama", pad_token_id=0, vocab_size=33, **sizes)
    for path in (tmp_path, tmp_path / "config.json"):
        factory = resolve_model(f"hf:{path}")
        one, two = factory(), factory()
        assert one.model.layers[1].mlp.up_proj.weight.shape == (24, 16)
        assert one is not two and one.config is not two.config


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_the_attention_can_be_chosen(tmp_path, attention):
    hf_config(tmp_path, model_type="gpt2", n_embd=16, n_layer=1, n_head=2, vocab_size=33)
    assert resolve_model(f"hf:{tmp_path}?attn_implementation={attention}")().config._attn_implementation == attention


def test_an_attention_that_is_no_torch_code_is_refused(tmp_path):
    with pytest.raises(PlanError, match="flash_attention_2") as error:
        resolve_model(f"hf:{tmp_path}?attn_implementation=flash_attention_2")
    assert error.value.code == "bad-model" and error.value.legal == "eager, sdpa"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"model_type": "no_such_architecture"}, "no configuration transformers can read"),
        ({"model_type": "vit"}, "no causal language model of type 'vit'"),
        ({"model_type": "mine", "auto_map": {"AutoConfig": "conf.Mine"}}, "no configuration transformers can read"),
    ],
    ids=["unknown", "not-causal", "remote-code"],
)
def test_a_config_transformers_cannot_serve_by_itself_is_refused(tmp_path, fields, words):
    (tmp_path / "conf.py").write_text("raise AssertionError('remote code ran')\n")
    with pytest.raises(PlanError, match=words) as error:
        resolve_model(f"hf:{hf_config(tmp_path, **fields)}")
    assert error.value.code == "bad-model"


def test_a_class_without_required_arguments_is_a_factory():
    assert isinstance(resolve_model("torch.nn:Identity")(), nn.Identity)
