"""Sequences over cp as others got them wrong: shifted labels, lost tokens, replaced masks, keys of the first step."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import meshplan as mp
from meshplan.verify.aligned import align
from tests.faults.check import exact, ids, numbers, plan_of, refused

pytestmark = pytest.mark.usefixtures("pool")
CP = {"cp": mp.S(1)}


def context(method: str = "ring", balance: str = "zigzag", at: str = "") -> dict[str, Any]:
    return {"context": {"attention": [at], "method": method, "balance": balance}}


class Block(nn.Module):
    """Attention of two heads under a mask of any kind, and a loss of the labels as they come or shifted inside."""

    def __init__(self, kind: str = "causal", shifts: bool = True) -> None:
        super().__init__()
        self.embed, self.qkv, self.head = nn.Embedding(11, 6), nn.Linear(6, 18), nn.Linear(6, 11)
        self.kind, self.shifts = kind, shifts

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, 3)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        n = torch.arange(x.shape[1])
        mask = None
        if self.kind == "window":
            back = n[:, None] - n[None]
            mask = (back >= 0) & (back < 3)
        if self.kind == "alibi":
            mask = -0.1 * (n[:, None] - n[None]).abs().to(x.dtype)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=self.kind == "causal")
        return x + out.transpose(1, 2).flatten(2)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.attend(self.embed(tokens)))
        if self.shifts:
            logits, labels = logits[:, :-1], labels[:, 1:]
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def batch(n: int = 8) -> dict[str, Tensor]:
    made = torch.randint(0, 11, (1, n), generator=torch.Generator().manual_seed(0))
    return {"tokens": made, "labels": made}


@pytest.mark.parametrize("balance", ["zigzag", "contiguous"])
def test_a_shift_inside_loses_no_target_at_the_seams(balance):
    given = plan_of({"tokens": ids(1, 8, **CP), "labels": ids(1, 8, **CP)}, mesh={"cp": 2}, **context(balance=balance))
    assert exact(Block, given, inputs=batch).check("loss").error < 1e-14


def test_shifted_labels_are_made_of_the_full_sequence(pool):
    shared = pool.run(_shifted, world=2)
    # Positions 0 1 6 7 have the targets 1 2 7 and none; 2 to 5 have 3 to 6: 7 of 8 count.
    assert shared == [[1, 2, 7, -100], [3, 4, 5, 6]]


class Loss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(8, 8)

    def forward(self, input_ids: Tensor, labels: Tensor, shift_labels: Tensor) -> Tensor:
        return F.cross_entropy(self.table(input_ids).flatten(0, 1), shift_labels.flatten()) + 0 * labels.sum()


def _shifted() -> list[int]:
    place = {name: ids(1, 8, **CP) for name in ("input_ids", "labels", "shift_labels")}
    model = mp.parallelize(Loss(), plan_of(place, mesh={"cp": 2}, **_zigzag()))
    tokens = torch.arange(8).unsqueeze(0)
    mine = mp.shard_batch(model, {"input_ids": tokens, "labels": tokens}, shift={"labels": "shift_labels"})
    loss = model(**mine)
    dist.all_reduce(loss, dist.ReduceOp.SUM)
    one = F.cross_entropy(model.table.weight.detach()[:7], torch.arange(1, 8))
    assert torch.allclose(loss.detach() / 2, one)
    return mine["shift_labels"].flatten().tolist()


def _zigzag() -> dict[str, Any]:
    """Zigzag order in a model without attention."""
    return {"context": {"attention": [], "method": "ring"}}


def llama(**changes: Any) -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=31, hidden_size=12, intermediate_size=10, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        use_cache=False, pad_token_id=None, bos_token_id=None, eos_token_id=None, **changes,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")


ATTENTION = "model.layers.*.self_attn"


def test_shifted_labels_reach_a_model_that_takes_them():
    place = {name: ids(2, 8, **CP) for name in ("input_ids", "labels", "shift_labels")}
    given = plan_of(place, mesh={"cp": 2}, **context(at=ATTENTION))
    exact(llama, given, rtol=2e-6, inputs=_with_shifted)


def _with_shifted() -> dict[str, Tensor]:
    tokens = torch.randint(0, 31, (2, 8), generator=torch.Generator().manual_seed(1))
    return {"input_ids": tokens, "labels": tokens, "shift_labels": F.pad(tokens[:, 1:], (0, 1), value=-100)}


class Deaf(Block):
    def forward(self, tokens: Tensor, labels: Tensor, **kwargs: Any) -> Tensor:
        return super().forward(tokens, labels)


def test_shifted_labels_that_a_model_ignores_are_refused():
    place = {name: ids(1, 8, **CP) for name in ("tokens", "labels", "shift_labels")}
    error = refused(Deaf, plan_of(place, mesh={"cp": 2}, **context()), "ignored-input")
    assert "shift_labels" in error.message and error.where is not None


@pytest.mark.parametrize("method", ["ring", "ulysses", "allgather"])
@pytest.mark.parametrize("kind", ["window", "alibi", "full"])
def test_a_mask_is_never_replaced_by_plain_causal(kind, method):
    given = plan_of({"tokens": ids(2, 8, **CP), "labels": ids(2, 8, **CP)}, mesh={"cp": 2}, **context(method))
    assert align(Block(kind).double(), given, 2).distance < 1e-12


class Chosen(Block):
    """Asks for one of torch's kernels by name."""

    def __init__(self, backend: SDPBackend) -> None:
        super().__init__()
        self.backend = backend

    def attend(self, x: Tensor) -> Tensor:
        with sdpa_kernel(self.backend):
            return super().attend(x)


