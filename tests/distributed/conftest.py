import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

# Ranks and pytest must find the same modules; test folders are no packages in importlib mode.
sys.path.insert(0, str(Path(__file__).parent))

from ranks import TIMEOUT_S, RankPool

# Collecting doctests imports every file; these need the optional dependency group "models".
HF_FILES = ["hf_models.py", "hf_recipe_cases.py", "hf_export_cases.py"]
collect_ignore = [] if find_spec("transformers") and find_spec("peft") else HF_FILES


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
