"""Meta models: buffers right, ties kept, layouts kept, and refusals where a value cannot be known."""

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from meshplan.errors import PlanError
from meshplan.models.gpt import gpt_tiny
from meshplan.models.llama import llama31_405b, llama_tiny
from meshplan.runtime.init import init_weights
from meshplan.runtime.meta import build_on_meta, materialise, materialise_buffers, materialise_parameters


class Rotary(nn.Module):
    """An unsaved buffer `10 ** -k` computed in the constructor only."""

    def __init__(self):
        super().__init__()
        self.register_buffer("inv_freq", 10.0 ** -torch.arange(4.0), persistent=False)
        self.proj = nn.Linear(4, 1)

    def forward(self, x):
        return self.proj(x * self.inv_freq)


WANT = torch.tensor([1.0, 0.1, 0.01, 0.001])


def on_plain_meta(factory):
    with torch.device("meta"):
        return factory()


# build_on_meta


def test_parameters_are_on_meta_and_buffers_are_computed():
    model = build_on_meta(Rotary)
    assert all(p.is_meta for p in model.parameters())
    torch.testing.assert_close(model.inv_freq, WANT)


def test_the_405b_llama_fits():
    model = build_on_meta(llama31_405b)
    assert sum(p.numel() for p in model.parameters() if p.is_meta) == 405_853_388_800
    assert model.rotary.inv_freq[0] == 1


def test_ties_are_kept_however_they_were_made():
    def shared_before():
        weight = nn.Parameter(torch.randn(3, 3))
        model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
        model[0].weight = weight
        model[1].weight = weight
        return model

    model = build_on_meta(shared_before)
    assert model[0].weight is model[1].weight and model[0].weight.is_meta
    gpt = build_on_meta(gpt_tiny)
    assert gpt.lm_head.weight is gpt.wte.weight and gpt.wte.weight.is_meta


def test_flags_classes_and_dtypes_of_parameters_are_kept():
    class Marked(nn.Parameter):
        pass

    def factory():
        model = nn.Linear(2, 3, dtype=torch.bfloat16)
        model.weight = Marked(torch.zeros(3, 2, dtype=torch.float64), requires_grad=False)
        return model

    for model in (build_on_meta(factory), materialise(build_on_meta(factory), "cpu")):
        assert type(model.weight) is Marked
        assert model.weight.dtype == torch.float64 and not model.weight.requires_grad
        assert model.bias.dtype == torch.bfloat16 and model.bias.requires_grad

    def tagged():
        model = nn.Linear(2, 3)
        model.weight.decay = 0.1  # set on the parameter the module holds, after registration
        return model

    assert materialise(build_on_meta(tagged), "cpu").weight.decay == 0.1


