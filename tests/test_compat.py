"""The doors to private torch: that they lead where they say on the installed version."""

import logging

import pytest
from torch.distributed.tensor import _redistribute

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