@pytest.mark.parametrize("backend", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION])
def test_whichever_kernel_a_model_asks_for_is_replaced_alike(backend):
    given = plan_of({"tokens": ids(2, 8, **CP), "labels": ids(2, 8, **CP)}, mesh={"cp": 2}, **context())
    asked, plain = (mp.lower(model, given, 2).collectives for model in (Chosen(backend), Block()))
    assert [(c.op, c.elements) for c in asked] == [(c.op, c.elements) for c in plain]
    assert align(Chosen(backend).double(), given, 2).distance < 1e-12


def test_packed_documents_do_not_attend_to_each_other():
    """transformers tells packed documents by positions that start again."""
    place = {name: ids(1, 12, **CP) for name in ("input_ids", "labels", "position_ids")}
    given = plan_of(place, mesh={"cp": 2}, **context(at=ATTENTION))
    exact(llama, given, rtol=2e-6, inputs=_packed)


def _packed() -> dict[str, Tensor]:
    tokens = torch.randint(0, 31, (1, 12), generator=torch.Generator().manual_seed(2))
    positions = torch.cat([torch.arange(5), torch.arange(7)]).unsqueeze(0)
    return {"input_ids": tokens, "labels": tokens, "position_ids": positions}


@pytest.mark.parametrize(("length", "ranks"), [(11, 2), (10, 4), (14, 4)])
def test_a_length_that_does_not_divide_is_refused_before_the_first_step(length, ranks):
    place = {"tokens": ids(1, length, **CP), "labels": ids(1, length, **CP)}
    error = refused(Block, plan_of(place, mesh={"cp": ranks}, **context()), "input-not-divisible", ranks)
    assert f"a multiple of {2 * ranks}" in str(error.legal)


def test_the_whole_length_comes_back_in_order():
    given = plan_of({"x": numbers(1, 12, 4, **CP)}, mp.Rule("", output={"cp": mp.R}), mesh={"cp": 2}, **context())
    low = mp.lower(Returns(), given, 2)
    assert [(c.op, c.elements) for c in low.collectives if c.op == "all_gather"] == [("all_gather", 48)]
    assert align(Returns().double(), given, 2).distance < 1e-12


