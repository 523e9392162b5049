import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

# Ranks and pytest must find the same modules; test folders are no packages in importlib mode.
sys.path.insert(0, str(Path(__file__).parent))

from ranks import TIMEOUT_S, RankPool

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
def pools():
    """Makes a pool of so many ranks, the same one for the whole session."""
    made = _Pools()
    yield made
    made.close()


@pytest.fixture(scope="module", params=["fsdp1", "fsdp2"])
def engine(request):
    """What runs plans where a case does not say."""
    return request.param


def pytest_collection_modifyitems(items):
    """A test may name the engine that it is about, with ``@pytest.mark.engine``; it is not there for the other."""
    for item in list(items):
        named, call = item.get_closest_marker("engine"), getattr(item, "callspec", None)
        if named is not None and call is not None and call.params.get("engine") not in (None, *named.args):
            items.remove(item)


@pytest.fixture(scope="module")
def ranks(pools, engine):
    """Makes a pool of so many ranks, on which this engine is the default; pools outlive a test, its settings do not."""

    def made(world_size):
        pool = pools(world_size)
        pool.engine, pool.timeout_s = engine, TIMEOUT_S
        return pool

    return made
