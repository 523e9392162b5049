"""Splitting lets a model train where no plan without slices fits, and the limit holds for the process itself."""

import sys

import lightning as L
import pytest

from benchmarks.families.dense import TwoLayers
from benchmarks.measures.accuracy.memory import ANY_RATES, FREE
from benchmarks.testbed.limit import ALLOCATOR, beside_tensors_bytes, limit_data
from lightning_osdp import Cluster, InfeasibleError, OSDPStrategy, SearchSpace, make_plan, profile_model
from lightning_osdp.callbacks.peak import COUNTED_STEPS, WARM_UP_STEPS, living_tensors
from tests.distributed.support.fits import trainer
from tests.distributed.support.ranks import RankPool

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the data segment is limited on Linux"),
]


HIDDEN_SIZE, NUM_SAMPLES = 1024, 8
UNLIMITED_STEPS, LIMITED_STEPS = WARM_UP_STEPS + COUNTED_STEPS, 3


class HardLimit(L.Callback):
    """Limit of what the kernel gives this process, after the steps whose bytes are counted.

    The limit leaves room for copies of gloo's all-gather inside the library: a gathered slice, and the last one, which
    a thread may hold a moment longer.
    """

    reads_parameters = False

    def __init__(self, limit_bytes):
        self.limit_bytes, self.steps = limit_bytes, 0

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        if trainer.global_step == UNLIMITED_STEPS:
            self.limit_bytes += 2 * max(unit.parameter_bytes // unit.num_slices for unit in trainer.strategy.plan.units)
            tensors = [*living_tensors(trainer.model, trainer.optimizers), *batch]
            limit_data(beside_tensors_bytes(tensors) + self.limit_bytes)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.steps += trainer.global_step > UNLIMITED_STEPS


def trained_under_hard_limit(limit_bytes):
    """The plan, the peak that was counted, the hard limit, and the steps taken under it."""
    steps, limit = UNLIMITED_STEPS + LIMITED_STEPS, HardLimit(limit_bytes)
    strategy = OSDPStrategy(memory_limit=f"{limit_bytes}B", batch_size="keep")
    fit = trainer(strategy, max_steps=steps, callbacks=[limit])
    module = TwoLayers(HIDDEN_SIZE)
    fit.fit(module, module.loader(NUM_SAMPLES, num_batches=steps))
    return strategy.plan, fit.callbacks[0].measured.peak_bytes, limit.limit_bytes, limit.steps


MiB = 2**20
SMALL_TENSORS_BYTES = 1024
"""Losses and counts, of a few bytes each, are not predicted; a thread of gloo may hold one longer than its step."""


def make_plan_of_whole_operators(world_size, limit_bytes):
    module = TwoLayers(HIDDEN_SIZE)
    return make_plan(
        profile_model(module, module.batch(NUM_SAMPLES), rates=ANY_RATES),
        Cluster(world_size=world_size, all_gather=FREE, reduce_scatter=FREE),
        memory_limit_bytes=limit_bytes,
        micro_batch_size=NUM_SAMPLES,
        search_space=SearchSpace(slices=(1,)),
    )


@pytest.mark.slow
def test_a_model_that_fits_in_slices_only_trains_under_a_hard_limit(monkeypatch):
    world_size, limit_bytes = 2, 20 * MiB
    with pytest.raises(InfeasibleError, match="No plan fits"):
        make_plan_of_whole_operators(world_size, limit_bytes)
    for name, value in ALLOCATOR.items():
        monkeypatch.setenv(name, value)
    # a pool of its own: what other cases have freed would be allocated again, past the limit
    pool = RankPool(world_size, start_method="spawn")
    try:
        found = pool.run(trained_under_hard_limit, limit_bytes=limit_bytes)
    finally:
        pool.close()
    for plan, peak_bytes, hard_limit_bytes, num_steps in found:
        assert max(unit.num_slices for unit in plan.units) > 1
        assert plan.peak_bytes <= limit_bytes
        assert peak_bytes <= plan.peak_bytes + SMALL_TENSORS_BYTES
        assert hard_limit_bytes < plan.all_zdp_peak_bytes
        assert num_steps == LIMITED_STEPS
