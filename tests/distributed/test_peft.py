"""PEFT's LoRA around a transformers model: adapters put in before `parallelize` follow their base, and are exact."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshplan as mp
from meshplan.runtime.meta import materialise
from tests.distributed.models import BATCH, FAMILIES, SEQ, hf, world_of
from tests.distributed.training import apart, batch, built, full

peft = pytest.importorskip("peft")

TARGETS = {"llama": ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"], "gpt2": ["c_attn", "c_proj", "c_fc"]}


def adapted(kind: str = "llama", **changes: Any) -> nn.Module:
    """The model with adapters whose B is not zero, as it would leave every gradient of A zero."""
    config = peft.LoraConfig(
        r=4 if kind == "gpt2" else 3, lora_alpha=6, lora_dropout=0.0, target_modules=TARGETS[kind],
        fan_in_fan_out=kind == "gpt2", **changes,
    )  # fmt: skip
    return built(lambda: peft.get_peft_model(hf(kind), config))


def plan_of(kind: str, composition: str, model: nn.Module) -> mp.Plan:
    return FAMILIES[f"hf-{kind}"].plan(composition).adapted(model)


def tokens() -> dict[str, Tensor]:
    one = batch()
    return {"input_ids": one["tokens"], "labels": one["labels"]}


def _step(kind: str, composition: str | None, changes: dict[str, Any], folder: str = "") -> dict[str, Any]:
    """Loss, gradients and logits after a step of the adapters, and what PEFT's own functions give."""
    model = adapted(kind, **changes)
    if composition is not None:
        model = mp.parallelize(model, plan_of(kind, composition, model))
    cut = (lambda data: data) if composition is None else (lambda data: mp.shard_batch(model, data))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    loss = model(**cut(tokens())).loss
    loss.backward()
    gradients = {n: full(p.grad) for n, p in model.named_parameters() if p.grad is not None}
    optimizer.step()
    own = peft.get_peft_model_state_dict(model)
    found = {"loss": loss.item(), "gradients": gradients, "adapters": {n: full(t) for n, t in own.items()}}
    if folder:
        if composition is None:
            model.save_pretrained(folder)
        else:
            mp.save_pretrained(model, folder)
    return found


@pytest.mark.parametrize(
    ("kind", "composition", "changes"),
    [
        ("llama", "tp2+sp", {}),
        ("llama", "dp_shard2 x tp2+sp", {}),
        ("llama", "tp2", {"modules_to_save": ["lm_head"], "lora_bias": True}),
        ("gpt2", "dp_shard2 x tp2+sp", {}),
        ("llama", "ddp4", {"use_rslora": True}),
    ],
)
def test_adapters_train_as_on_one_device_and_nothing_else_has_a_gradient(pool, kind, composition, changes):
    want = _step(kind, None, changes)
    trained = {n for n, p in adapted(kind, **changes).named_parameters() if p.requires_grad}
    ranks = pool.run(_step, kind, composition, changes, world=world_of(FAMILIES[f"hf-{kind}"].plan(composition)))
    assert sum(r["loss"] for r in ranks) / len(ranks) == pytest.approx(want["loss"], rel=1e-6)
    for got in ranks:
        assert set(got["gradients"]) == trained
        assert apart(got["gradients"], want["gradients"]) < 1e-5
        assert apart(got["adapters"], want["adapters"]) < 1e-6


def test_the_adapters_folder_is_that_of_one_device(pool, tmp_path):
    load_file = pytest.importorskip("safetensors.torch").load_file
    _step("llama", None, {}, str(tmp_path / "one"))
    pool.run(_step, "llama", "tp2+sp", {}, str(tmp_path / "many"), world=2)
    want, got = (load_file(tmp_path / d / "adapter_model.safetensors") for d in ("one", "many"))
    assert apart(got, want) < 1e-6
    again = peft.PeftModel.from_pretrained(built(lambda: hf("llama")), tmp_path / "many")
    assert apart({n: t.double() for n, t in peft.get_peft_model_state_dict(again).items()}, want) < 1e-6


def _merged(composition: str | None) -> Any:
    model = adapted()
    if composition is not None:
        model = mp.parallelize(model, plan_of("llama", composition, model))
        model(**mp.shard_batch(model, tokens()))
    merged = model.merge_and_unload()
    state = {n: full(t) for n, t in merged.state_dict().items()}
    if composition is None:
        return state
    try:
        merged(**tokens())
    except mp.PlanError:
        return state, True
    return state, False


@pytest.mark.parametrize("composition", ["tp2", "dp_shard2 x tp2+sp"])
def test_merged_weights_are_those_of_one_device_and_the_merged_model_wants_a_plan_of_its_own(pool, composition):
    want = _merged(None)
    for state, refused in pool.run(_merged, composition, world=world_of(FAMILIES["hf-llama"].plan(composition))):
        assert apart(state, want) < 1e-12
        assert refused


