"""Which plan a model is sharded by - the user's, a new one, the one that it had, or none - and the sharding."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from lightning_osdp.apply import ShardedModel, called_children, fully_shard_arguments, with_recomputed
from lightning_osdp.core.plans.plan import Block, Plan
from lightning_osdp.core.text.byte_size import format_bytes
from lightning_osdp.core.units import SMALL_UNIT_BYTES
from lightning_osdp.errors import ConfigurationError, ProfileError
from lightning_osdp.profiler import fingerprint
from lightning_osdp.strategy.batching.division import Division, Windows
from lightning_osdp.strategy.batching.loaders import common_size, training_loaders, why_kept
from lightning_osdp.strategy.checkpointing.stored_plan import read_plan
from lightning_osdp.strategy.options import Options, Setup
from lightning_osdp.strategy.planning.micro_batches import divisions, samples_per_step
from lightning_osdp.strategy.planning.plan_fit import Choice, plan_fit
from lightning_osdp.strategy.planning.training_step import check_in_children
from lightning_osdp.strategy.runtime.all_ranks import on_rank_zero


def chosen(module: pl.LightningModule, options: Options, setup: Setup, *, known: Plan | None) -> Choice:
    """A plan, or none; it may be the one `known` of the model that the strategy had before.

    Raises:
        ConfigurationError: the model is sharded already, or the given plan contradicts another option.
        OSDPError: the given plan does not fit, or none can be made.
    """
    if any(isinstance(child, (FullyShardedDataParallel, FSDPModule)) for child in module.modules()):
        raise ConfigurationError(
            "Expected a model that nothing has sharded, so that it can be sharded as planned, but it has units already."
            " Go on with the Trainer that sharded it, build the model anew and load its checkpoint, or leave out a"
            " fully_shard of your own: the plan shards."
        )
    trainer = module.trainer
    if options.plan is not None:
        plan = _given_plan(module, options, setup)
        return Choice(plan, given_division(trainer, plan, options))
    if trainer.state.fn == TrainerFn.FITTING:
        return plan_fit(trainer, module, options, setup)
    if known is not None and known.fingerprint == fingerprint(module):
        return Choice(known, Division())
    rank_zero_info(
        "OSDP: evaluating without a plan; each child and each block is a unit that is freed after forward. Pass plan="
        " to shard it as planned."
    )
    return Choice(None, Division())


def planned_by_hand(module: pl.LightningModule, options: Options, setup: Setup, *, known: Plan | None) -> Choice | str:
    """As `chosen`, for a module that optimizes manually with all parameters in children; or why there is no plan."""
    check_in_children(module)
    if options.batch_size == "auto":
        options = replace(options, batch_size="keep")
    try:
        found = chosen(module, options, setup, known=known)
    except ProfileError as error:
        return f"its step cannot be profiled as one backward of the sum of its losses: {error}"
    units = () if found.plan is None else found.plan.units  # evaluated before there is one
    shared = next((operator for unit in units if not unit.name for operator in unit.operators), None)
    return f"{shared!r} shares parameters with another child" if shared else found


def _given_plan(module: pl.LightningModule, options: Options, setup: Setup) -> Plan:
    """The user's plan, checked."""
    given, memory_limit_bytes = options.plan, options.memory_limit_bytes
    plan = given if isinstance(given, Plan) else on_rank_zero(lambda: read_plan(Path(str(given))))
    plan.check_matches(fingerprint(module), world_size=module.trainer.world_size, node_size=setup.node_size)
    _check_accumulates_in_fp32(plan, options, setup.precision)
    if memory_limit_bytes is not None and plan.peak_bytes > memory_limit_bytes:
        raise ConfigurationError(
            f"Expected a plan that fits memory_limit={format_bytes(memory_limit_bytes)}, got one that is predicted to"
            f" take {format_bytes(plan.peak_bytes)}. Leave memory_limit out, or plan anew by leaving out plan."
        )
    return plan


