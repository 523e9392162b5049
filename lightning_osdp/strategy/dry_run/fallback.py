"""Memory that runs out in a dry run, although a plan was predicted to fit: what all ranks do about it, together."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from functools import partial

import lightning.pytorch as pl
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from lightning_osdp.core.plans.plan import Plan
from lightning_osdp.core.text.byte_size import format_bytes
from lightning_osdp.core.text.duration import format_seconds
from lightning_osdp.errors import InfeasibleError
from lightning_osdp.scheduler import freeable_bytes, with_less_memory, with_smaller_micro_batch
from lightning_osdp.strategy.batching.division import Division
from lightning_osdp.strategy.dry_run.step import DryRun, run_dry
from lightning_osdp.strategy.planning.publish import publish
from lightning_osdp.strategy.runtime.all_ranks import from_all_ranks, on_rank_zero
from lightning_osdp.strategy.runtime.error_texts import Shortage
from lightning_osdp.strategy.sharding.units import Units

MAX_TRIES = 4
"""Plans that are tried after the first: half of what is kept is given up, half of the rest, all of it; what is left are
smaller micro-batches."""


def plan_that_fits(trainer: pl.Trainer, units: Units) -> None:
    """Takes a dry run on all ranks, and changes to plans with less memory until a step fits on each of them.

    Raises:
        InfeasibleError: none is left to try; the text says which rank ran out of memory, where, and what would help.
    """
    model, division = units.model, units.division
    assert model is not None
    for tries_left in range(MAX_TRIES, -1, -1):
        plan, began_s = model.sharded.plan, time.perf_counter()
        assert plan is not None
        dry_runs = from_all_ranks(run_dry(trainer, model.sharded))
        _tell(dry_runs, time.perf_counter() - began_s)
        failed = next(((rank, each.shortage) for rank, each in enumerate(dry_runs) if each.shortage is not None), None)
        if failed is None:
            return
        lower = on_rank_zero(partial(_lower, trainer, plan, division, tries_left))
        if lower is None:
            raise InfeasibleError(_why(plan, *failed))
        rank, shortage = failed
        note = f"dry run: rank {rank} ran out of memory in {shortage.place}, so {_change(plan, lower)}"
        rank_zero_warn(f"OSDP: {note}. ({shortage.text})")
        if lower.micro_batch_size != plan.micro_batch_size:
            division.divide(trainer, lower)
        lower = dataclasses.replace(lower, notes=(*plan.notes, note))
        model.give_up_plan(lower)
        publish(trainer, lower)


def _tell(dry_runs: Sequence[DryRun], took_s: float) -> None:
    failed = next(((rank, each.why_not) for rank, each in enumerate(dry_runs) if each.why_not), None)
    if failed is None:
        rank_zero_info(f"OSDP: dry run of an optimizer step on each rank alone, in {format_seconds(took_s)}")
    else:
        rank_zero_info(f"OSDP: no dry run of a step on rank {failed[0]}, so training begins: {failed[1]}")


def _lower(trainer: pl.Trainer, plan: Plan, division: Division, tries_left: int) -> Plan | None:
    """The next plan to try."""
    if tries_left == 0:
        return None
    kept_bytes = freeable_bytes(plan)
    lower = with_less_memory(plan, kept_bytes if tries_left == 2 else kept_bytes // 2)
    if lower is not None:
        return lower
    # A run that is resumed counts in micro-batches of the size that it had.
    size = None if trainer.ckpt_path is not None else division.smaller
    return None if size is None else with_smaller_micro_batch(plan, size)


def _change(plan: Plan, lower: Plan) -> str:
    if lower.micro_batch_size != plan.micro_batch_size:
        return f"micro-batches have {lower.micro_batch_size} samples instead of {plan.micro_batch_size}"
    units = sum(unit != other for unit, other in zip(plan.units, lower.units, strict=True))
    blocks = len(lower.blocks) - len(plan.blocks)
    told = [f"{units} {'unit keeps' if units == 1 else 'units keep'} less"] if units else []
    told += [f"{blocks} {'block recomputes' if blocks == 1 else 'blocks recompute'}"] if blocks else []
    freed = format_bytes(freeable_bytes(plan) - freeable_bytes(lower))
    return f"{' and '.join(told)}, {freed} together"


def _why(plan: Plan, rank: int, shortage: Shortage) -> str:
    samples = plan.micro_batch_size
    return (
        f"Expected a step in micro-batches of {samples} to fit on every rank, but in the dry run rank {rank} ran out of"
        f" memory in {shortage.place}: {shortage.text}. No plan with less memory is left to try. Use a smaller"
        " batch, more ranks or, where tensors are counted, a higher memory_limit; OSDPStrategy(dry_run=False) trains"
        " without trying first."
    )