def _afterwards() -> str:
    model = mp.parallelize(built(lambda: hf("llama")), FAMILIES["hf-llama"].plan("tp2"))
    config = peft.LoraConfig(r=3, target_modules=TARGETS["llama"])
    try:
        peft.get_peft_model(model, config)(**tokens())
    except mp.PlanError as error:
        return error.code
    return ""


def test_adapters_put_in_afterwards_are_refused(pool):
    assert pool.run(_afterwards, world=2) == ["model-changed"] * 2


def _loaded(folder: str, composition: str) -> dict[str, Tensor]:
    model = adapted()
    model = mp.parallelize(model, plan_of("llama", composition, model))
    before = {n: full(p) for n, p in model.named_parameters() if "lora_" in n}
    mp.load_pretrained(model, folder)
    now = {n: full(p) for n, p in model.named_parameters()}
    assert all(torch.equal(now[n], t) for n, t in before.items())
    return {n: t for n, t in now.items() if n not in before}


def test_a_base_models_folder_is_loaded_beneath_the_adapters(pool, tmp_path):
    torch.manual_seed(5)
    base = hf("llama").double()
    base.save_pretrained(tmp_path)
    want = dict(base.state_dict())
    for got in pool.run(_loaded, str(tmp_path), "dp_shard2 x tp2+sp"):
        plain = {n.removeprefix("base_model.model.").replace(".base_layer.", "."): t for n, t in got.items()}
        assert set(plain) == set(want) and all(torch.equal(plain[n], t) for n, t in want.items())


def test_a_plan_for_the_bare_model_is_refused_with_the_cure():
    model = adapted()
    with pytest.raises(mp.PlanError) as refused:
        mp.lower(model, FAMILIES["hf-llama"].plan("tp2"), world_size=2)
    assert refused.value.code == "adapter-moved" and "plan.adapted(model)" in str(refused.value.legal)


def test_an_adapter_that_looks_at_whole_weights_is_refused():
    model = adapted(use_dora=True)
    with pytest.raises(mp.PlanError) as refused:
        mp.lower(model, plan_of("llama", "tp2", model), world_size=2)
    # DoRA runs lora_A a second time, on the identity.
    assert refused.value.code == "calls-differ" and "lora_A" in str(refused.value)


def test_a_rewritten_plan_keeps_one_rule_where_all_modules_read_alike():
    model = adapted()
    plan = plan_of("llama", "dp_shard2 x tp2+sp", model)
    rules = {rule.at: rule for rule in plan.rules}
    one = rules["base_model.model.model.layers.*.self_attn.o_proj"]
    assert one.params == {
        "base_layer.weight": {"tp": mp.S(1)},
        "lora_A.default.weight": {"tp": mp.S(1)},
        "lora_B.default.weight": {"tp": mp.R},
    }
    assert plan.fsdp is not None and plan.fsdp.units == ("base_model.model.model.layers.*",)
    assert plan.inputs == {n: mp.Input(shape=(BATCH, SEQ), dtype=torch.int64, place={"dp": mp.S(0)}) for n in tokens()}


def _from_meta(composition: str | None) -> dict[str, Tensor]:
    config = peft.LoraConfig(r=3, target_modules=TARGETS["llama"])
    model = mp.meta(lambda: peft.get_peft_model(hf("llama"), config))
    if composition is None:
        materialise(model, "cpu")
        mp.init_weights(model, 4)
    else:
        model = mp.parallelize(model, plan_of("llama", composition, model), seed=4)
    return {n: full(p) for n, p in model.named_parameters()}


def test_adapters_of_a_meta_model_start_as_peft_starts_them(pool):
    want = _from_meta(None)
    ups = {n for n in want if "lora_B" in n}
    assert len(ups) == 10 and all(want[n].count_nonzero() == 0 for n in ups)
    for name in want:
        if "lora_A" in name:  # uniform up to 1 / sqrt(inputs), as nn.Linear is
            bound = want[name].shape[1] ** -0.5
            assert 0.8 * bound < want[name].abs().max() <= bound
    for got in pool.run(_from_meta, "dp_shard2 x tp2+sp"):
        assert all(torch.equal(got[n], t) for n, t in want.items())


def test_a_start_that_needs_the_base_weights_is_refused_on_meta():
    config = peft.LoraConfig(r=3, target_modules=["q_proj"], init_lora_weights="gaussian")
    model = mp.meta(lambda: peft.get_peft_model(hf("llama"), config))
    model.peft_config["default"].init_lora_weights = "pissa"
    materialise(model, "cpu")
    with pytest.raises(mp.PlanError) as refused:
        mp.init_weights(model, 0)
    assert refused.value.code == "no-initialiser"