def test_random_buffers_agree_between_builds_and_the_generator_is_left_alone():
    class Features(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(2, 2)
            self.register_buffer("w", torch.randn(5))

    before = torch.get_rng_state()
    a = build_on_meta(Features)
    assert torch.equal(before, torch.get_rng_state())
    torch.rand(3)
    assert torch.equal(a.w, build_on_meta(Features).w) and not torch.equal(a.w, build_on_meta(Features, seed=1).w)


def test_models_built_afterwards_are_ordinary_even_after_a_failure():
    def fails():
        nn.Linear(2, 2)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        build_on_meta(fails)
    assert not nn.Linear(2, 2).weight.is_meta


@pytest.mark.parametrize(
    "read", [lambda w: w.norm().item(), lambda w: w.detach().numpy(), lambda w: w + torch.ones(2, 2)], ids="inp"
)
def test_a_constructor_that_reads_a_parameter_is_refused(read):
    def reads():
        model = nn.Linear(2, 2)
        model.scale = read(model.weight)
        return model

    with pytest.raises(PlanError, match="needs the value of a parameter") as error:
        build_on_meta(reads)
    assert error.value.code == "reads-parameter-on-meta"


# materialise


@pytest.mark.parametrize("factory", [llama_tiny, gpt_tiny])
@pytest.mark.parametrize("on_meta", [build_on_meta, on_plain_meta])
def test_a_materialised_and_initialised_model_is_the_ordinary_one(factory, on_meta):
    want, got = factory(), materialise(on_meta(factory), "cpu")
    assert all(p.isnan().all() for p in got.parameters())  # what is forgotten later shows
    for model in (want, got):
        init_weights(model, seed=2)
    tokens = torch.arange(22).view(2, 11)
    assert torch.equal(got(tokens), want(tokens))
    assert list(got.state_dict()) == list(want.state_dict())


def test_recurrent_layers_follow_their_new_parameters():
    model = materialise(build_on_meta(lambda: nn.LSTM(3, 4)), "cpu")
    init_weights(model)
    assert model(torch.ones(2, 1, 3))[0].isfinite().all()


def test_parameters_with_storage_stay_as_they_are():
    model = nn.Sequential(nn.Linear(2, 2), on_plain_meta(lambda: nn.Linear(2, 2)))
    kept, value = model[0].weight, model[0].weight.detach().clone()
    materialise_parameters(model, "cpu")
    assert model[0].weight is kept and torch.equal(kept, value)
    assert not model[1].weight.is_meta


def test_transformers_rotary_is_recomputed():
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlamaConfig(vocab_size=30, tie_word_embeddings=True, **sizes)
    want = 10_000.0 ** -(torch.arange(0, 8, 2) / 8)
    for on_meta in (build_on_meta, on_plain_meta):
        model = materialise(on_meta(lambda: LlamaForCausalLM(config)), "cpu")
        torch.testing.assert_close(model.model.rotary_emb.inv_freq, want)
        assert model.lm_head.weight is model.model.embed_tokens.weight


# materialise_buffers on a model from plain torch.device("meta")


def test_a_buffer_nobody_recomputes_is_refused_before_any_change():
    model = on_plain_meta(lambda: nn.Sequential(nn.BatchNorm1d(3), nn.Sequential(Rotary())))
    with pytest.raises(PlanError, match=r"buffer 1\.0\.inv_freq .*\n(.*\n)*.*mp\.meta") as error:
        materialise(model, "cpu")
    assert error.value.code == "buffer-on-meta" and error.value.module == "1.0"
    assert all(t.is_meta for t in [*model.parameters(), *model.buffers()])


class Refilled(nn.Module):
    """`reset_parameters` runs `fill` on the buffer."""

    def __init__(self, fill, like=(4,), dtype=torch.float32, persistent=False):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.register_buffer("table", torch.empty(like, dtype=dtype), persistent=persistent)
        self.fill = fill

    def reset_parameters(self):
        self.weight.fill_(7.0)
        self.fill(self)


def part(m):
    m.table[:3] = 1.0


def update(m):
    m.table.mul_(0.5)


def noise(m):
    m.table.copy_(torch.rand(4))


def from_weight(m):
    m.table[:3].copy_(m.weight)
    m.table[3] = 0


def not_a_number(m):
    m.table.fill_(float("nan"))


@pytest.mark.parametrize("fill", [part, update, noise, from_weight, not_a_number], ids=lambda f: f.__name__)
def test_an_uncertain_refill_is_refused(fill):
    with pytest.raises(PlanError) as error:
        materialise_buffers(on_plain_meta(lambda: Refilled(fill)), "cpu")
    assert error.value.code == "buffer-on-meta"


def mask(m):
    m.table.fill_(float("-inf")).triu_(1)


def rebind(m):
    m.table = torch.full((5, 5), 2.0)


@pytest.mark.parametrize(
    ("fill", "want"),
    [(mask, torch.full((5, 5), float("-inf")).triu(1)), (rebind, torch.full((5, 5), 2.0))],
    ids=["mask of infinities", "rebound"],
)
def test_a_certain_refill_is_taken_and_parameters_are_not_touched(fill, want):
    model = Refilled(fill, like=(5, 5))
    model.table = model.table.to("meta")
    materialise_buffers(model, "cpu")
    assert torch.equal(model.table, want)
    assert (model.weight == 1).all()


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.uint8])
def test_integer_and_boolean_buffers_are_checked_element_by_element(dtype):
    whole = on_plain_meta(lambda: Refilled(lambda m: m.table.fill_(1), dtype=dtype))
    materialise_buffers(whole, "cpu")
    assert whole.table.tolist() == [1] * 4
    with pytest.raises(PlanError):
        materialise_buffers(on_plain_meta(lambda: Refilled(lambda m: m.table[1:].fill_(1), dtype=dtype)), "cpu")