def given_division(trainer: pl.Trainer, plan: Plan, options: Options) -> Division:
    """Micro-batches of a plan that was there before this fit, as far as the user's loaders can give them.

    Where they make up the optimizer step that the user wants, the Trainer gets the plan's number of them, too.

    Raises:
        ConfigurationError: they contradict ``batch_size`` or ``global_batch_size``.
    """
    size, num_samples = plan.micro_batch_size, plan.micro_batch_size * plan.num_micro_batches
    if isinstance(options.batch_size, int) and options.batch_size != size:
        raise ConfigurationError(
            f"Expected batch_size and plan to agree, got batch_size={options.batch_size} and a plan for a micro-batch"
            f" of {size}. Leave batch_size out, or plan anew by leaving out plan."
        )
    if options.global_batch_size not in (None, num_samples * plan.world_size):
        raise ConfigurationError(
            f"Expected global_batch_size and plan to agree, got global_batch_size={options.global_batch_size} and a"
            f" plan for {num_samples * plan.world_size} samples: {plan.num_micro_batches} micro-batches of {size} on"
            f" each of {plan.world_size} ranks. Leave global_batch_size out, or plan anew by leaving out plan."
        )
    is_fitting = trainer.state.fn == TrainerFn.FITTING and trainer.fit_loop._data_source.is_defined()
    if options.batch_size == "keep" or not is_fitting:
        return Division()
    loaders = training_loaders(trainer)
    current, reason = common_size(loaders), why_kept(loaders)
    if reason is None and current is not None and samples_per_step(trainer, options, current) == num_samples:
        windows = Windows.of(trainer, micro_batch_size=current, num_samples=num_samples)
        sizes, reason = divisions(trainer, loaders, windows)
        if size in sizes:
            return Division(plan, windows, sizes)
        reason = reason or f"in micro-batches of {size} an epoch does not have the same windows"
    if current == size:
        return Division()
    if reason is not None:
        rank_zero_warn(f"OSDP: the plan's micro-batch is {size}, but loaders keep theirs: {reason}.")
        return Division()
    return Division(plan)


def _check_accumulates_in_fp32(plan: Plan, options: Options, precision: str) -> None:
    """Returns if the plan adds up gradients in float32 where that was asked for."""
    found = next((unit for unit in plan.units if unit.sync != "every"), None)
    if options.accumulate_in_fp32 and "mixed" in precision and found is not None:
        raise ConfigurationError(
            f"Expected a plan with sync='every' for accumulate_in_fp32=True in {precision}, got sync={found.sync!r} for"
            f" unit {found.name!r}, whose gradients would add up in low precision. Leave accumulate_in_fp32 out, or"
            " plan anew by leaving out plan."
        )


def sharded(
    module: pl.LightningModule, plan: Plan | None, options: Options, setup: Setup, **fsdp_kwargs: Any
) -> ShardedModel:
    """The module as planned; for want of a plan, in units of its children and blocks."""
    arguments = fully_shard_arguments(fsdp_kwargs)
    if plan is None:
        return ShardedModel.unplanned(module, device=setup.device, **arguments)
    executed = replace(plan, blocks=with_recomputed(plan.blocks, options.recomputed))
    found = ShardedModel.planned(module, executed, device=setup.device, **arguments)
    found.plan, found.recomputed = plan, options.recomputed
    found.check_options = lambda plan: _check_accumulates_in_fp32(plan, options, setup.precision)
    return found


def separated(module: pl.LightningModule, why: str, options: Options, setup: Setup, **fsdp_kwargs: Any) -> ShardedModel:
    """A module that optimizes manually, without a plan, with each child sharded by itself; says why.

    Raises:
        ConfigurationError: a plan is given, or a parameter is in no child.
    """
    if options.plan is not None:
        raise ConfigurationError(
            f"Expected no plan= with automatic_optimization=False here, for {why}. Leave it out, or use automatic"
            " optimization."
        )
    blocks = [Block(name=name, activations="recompute") for name in options.recomputed]
    size = options.search_space.min_unit_bytes
    smallest = SMALL_UNIT_BYTES if size is None else size
    names = ", ".join(name for name, _ in called_children(module))
    arguments = fully_shard_arguments(fsdp_kwargs)
    found = ShardedModel.separated(module, blocks, min_unit_bytes=smallest, device=setup.device, **arguments)
    rank_zero_info(
        f"OSDP: nothing is planned in manual optimization, for {why}: {names} are sharded each by itself, in"
        f" {found.num_units} ZDP units (plain FSDP). memory_limit and batch_size have no effect."
    )
    return found
