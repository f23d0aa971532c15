"""The doors to private torch: that they lead where they say on the installed version."""

import logging

import pytest
import torch
from torch.distributed.tensor import _redistribute

from meshplan import compat
from meshplan.compat import quiet_redistribution


def test_redistribution_is_quiet_inside_and_as_it_was_after(caplog):
    # The very logger that DTensor warns with, found by its module and not by a name written twice.
    logger = _redistribute.logger
    with caplog.at_level(logging.WARNING, logger=logger.name):
        with pytest.raises(KeyError), quiet_redistribution():
            logger.warning("inside")
            raise KeyError
        logger.warning("after")
    assert "inside" not in caplog.text
    assert not logger.disabled


def test_a_fake_like_another_has_all_but_its_memory():
    with compat.fake_tensor_mode() as mode:
        t = torch.empty(4, 6, dtype=torch.float16)[:, ::2].requires_grad_()
        like = compat.fake_like(t)
        assert compat.is_fake(like) and like.fake_mode is mode
        assert (like.shape, like.stride(), like.dtype, like.device) == (t.shape, t.stride(), t.dtype, t.device)
        assert not like.requires_grad and compat.storage_key(like) != compat.storage_key(t)
        assert (like + t).shape == (4, 3)
