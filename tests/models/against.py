"""Our models beside transformers' own: the same random weights under both names."""

from __future__ import annotations

import re

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

Rules = list[tuple[str, str]]

SHARED: Rules = [
    (r"^tok_embeddings", "model.embed_tokens"),
    (r"^norm", "model.norm"),
    (r"^output", "lm_head"),
    (r"^layers", "model.layers"),
    (r"attention_norm", "input_layernorm"),
    (r"ffn_norm", "post_attention_layernorm"),
    (r"\.attention\.", ".self_attn."),
    (r"feed_forward|moe", "mlp"),
    (r"\bw1\b", "gate_proj"),
    (r"\bw2\b", "down_proj"),
    (r"\bw3\b", "up_proj"),
]
"""Patterns of our names and what they are there. Those of one model come before them."""


class InFloat64(TorchFunctionMode):
    """Norms, softmaxes, routers and angles that transformers computes in float32 are computed in float64."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is Tensor.float:
            return args[0].double()
        swapped = {key: _wider(value) for key, value in (kwargs or {}).items()}
        return func(*map(_wider, args), **swapped)


def _wider(value: object) -> object:
    return torch.float64 if value is torch.float32 else value


def randomise(model: nn.Module, seed: int = 3) -> nn.Module:
    """float64 and eval, with normal noise on every parameter and floating buffer that is saved: norms, sinks and biases too,
    whose initial values would hide that they are read."""
    model = model.double().eval()
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for value in model.state_dict().values():
            value.add_(torch.randn(value.shape, generator=draw, dtype=value.dtype), alpha=0.3)
    return model


def give(ours: nn.Module, theirs: nn.Module, rules: Rules) -> dict[str, str]:
    """Load our values into their model, all of them and nothing else; their name of each of ours."""
    names = {}
    for name in ours.state_dict():
        new = name
        for pattern, there in rules + SHARED:
            new = re.sub(pattern, there, new)
        names[name] = new
    theirs.double().eval().load_state_dict({names[name]: value for name, value in ours.state_dict().items()})
    # One rounding of a float32 power apart, and equal from here on.
    torch.testing.assert_close(theirs.model.rotary_emb.inv_freq, ours.rotary.inv_freq, rtol=1e-6, atol=0)
    theirs.model.rotary_emb.inv_freq = ours.rotary.inv_freq
    theirs.config._experts_implementation = "eager"  # the grouped one takes no float64
    return names


def tokens(rows: int = 3, length: int = 11, vocab: int = 37) -> Tensor:
    return torch.randint(vocab, (rows, length), generator=torch.Generator().manual_seed(2))


def labels(of: Tensor) -> Tensor:
    """Already aligned, with unequal numbers of ignored tokens in each row."""
    made = of.roll(-1, 1).clone()
    made[:, -1] = -100
    made[0, 2:6] = -100
    return made


def check(ours: nn.Module, theirs: nn.Module, names: dict[str, str]) -> None:
    """Equal logits, equal loss, and an equal gradient of every parameter, relative to the largest of each."""
    ids = tokens()
    want = labels(ids)
    with InFloat64():
        reference = theirs(ids, use_cache=False).logits
        other = torch.nn.functional.cross_entropy(reference.flatten(0, 1), want.flatten(), ignore_index=-100)
        other.backward()
    close(ours(ids), reference, "logits")
    loss = ours(ids, want)
    close(loss, other, "loss")
    loss.backward()
    there = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        grad = parameter.grad
        assert grad is not None and grad.abs().max() > 0, name
        close(grad, there[names[name]].grad, name)


def close(a: Tensor, b: Tensor, what: str) -> None:
    """Equal to 1e-10 of the largest entry."""
    assert b.dtype == torch.float64, what
    error = (a - b).abs().max().item() / b.abs().max().item()
    assert error < 1e-10, (what, error)
