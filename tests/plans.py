"""Plans that predict nothing."""

from lightning_osdp.core.plans.plan import Plan

UNPREDICTED = {"peak_bytes": 0, "step_time_s": 0.0, "samples_per_s": 0.0, "gap": 0.0}


def bare_plan(units=(), **fields):
    """A plan of these units for one rank, and one sample in a step, if other fields do not say otherwise."""
    stated = {"fingerprint": {}, "world_size": 1, "micro_batch_size": 1, "num_micro_batches": 1}
    return Plan(units=tuple(units), **{**stated, **UNPREDICTED, "memory_limit_bytes": 2**30, **fields})
