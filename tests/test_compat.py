"""The doors to private torch: that they lead where they say on the installed version."""

import logging

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, _redistribute

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


def _pieces() -> tuple[bool, bool]:
    """Experts over one axis, and gate beside up, each split by itself, over another: [4, 3, 8] on 2 x 2 ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "etp"))
    whole = torch.arange(4 * 3 * 8.0).view(4, 3, 8)
    ep, etp = mesh.get_coordinate()
    mine = whole.chunk(2)[ep].unflatten(2, (2, 4)).chunk(2, 3)[etp].flatten(2)
    spread = DTensor.from_local(
        mine, mesh, (Shard(0), compat.strided_shard_class()(2, split_factor=2)), run_check=False, shape=whole.shape,
        stride=whole.stride(),
    )  # fmt: skip
    return torch.equal(compat.full_tensor(spread), whole), torch.equal(compat.full_tensor(spread * 2), whole * 2)


def test_pieces_of_a_dim_beside_a_shard_of_another_are_put_together(pool):
    # torch 2.11 refuses `full_tensor()` itself.
    assert pool.run(_pieces, world=4) == [(True, True)] * 4
