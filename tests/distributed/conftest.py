import os
from importlib.util import find_spec

import pytest

from tests.distributed.support.ranks import TIMEOUT_S, RankPool

# Collecting doctests imports every file; these need the optional dependency group "models".
collect_ignore = [] if find_spec("transformers") and find_spec("peft") else ["support/hf"]


class _Pools:
    def __init__(self, lock):
        self._pools, self._lock = {}, lock

    def __call__(self, world_size):
        pool = self._pools.get(world_size)
        if pool is None or not pool.is_alive:
            self._pools[world_size] = pool = RankPool(world_size, lock=self._lock)
        return pool

    def close(self):
        for pool in self._pools.values():
            pool.close()


@pytest.fixture(scope="session")
def pools(tmp_path_factory):
    """Makes a pool of so many ranks, the same one for the whole session; one at a time runs in all its processes."""
    are_several = "PYTEST_XDIST_WORKER" in os.environ
    made = _Pools(tmp_path_factory.getbasetemp().parent / "ranks.lock" if are_several else None)
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
