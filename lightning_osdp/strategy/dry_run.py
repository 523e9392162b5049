"""Memory dry run: a step that each rank takes alone before training, under plans with less and less memory."""

from __future__ import annotations

import dataclasses
import gc
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import FSDPStrategy
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from lightning_osdp.apply import ShardedModel
from lightning_osdp.callbacks.peak import host_tensors, planned_tensors, unplanned_tensors
from lightning_osdp.core.plans.plan import Plan, workload_of
from lightning_osdp.core.text.byte_size import format_bytes
from lightning_osdp.core.text.duration import format_seconds
from lightning_osdp.errors import InfeasibleError
from lightning_osdp.operations.optimizers import copied, states_of
from lightning_osdp.planner.scheduler import freeable_bytes, in_micro_batches, recomputing, with_less_memory
from lightning_osdp.profiler import (
    Census,
    LiveBytes,
    empty_cache,
    is_out_of_memory,
    loss_in,
    raise_if_fatal,
    tensors_in,
    untouched,
)
from lightning_osdp.strategy.batching.division import Division
from lightning_osdp.strategy.batching.first_batch import first_batch, read_once_source
from lightning_osdp.strategy.planning.publish import publish
from lightning_osdp.strategy.planning.training_step import mute_logging, step_arguments, to_device
from lightning_osdp.strategy.runtime.all_ranks import in_step, on_rank_zero
from lightning_osdp.strategy.runtime.error_texts import place_of_shortage
from lightning_osdp.strategy.sharding.units import ReusableModel, Units

MAX_TRIES = 4
"""Plans that are tried after the first one.

Two of them give up half of the bytes kept between steps, the third all of them, and the last has smaller micro-batches.
"""


@dataclass(frozen=True)
class DryRun:
    """Result of a dry run on one rank."""

    place: str = ""
    """Place in the step where memory ran out, if it did."""
    error: str = ""
    """Text of the error, which may have another cause than memory."""
    refused: tuple[str, ...] = ()
    """Names of blocks that cannot keep the results that the plan has them keep, see `ShardedModel.refused`."""


def plan_that_fits(trainer: pl.Trainer, units: Units) -> None:
    """Runs a step dry on all ranks, and changes to plans with less memory until the step fits on each rank.

    Blocks that cannot keep results as planned recompute everything on all ranks; so do all such blocks where the step
    fails for another cause than memory with them alone.

    Raises:
        InfeasibleError: no plan is left to try; the text says which rank ran out of memory, where, and what would help.
    """
    model, division = units.model, units.division
    assert model is not None
    for tries_left in range(MAX_TRIES, -1, -1):
        plan, began_s = model.sharded.plan, time.perf_counter()
        assert plan is not None
        dry_runs = in_step(partial(run_dry, trainer, model.sharded), stage="dry run")
        dry_runs = _without_unsound_levels(trainer, model, plan, dry_runs)
        plan = model.sharded.plan or plan
        _log_result(dry_runs, time.perf_counter() - began_s)
        failed = next(((rank, dry_run) for rank, dry_run in enumerate(dry_runs) if dry_run.place), None)
        if failed is None:
            return
        rank, dry_run = failed
        lower = on_rank_zero(partial(_next_plan, trainer, plan, division, tries_left))
        if lower is None:
            raise InfeasibleError(
                f"Expected a step in micro-batches of {plan.micro_batch_size} to fit on every rank, but in the dry run"
                f" rank {rank} ran out of memory in {dry_run.place}: {dry_run.error}. No plan with less memory is left"
                " to try. Use a smaller batch, more ranks or, where tensors are counted, a higher memory_limit;"
                " OSDPStrategy(dry_run=False) trains without trying first."
            )
        note = f"dry run: rank {rank} ran out of memory in {dry_run.place}, so {_change_text(plan, lower)}"
        rank_zero_warn(f"OSDP: {note}. ({dry_run.error})")
        if workload_of(lower) != workload_of(plan):
            division.divide(trainer, workload_of(lower))
        lower = dataclasses.replace(lower, notes=(*plan.notes, note))
        model.use(lower)
        publish(trainer, lower)


