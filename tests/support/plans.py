"""Plans that predict nothing, and menus of units that predict what a test says."""

from lightning_osdp.core.axes import HPZ, freed_and_kept, named
from lightning_osdp.core.plans.parts import Option
from lightning_osdp.core.plans.plan import Plan

UNPREDICTED = {"peak_bytes": 0, "step_time_s": 0.0, "samples_per_s": 0.0, "gap": 0.0}


def bare_plan(units=(), **fields):
    """A plan of these units for one rank, and one sample in a step, if other fields do not say otherwise."""
    stated = {"fingerprint": {}, "world_size": 1, "micro_batch_size": 1, "num_micro_batches": 1}
    return Plan(units=tuple(units), **{**stated, **UNPREDICTED, "memory_limit_bytes": 2**30, **fields})


def menu(keep_s=0.0, keep_bytes=0, wait_s=0.0, wait_bytes=0, *, node_s=0.0, node_bytes=None):
    """Options of a unit, of which keeping it and waiting with its gradients save and take so much, also together.

    With ``node_bytes``, it may leave a shard of so many bytes in each node, which saves so much.
    """
    options = {
        mode.but(sync=sync): (keeps * keep_s + waits * wait_s, keeps * keep_bytes + waits * wait_bytes)
        for keeps, mode in enumerate(named("ZDP", "DP"))
        for waits, sync in enumerate(("every", "last"))
    }
    if node_bytes is not None:
        options[HPZ] = (node_s, node_bytes)
    return priced(options)


def priced(options):
    """A menu of treatments with the seconds that they save, and the bytes that they hold."""
    most_s, least_bytes = max(saved_s for saved_s, _ in options.values()), min(size for _, size in options.values())
    return tuple(
        Option(treatment=mode, more_s=most_s - saved_s, more_bytes=size - least_bytes)
        for mode, (saved_s, size) in options.items()
    )


def keeping(unit):
    """Seconds that keeping the unit saves by its menu, with gradients reduced as planned, and the bytes it takes."""
    return _price(unit, freed_and_kept(unit.treatments[0]))


def waiting(unit):
    """Seconds that reducing gradients in the last micro-batch alone saves, parameters as planned, and the bytes."""
    return _price(unit, [unit.treatments[0].but(sync=sync) for sync in ("every", "last")])


def _price(unit, before_and_after):
    before, after = (unit.cost(mode) for mode in before_and_after)
    return before.seconds - after.seconds, after.num_bytes - before.num_bytes
