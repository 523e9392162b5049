import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

# Ranks and pytest must find the same modules; test folders are no packages in importlib mode.
sys.path.insert(0, str(Path(__file__).parent))

from ranks import RankPool

# Collecting doctests imports every file; this one needs the optional dependency group "models".
collect_ignore = [] if find_spec("transformers") else ["hf_models.py"]


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
def ranks():
    """Makes a pool of so many ranks, the same one for the whole session."""
    pools = _Pools()
    yield pools
    pools.close()
