"""A model that fits in slices only, as the ranks run it."""

import sys
from pathlib import Path

import lightning as L

sys.path.insert(0, str(Path(__file__).parent))

from cases import trainer

from benchmarks.families.dense import TwoLayers
from benchmarks.testbed.limit import beside_tensors_bytes, limit_data
from lightning_osdp import OSDPStrategy
from lightning_osdp.callbacks.peak import COUNTED_STEPS, WARM_UP_STEPS, living_tensors

HIDDEN_SIZE, NUM_SAMPLES = 1024, 8
UNLIMITED_STEPS, LIMITED_STEPS = WARM_UP_STEPS + COUNTED_STEPS, 3


class HardLimit(L.Callback):
    """After the steps whose bytes are counted, the kernel gives this process no more than the limit.

    But for what gloo's all-gather copies inside the library: a gathered slice, and the last one, which a thread may
    hold a moment longer.
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
