"""Splitting lets a model train where no plan without slices fits, and the limit holds for the process itself."""

import sys

import limited_cases as cases
import pytest
from ranks import RankPool

from benchmarks.families.dense import TwoLayers
from benchmarks.measures.accuracy.memory import ANY_RATES, FREE
from benchmarks.testbed.limit import ALLOCATOR
from lightning_osdp import Cluster, InfeasibleError, SearchSpace, make_plan, profile_model

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the data segment is limited on Linux"),
]

MiB = 2**20
SMALL_TENSORS_BYTES = 1024
"""Losses and counts, of a few bytes each, are not predicted; a thread of gloo may hold one longer than its step."""


def make_plan_of_whole_operators(world_size, limit_bytes):
    module = TwoLayers(cases.HIDDEN_SIZE)
    return make_plan(
        profile_model(module, module.batch(cases.NUM_SAMPLES), rates=ANY_RATES),
        Cluster(world_size=world_size, all_gather=FREE, reduce_scatter=FREE),
        memory_limit_bytes=limit_bytes,
        micro_batch_size=cases.NUM_SAMPLES,
        search_space=SearchSpace(slices=(1,)),
    )


@pytest.mark.slow
def test_a_model_that_fits_in_slices_only_trains_under_a_hard_limit(monkeypatch):
    world_size, limit_bytes = 2, 20 * MiB
    with pytest.raises(InfeasibleError, match="No plan fits"):
        make_plan_of_whole_operators(world_size, limit_bytes)
    for name, value in ALLOCATOR.items():
        monkeypatch.setenv(name, value)
    # of its own: what other cases have freed would be allocated again, past the limit
    pool = RankPool(world_size, start_method="spawn")
    try:
        found = pool.run(cases.trained_under_hard_limit, limit_bytes=limit_bytes)
    finally:
        pool.close()
    for plan, peak_bytes, hard_limit_bytes, num_steps in found:
        assert max(unit.num_slices for unit in plan.units) > 1
        assert plan.peak_bytes <= limit_bytes
        assert peak_bytes <= plan.peak_bytes + SMALL_TENSORS_BYTES
        assert hard_limit_bytes < plan.all_zdp_peak_bytes
        assert num_steps == cases.LIMITED_STEPS