def _without_unsound_levels(
    trainer: pl.Trainer, model: ReusableModel, plan: Plan, dry_runs: Sequence[DryRun]
) -> Sequence[DryRun]:
    """Has blocks recompute everything on all ranks that cannot keep results on one; returns the dry runs that hold."""
    refused = {name for dry_run in dry_runs for name in dry_run.refused}
    error = next((dry_run.error for dry_run in dry_runs if dry_run.error and not dry_run.place), "")
    levels = {block.name for block in plan.blocks if block.kept}
    if refused:
        why = "results that their forward keeps are not what running it again returns"
    elif error and levels:
        model.use(recomputing(plan, levels))
        without = in_step(partial(run_dry, trainer, model.sharded), stage="dry run")
        if any(dry_run.error and not dry_run.place for dry_run in without):
            model.use(plan)
            return dry_runs
        refused, dry_runs, why = levels, without, f"a step with results that they keep fails: {error}"
    else:
        return dry_runs
    kinds = sorted({type(model.sharded.module.get_submodule(name)).__name__ for name in refused})
    note = f"dry run: blocks of {', '.join(kinds)} recompute everything, for {why}"
    if not dry_runs[0].refused:  # rank 0 has said so
        rank_zero_warn(f"OSDP: {note}.")
    sound = dataclasses.replace(recomputing(plan, refused), notes=(*plan.notes, note))
    model.use(sound)
    publish(trainer, sound)
    return dry_runs


def _log_result(dry_runs: Sequence[DryRun], took_s: float) -> None:
    failed = next((rank for rank, dry_run in enumerate(dry_runs) if dry_run.error and not dry_run.place), None)
    if failed is None:
        rank_zero_info(f"OSDP: dry run of an optimizer step on each rank alone, in {format_seconds(took_s)}")
    else:
        rank_zero_info(f"OSDP: no dry run of a step on rank {failed}, so training begins: {dry_runs[failed].error}")


