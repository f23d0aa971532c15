"""One device draws its dropout from the streams that ranks use: by step, module path and call."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from meshplan.mesh.streams import keep_mask, stream_key
from meshplan.verify.dropout import single_device_dropout


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList([nn.Dropout(0.25), nn.Dropout(0.0)])
        self.fails = False

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if self.fails:
            raise RuntimeError("inside")
        return self.inner[0](x), self.inner[0](x), F.dropout(x, 0.5, self.training), self.inner[1](x)


def _mask(step: int, path: str, ordinal: int, p: float, shape=(3, 5)) -> torch.Tensor:
    key = stream_key(7, "dropout", step, 0, path, ordinal)
    return keep_mask(key, shape, [0] * len(shape), shape, p) / (1 - p)


def test_masks_are_those_of_the_streams_by_step_path_and_call():
    model, x = _Net(), torch.ones(3, 5)
    with single_device_dropout(model, seed=7) as streams:
        for step in (1, 2):
            streams.begin_step()
            first, second, functional, none = model(x)
            torch.testing.assert_close(first, _mask(step, "inner.0", 0, 0.25))
            torch.testing.assert_close(second, _mask(step, "inner.0", 1, 0.25))
            torch.testing.assert_close(functional, _mask(step, "", 0, 0.5))
            assert torch.equal(none, x)


def test_evaluation_drops_nothing_and_the_model_is_left_as_it_was():
    model, x = _Net().eval(), torch.ones(3, 5)
    with single_device_dropout(model, seed=7):
        assert all(torch.equal(y, x) for y in model(x))
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())


def test_a_forward_that_raises_does_not_shift_later_paths():
    model, x = _Net(), torch.ones(3, 5)
    with single_device_dropout(model, seed=7) as streams:
        model.fails = True
        with pytest.raises(RuntimeError, match="inside"):
            model(x)
        model.fails = False
        streams.begin_step()
        torch.testing.assert_close(model(x)[2], _mask(1, "", 0, 0.5))


class _Attention(nn.Module):
    def forward(self, q: torch.Tensor) -> torch.Tensor:
        return F.scaled_dot_product_attention(q, q, torch.eye(5).expand(2, 3, 5, 5), dropout_p=0.5, is_causal=False)


def test_attention_drops_probabilities_by_their_global_place():
    q = torch.randn(2, 3, 5, 4)
    with single_device_dropout(_Attention(), seed=7) as streams:
        streams.begin_step()
        model = _Attention()
        dropped = model(q)
    # Values are the identity, so the output is the matrix of dropped probabilities itself.
    probabilities = torch.softmax(q @ q.transpose(-1, -2) / 2.0, -1)
    torch.testing.assert_close(dropped, probabilities * _mask(1, "", 0, 0.5, (2, 3, 5, 5)))
