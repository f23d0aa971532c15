"""One pool of four warm gloo ranks for the whole test session."""

from collections.abc import Iterator

import pytest

from meshplan.verify.pool import RankPool


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """Four ranks, spawned at first use: `pool.run(module_level_function, *args, world=2)`."""
    with RankPool(4) as ranks:
        yield ranks