def _next_plan(trainer: pl.Trainer, plan: Plan, division: Division, tries_left: int) -> Plan | None:
    """Makes the next plan to try; None if there is none."""
    if tries_left == 0:
        return None
    kept_bytes = freeable_bytes(plan)
    lower = with_less_memory(plan, kept_bytes if tries_left == 2 else kept_bytes // 2)
    if lower is not None:
        return lower
    # a resumed run must keep the micro-batches that its checkpoint counts in
    workload = None if trainer.ckpt_path is not None else division.smaller
    return None if workload is None else in_micro_batches(plan, workload)


def _change_text(plan: Plan, lower: Plan) -> str:
    if lower.micro_batch_size != plan.micro_batch_size:
        return f"micro-batches have {lower.micro_batch_size} samples instead of {plan.micro_batch_size}"
    freed = format_bytes(freeable_bytes(plan) - freeable_bytes(lower))
    return f"{keeping_less(plan, lower)}, {freed} together"


def keeping_less(plan: Plan, lower: Plan) -> str:
    """Changes to a plan with less memory, such as ``2 units keep less and 4 blocks recompute``; empty for none."""
    units = sum(unit.treatments != other.treatments for unit, other in zip(plan.units, lower.units, strict=True))
    before = [(block.name, block.treatment, block.kept) for block in plan.blocks]
    blocks = sum((block.name, block.treatment, block.kept) not in before for block in lower.blocks)
    changes = [f"{units} {'unit keeps' if units == 1 else 'units keep'} less"] if units else []
    changes += [f"{blocks} {'block recomputes' if blocks == 1 else 'blocks recompute'}"] if blocks else []
    return " and ".join(changes)


def run_dry(trainer: pl.Trainer, sharded: ShardedModel) -> DryRun:
    """Runs an optimizer step like those of training, without the other ranks, and undoes all its effects.

    Gradients of an earlier step and optimizer states are alive, as in training. Where an optimizer has no state yet, a
    copy of it steps on gradients of zero, and weights are then restored from a copy on the host. On CPU all live
    tensors are counted, also those that no plan predicts, and a step over the plan's memory limit is out of memory.

    All-gathers bring wrong values here, as other ranks take no part, so other errors say nothing about memory and are
    only reported. An error that breaks the device is raised.
    """
    strategy, module = trainer.strategy, trainer.lightning_module
    assert isinstance(strategy, FSDPStrategy)
    unplanned = unplanned_tensors(trainer)  # counted before the dry run makes copies
    with (
        sharded.alone(),
        untouched(sharded.module, left_out=sharded.shards),
        mute_logging(trainer, module),
        torch.autograd.set_detect_anomaly(False),
    ):
        try:
            result = _run_step(trainer, strategy, sharded, unplanned)
        except Exception as error:
            raise_if_fatal(error)
            result = DryRun(error=f"{type(error).__name__}: {error}")
    result = dataclasses.replace(result, refused=sharded.refused)
    if result.place:
        gc.collect()  # the error's traceback has kept tensors in reference cycles
        # an interrupted step may leave tensors until the next one
        census = getattr(strategy, "census", None)
        if isinstance(census, Census):
            census.ignore(unplanned_tensors(trainer, besides=unplanned))
    empty_cache(strategy.root_device)
    return result


def _run_step(
    trainer: pl.Trainer, strategy: FSDPStrategy, sharded: ShardedModel, unplanned: Sequence[Tensor]
) -> DryRun:
    """Runs the step and tells where memory ran out, if it did; raises other errors."""
    batch = _next_batch(trainer)
    fresh = [_fresh_optimizer(optimizer) for optimizer in strategy.optimizers if not any(states_of(optimizer))]
    counted = None
    if strategy.root_device.type == "cpu":  # on a GPU the device's memory is the limit
        assert sharded.plan is not None
        counted = LiveBytes("cpu", memory_limit_bytes=sharded.plan.memory_limit_bytes)
        counted.leave_out(host_tensors(trainer))
        counted.track([*planned_tensors(trainer), *tensors_in(batch), *unplanned])
    with sharded.kept_shards() if fresh else nullcontext():
        try:
            with counted or nullcontext():
                sharded.shard_gradients()
                for optimizer in fresh:
                    with sharded.stepping(optimizer):
                        optimizer.step()
                _run_micro_batches(trainer, strategy, sharded, batch)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            text = str(error).partition("\n")[0]
            return DryRun(place_of_shortage(sharded), f"{type(error).__name__}: {text}")
    return DryRun()


def _fresh_optimizer(optimizer: Optimizer) -> Optimizer:
    """Copies an optimizer for the same parameters; the copy has a state of its own."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return copied(optimizer, {id(parameter): parameter for parameter in parameters})


def _run_micro_batches(trainer: pl.Trainer, strategy: FSDPStrategy, sharded: ShardedModel, batch: Any) -> None:
    """Runs the micro-batches of an optimizer step as Lightning's automatic optimization does."""
    module, number = trainer.lightning_module, trainer.accumulate_grad_batches
    for index in range(number):
        with nullcontext() if index == number - 1 else strategy.block_backward_sync():
            arguments = step_arguments(module, to_device(trainer, module, batch))
            loss = loss_in(strategy.training_step(*arguments)) / number
            if index == 0:
                for optimizer in strategy.optimizers:
                    optimizer.zero_grad()
            with sharded.reaching_alike(loss) as loss:
                strategy.pre_backward(loss)
                loss.backward()


def _next_batch(trainer: pl.Trainer) -> Any:
    """Reads the batch that training begins with; loaders and random numbers stay as they are."""
    ahead = getattr(trainer.fit_loop._data_fetcher, "batches", None)
    if ahead:
        return ahead[0][0]
    loaders = trainer.fit_loop._combined_loader
    assert loaders is not None
    if any(read_once_source(loader) is not None for loader in loaders.flattened):
        raise ValueError("the training loader can be read only once")
    return first_batch(loaders)[0]
