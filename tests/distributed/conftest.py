import pytest

from tests.distributed.support.ranks import TIMEOUT_S, RankPool


class _Pools:
    def __init__(self):
        self._pools = {}

    def __call__(self, world_size):
        pool = self._pools.get(world_size)
        if pool is None or not pool.is_alive:
            self._pools[world_size] = pool = RankPool(world_size)
        return pool

    def close(self):
        for pool in self._pools.values():
            pool.close()


@pytest.fixture(scope="session")
def pools():
    """Makes a pool of so many ranks, the same one for the whole session."""
    made = _Pools()
    yield made
    made.close()


@pytest.fixture(scope="session")
def ranks(pools):
    """Makes a pool of so many ranks, which outlives a test; how long it waits, which a test may set, does not."""

    def made(world_size):
        pool = pools(world_size)
        pool.timeout_s = TIMEOUT_S
        return pool

    return made