class Returns(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        q = self.up(x).unsqueeze(1)
        return F.scaled_dot_product_attention(q, q, q, is_causal=True).squeeze(1)


class Images(Block):
    """Puts image features where a marker token stands, by an index made of the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Parameter(torch.randn(3, 6))

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        slots = tokens == 3
        placed = (slots.flatten().cumsum(0) - 1).clamp(0, 2).view(tokens.shape)
        x = torch.where(slots.unsqueeze(-1), self.features[placed], self.embed(tokens))
        logits = self.head(self.attend(x))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def _with_slots() -> dict[str, Tensor]:
    tokens = torch.tensor([[1, 3, 5, 3, 7, 9, 3, 2]])
    return {"tokens": tokens, "labels": (tokens + 1) % 11}


def test_image_slots_are_found_in_the_full_sequence():
    given = plan_of({"tokens": ids(1, 8, **CP), "labels": ids(1, 8, **CP)}, mesh={"cp": 2}, **context())
    exact(Images, given, inputs=_with_slots)


def test_three_dimensional_position_ids_are_split_on_their_sequence(pool):
    assert pool.run(_three, world=2) == [[0, 1, 6, 7], [2, 3, 4, 5]]


class Rotary(nn.Module):
    def forward(self, x: Tensor, position_ids: Tensor) -> Tensor:
        return x * position_ids.sum(0).unsqueeze(-1)


def _three() -> list[int]:
    place = {"x": numbers(2, 8, 3, **CP), "position_ids": ids(3, 2, 8, cp=mp.S(2))}
    model = mp.parallelize(Rotary(), plan_of(place, mesh={"cp": 2}, **_zigzag()))
    positions = torch.arange(8).expand(3, 2, 8)
    mine = mp.shard_batch(model, {"x": torch.ones(2, 8, 3, dtype=torch.float64), "position_ids": positions})
    assert model(**mine)[0, :, 0].tolist() == [3.0 * i for i in mine["position_ids"][0, 0].tolist()]
    return mine["position_ids"][0, 0].tolist()


def test_a_shard_without_valid_tokens_gives_no_nan():
    given = plan_of(
        {"tokens": ids(1, 8, **CP), "labels": ids(1, 8, **CP)}, mesh={"cp": 2}, **context(balance="contiguous")
    )
    exact(partial(Block, "causal", False), given, inputs=_late_labels)


def _late_labels() -> dict[str, Tensor]:
    made = batch()
    return made | {"labels": torch.where(torch.arange(8) < 5, -100, made["labels"])}


def adapted() -> nn.Module:
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(
        llama(), peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    )


def test_adapters_recompute_and_fsdp_go_together_with_cp():
    path = "base_model.model.model.layers.*"
    given = plan_of(
        {"input_ids": ids(2, 8, **CP), "labels": ids(2, 8, **CP)}, mesh={"cp": 2}, **context(at=f"{path}.self_attn"),
        fsdp={"units": [path]}, recompute={"units": [path], "policy": "full"},
    )  # fmt: skip
    exact(adapted, given, rtol=2e-6)


def test_inputs_of_which_one_is_not_split_are_refused_on_every_rank(pool):
    for said in pool.run(_misfit, world=2):
        codes = [code for code, _ in said]
        assert codes == ["inputs-misfit", "inputs-misfit", "input-not-divisible"]
        assert "position_ids" in said[1][1] and "a multiple of 4" in said[2][1]


def _misfit() -> list[tuple[str, str]]:
    place = {name: ids(2, 8, **CP) for name in ("input_ids", "labels")}
    model = mp.parallelize(llama(), plan_of(place, mesh={"cp": 2}, **context(at=ATTENTION)))
    tokens = torch.randint(0, 31, (2, 8))
    said = []
    for call in (
        lambda: model.generate(tokens, max_new_tokens=2, do_sample=False),
        lambda: model(input_ids=tokens, position_ids=torch.arange(8).unsqueeze(0)),
        lambda: model(input_ids=tokens[:, :7]),  # of a global 14, which has no even halves
    ):
        try:
            call()
        except mp.PlanError as error:
            said.append((error.code, str(error)))
    mine = mp.shard_batch(model, {"input_ids": tokens})
    assert model(**mine).logits.shape == (2, 4, 31)  # a refusal leaves the model as it was
    return said
