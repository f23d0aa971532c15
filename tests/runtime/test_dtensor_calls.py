"""Which dims of which calls DTensor may keep sharded; what is not named runs on replicated values."""

import pytest
import torch
import torch.nn.functional as F

from meshplan.runtime.dtensor_calls import blocked_dims, only_asks, plain_name

X = torch.zeros(2, 3, 4)


@pytest.mark.parametrize(
    ("func", "args", "kwargs", "expected"),
    [
        (torch.add, (X, X), {}, ()),
        (torch.Tensor.__rsub__, (X, 1), {}, ()),
        (F.linear, (X, X), {}, ()),
        (torch.softmax, (X, 1), {}, (-2,)),
        (F.softmax, (X,), {"dim": -1}, (-1,)),
        (torch.cat, ([X, X],), {"dim": -1}, (-1,)),
        (torch.chunk, (X, 2), {}, (-3,)),
        (torch.Tensor.split, (X, 2, 2), {}, (-1,)),
        (F.layer_norm, (X, (3, 4)), {}, (-1, -2)),
        (F.rms_norm, (X, (4,)), {}, (-1,)),
        (torch.Tensor.__getitem__, (X, (slice(None), slice(0, 2))), {}, (-2,)),
        (torch.Tensor.__getitem__, (X, (Ellipsis, 0)), {}, (-1,)),
        (torch.Tensor.__getitem__, (X, (None, slice(None), 1)), {}, (-2,)),
        (torch.Tensor.__getitem__, (X, X > 0), {}, None),
        (torch.cumsum, (X,), {"dim": -1}, None),
        (torch.mean, (X,), {}, None),
        (F.cross_entropy, (X, X), {}, None),
        (F.mse_loss, (X, X), {}, None),
        (torch.topk, (X, 1), {}, None),
    ],
)
def test_dims_that_must_not_be_sharded(func, args, kwargs, expected):
    assert blocked_dims(plain_name(func), args, kwargs) == expected


def test_questions_about_a_tensor_compute_nothing():
    assert only_asks(torch.Tensor.shape.__get__)
    assert only_asks(torch.Tensor.size)
    assert not only_asks(torch.Tensor.T.__get__)
    assert not only_asks(torch.Tensor.sum)
