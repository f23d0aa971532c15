"""Models of a pattern: what each letter builds, that nothing looks ahead, and what is refused."""

import math

import pytest
import torch
import torch.nn.functional as F

import meshplan as mp
from meshplan.errors import PlanError
from meshplan.models.hybrid import EXAMPLE, LETTERS, hybrid
from meshplan.models.llama import Attention
from meshplan.models.moe import MoE
from meshplan.models.recurrent import Recurrent
from meshplan.models.registry import resolve_model
from meshplan.models.router_losses import RouterLosses
from meshplan.models.state_space import StateSpace
from meshplan.runtime.meta import materialise

KINDS = {"A": Attention, "E": MoE, "M": StateSpace, "R": Recurrent}


def ids(length: int = 19) -> torch.Tensor:
    return torch.arange(2 * length).view(2, length)


def randomised(pattern: str, **sizes):
    torch.manual_seed(1)
    model = hybrid(pattern, **sizes).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return model


def test_each_letter_builds_its_block_under_its_name():
    model = hybrid(EXAMPLE)
    assert "".join(layer.letter for layer in model.layers) == EXAMPLE == "AEMEAEMEAEMR"
    for layer in model.layers:
        children = dict(layer.named_children())
        assert set(children) == {"norm", LETTERS[layer.letter]}
        assert type(children[LETTERS[layer.letter]]) is KINDS[layer.letter]


@pytest.mark.parametrize("pattern", ["A", "E", "M", "R", "MRAE"])
def test_a_block_adds_its_mixer_of_the_norm_to_the_stream(pattern):
    model = randomised(pattern)
    x = model.tok_embeddings(ids())
    cos, sin = model.rotary(torch.arange(19))
    for layer in model.layers:
        h = x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * layer.norm.weight
        mixer = getattr(layer, LETTERS[layer.letter])
        y = mixer(h, cos, sin) if layer.letter == "A" else mixer(h)
        x = x + (y[0] if layer.letter == "E" else y)
    torch.testing.assert_close(model(ids()), model.output(model.norm(x)))


@pytest.mark.parametrize("pattern", ["A", "E", "M", "R", EXAMPLE])
def test_a_token_does_not_see_those_after_it_and_only_experts_forget_those_before(pattern):
    model, other = randomised(pattern), ids().clone()
    other[:, 11:] += 90
    torch.testing.assert_close(model(other)[:, :11], model(ids())[:, :11])
    first = ids().clone()
    first[:, 0] += 90
    remembers = not torch.allclose(model(first)[:, -1], model(ids())[:, -1], rtol=1e-9)
    assert remembers == (pattern != "E")


@pytest.mark.parametrize("pattern", ["A", "E", "M", "R"])
def test_the_loss_has_the_gradients_of_differences(pattern):
    model, labels = randomised(pattern, vocab_size=40), ids().roll(-1, 1)
    labels[0, 3:7] = -100
    loss = model(ids(), labels)
    loss.backward()
    for name, parameter in model.named_parameters():
        step = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64) * 1e-6
        with torch.no_grad():
            parameter.add_(step)
            up = model(ids(), labels)
            parameter.sub_(2 * step)
            down = model(ids(), labels)
            parameter.add_(step)
        expected = (parameter.grad * step).sum().item()
        assert (up - down).item() / 2 == pytest.approx(expected, rel=1e-4, abs=1e-12), name


def test_router_losses_are_added_over_all_its_experts():
    plain, added = randomised("EAE"), randomised("EAE", losses=RouterLosses(z=0.5))
    logits = []
    for layer in (plain.layers[0], plain.layers[2]):
        layer.moe.router.gate.register_forward_hook(lambda m, args, out: logits.append(out))
    loss = plain(ids(), ids())
    want = 0.5 * torch.cat(logits).logsumexp(-1).square().mean()
    torch.testing.assert_close(added(ids(), ids()) - loss, want, rtol=1e-9, atol=0)


def test_it_learns():
    torch.manual_seed(0)
    model, labels = hybrid(EXAMPLE), ids().roll(-1, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    first = model(ids(), labels)
    assert first.item() == pytest.approx(math.log(256), abs=0.2)
    for _ in range(12):
        F.cross_entropy(model(ids()).flatten(0, 1), labels.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert model(ids(), labels).item() < 0.6 * first.item()


def test_built_on_meta_every_value_has_an_initialiser():
    model = materialise(mp.meta(lambda: hybrid("MREA")), "cpu")
    mp.init_weights(model, seed=0)
    assert all(value.isfinite().all() for value in model.state_dict().values())
    assert model.layers[0].state_space.log_rate.std() > 0.1 and (model.layers[1].recurrent.recurrence.rate > 4).all()


@pytest.mark.parametrize(
    ("pattern", "words"), [("AEX", "letter 3 .* 'X'"), ("aE", "letter 1 .* 'a'"), ("", "without a letter")]
)
def test_letters_that_no_block_has_are_refused_with_their_place(pattern, words):
    with pytest.raises(PlanError, match=words) as error:
        hybrid(pattern)
    assert error.value.code == "bad-model"
    assert "A attention" in error.value.legal and "R recurrent" in error.value.legal


@pytest.mark.parametrize("sizes", [{"n_kv_heads": 3}, {"ssm_groups": 3}, {"lru_blocks": 5}, {"top_k": 5}], ids=str)
def test_sizes_that_do_not_fit_are_refused(sizes):
    with pytest.raises(PlanError) as error:
        hybrid(EXAMPLE, **sizes)
    assert error.value.code == "bad-model"


def test_patterns_are_models_by_name():
    assert resolve_model("hybrid:MRA")().config.pattern == "MRA"
    with torch.device("meta"):
        large = resolve_model("hybrid:AEMR?size=large")()
    sizes = [sum(p.numel() for p in layer.parameters()) - 4096 for layer in large.layers]
    a = 2 * 4096 * 4096 + 2 * 4096 * 1024
    e = 16 * 3 * 4096 * 14336 + 16 * 4096
    m = 4096 * (2 * 8192 + 2 * 1024 + 128) + 5 * (8192 + 2 * 1024) + 3 * 128 + 8192 + 8192 * 4096
    r = 3 * 4096 * 4096 + 5 * 4096 + 2 * (16 * 256 * 256 + 4096) + 4096
    assert sizes == [a, e, m, r]


@pytest.mark.parametrize(
    ("name", "code"), [("hybrid:AXE", "bad-model"), ("hybrid:", "bad-model"), ("hybrid:AE?size=huge", "bad-model")]
)
def test_a_name_without_a_model_is_refused_before_anything_is_built(name, code):
    with pytest.raises(PlanError) as error:
        resolve_model(name)
    assert error.value.code == code