def test_a_saved_buffer_may_wait_for_the_checkpoint():
    def factory():
        return Refilled(part, persistent=True)

    with pytest.raises(PlanError):
        materialise_buffers(on_plain_meta(factory), "cpu")
    model = on_plain_meta(factory)
    materialise_buffers(model, "cpu", loading=True)
    assert model.table.isnan().all()
    with pytest.raises(PlanError):  # an unsaved one is in no checkpoint
        materialise_buffers(on_plain_meta(lambda: Refilled(part)), "cpu", loading=True)


def test_tied_buffers_and_their_plain_aliases_stay_one():
    def factory():
        one, two = Refilled(lambda m: m.table.fill_(3.0)), Refilled(lambda m: m.table.fill_(3.0))
        two.table = one.table
        two.alias = one.table
        return nn.Sequential(one, two)

    model = on_plain_meta(factory)
    materialise_buffers(model, "cpu")
    assert model[0].table is model[1].table is model[1].alias
    assert model[0].table.tolist() == [3.0] * 4


@pytest.mark.parametrize("put", [lambda t: t, lambda t: [t], lambda t: {"a": t}], ids=["bare", "list", "dict"])
def test_a_meta_tensor_in_a_plain_attribute_is_refused(put):
    def factory():
        model = nn.Linear(2, 2)
        model.freqs = put(torch.arange(3.0))
        return model

    with pytest.raises(PlanError, match="plain attribute freqs") as error:
        materialise_buffers(on_plain_meta(factory), "cpu")
    assert error.value.code == "buffer-on-meta"
    materialise_buffers(build_on_meta(factory), "cpu")


# On ranks


class Pair(nn.Module):
    """Two Linears with one output row and one common weight."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 1, bias=False), nn.Linear(3, 1)
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.a(x) * self.b(x)


def _one_row_over_two():
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp_shard",))
    model = build_on_meta(Pair)
    fully_shard(model, mesh=mesh)
    materialise(model, "cpu")
    init_weights(model, seed=4)
    out = model(torch.ones(2, 3))
    out.sum().backward()
    return model.a.weight.to_local().shape[0], out.detach(), model.a.weight.grad.full_tensor()


def test_an_empty_shard_is_materialised_and_fsdp_trains_on_the_new_storage(pool):
    want = Pair()
    init_weights(want, seed=4)
    out = want(torch.ones(2, 3))
    out.sum().backward()
    results = pool.run(_one_row_over_two, world=2)
    assert [rows for rows, _, _ in results] == [1, 0]
    for _, got, gradient in results:
        torch.testing.assert_close(got, out.detach())
        torch.testing.assert_close(gradient, want.a.weight.grad)


def _two_axes():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_shard", "tp"))
    model = build_on_meta(lambda: nn.Embedding(7, 3))
    sharded = distribute_tensor(torch.zeros(7, 3), mesh["tp"], [Shard(0)], src_data_rank=None)
    meta = DTensor.from_local(
        sharded.to_local().to("meta"), mesh["tp"], [Shard(0)], run_check=False, shape=(7, 3), stride=(3, 1)
    )
    model.weight = nn.Parameter(meta)
    fully_shard(model, mesh=mesh["dp_shard"])
    layout = model.weight.placements
    assert model.weight.to_local().is_meta
    materialise(model, "cpu")
    assert model.weight.placements == layout and tuple(model.weight.shape) == (7, 3)
    init_weights(model, seed=1)
    return tuple(mesh.get_coordinate()), model.weight.to_local().detach()


def test_layouts_survive_on_two_axes(pool):
    want = nn.Embedding(7, 3)
    init_weights(want, seed=1)
    rows = {(0, 0): [0, 1], (1, 0): [2, 3], (0, 1): [4, 5], (1, 1): [6]}
    for coordinate, local in pool.run(_two_axes):
        assert torch.equal(local, want.weight[rows[coordinate]])
