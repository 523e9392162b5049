"""A plan that the user gives: checked, and its micro-batches."""

from __future__ import annotations

from pathlib import Path

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch import nn

from lightning_osdp.core.plans.plan import Plan
from lightning_osdp.core.text.byte_size import format_bytes
from lightning_osdp.errors import ConfigurationError
from lightning_osdp.profiler import fingerprint
from lightning_osdp.strategy.batching.division import Division
from lightning_osdp.strategy.batching.loaders import LoaderChange, common_size, training_loaders, why_kept
from lightning_osdp.strategy.batching.windows import Windows
from lightning_osdp.strategy.checkpointing.stored_plan import read_plan
from lightning_osdp.strategy.options import Options
from lightning_osdp.strategy.planning.micro_batches import divisions, samples_per_step
from lightning_osdp.strategy.runtime.all_ranks import on_rank_zero


def given_plan(trainer: pl.Trainer, module: nn.Module, options: Options) -> tuple[Plan, Division]:
    """The user's plan, which fits this model, and its micro-batches.

    Raises:
        PlanMismatchError: it was made for another model or number of ranks.
        ConfigurationError: it contradicts another option.
    """
    given = options.plan
    plan = given if isinstance(given, Plan) else on_rank_zero(lambda: read_plan(Path(str(given))))
    plan.check_matches(fingerprint(module), world_size=trainer.world_size)
    check_accumulates_in_fp32(plan, options, str(trainer.precision_plugin.precision))
    _check_fits(plan, options)
    return plan, given_division(trainer, plan, options)


def given_division(trainer: pl.Trainer, plan: Plan, options: Options) -> Division:
    """Micro-batches of a plan that was there before this fit.

    Raises:
        ConfigurationError: they contradict ``batch_size`` or ``global_batch_size``.
    """
    size, wanted = options.batch_size, options.global_batch_size
    if isinstance(size, int) and size != plan.micro_batch_size:
        raise ConfigurationError(
            f"Expected batch_size and plan to agree, got batch_size={size} and a plan for a micro-batch of"
            f" {plan.micro_batch_size}. Leave batch_size out, or plan anew by leaving out plan."
        )
    num_samples = plan.micro_batch_size * plan.num_micro_batches * plan.world_size
    if wanted is not None and wanted != num_samples:
        raise ConfigurationError(
            f"Expected global_batch_size and plan to agree, got global_batch_size={wanted} and a plan for {num_samples}"
            f" samples: {plan.num_micro_batches} micro-batches of {plan.micro_batch_size} on each of {plan.world_size}"
            " ranks. Leave global_batch_size out, or plan anew by leaving out plan."
        )
    if size == "keep" or trainer.state.fn != TrainerFn.FITTING or not trainer.fit_loop._data_source.is_defined():
        return Division()
    return _made_up(trainer, plan, options, training_loaders(trainer))


def check_accumulates_in_fp32(plan: Plan, options: Options, precision: str) -> None:
    """Returns if the plan adds up gradients in float32 where that was asked for.

    Raises:
        ConfigurationError: it does not.
    """
    whole = next((unit.name for unit in plan.units if unit.sync == "last"), None)
    if options.accumulate_in_fp32 and "mixed" in precision and whole is not None:
        raise ConfigurationError(
            f"Expected a plan with sync='every' for accumulate_in_fp32=True in {precision}, got sync='last' for unit"
            f" {whole!r}, whose gradients would add up in low precision. Leave accumulate_in_fp32 out, or plan anew by"
            " leaving out plan."
        )


def _check_fits(plan: Plan, options: Options) -> None:
    memory_limit_bytes = options.memory_limit_bytes
    if memory_limit_bytes is not None and plan.peak_bytes > memory_limit_bytes:
        raise ConfigurationError(
            f"Expected a plan that fits memory_limit={format_bytes(memory_limit_bytes)}, got one that is predicted to"
            f" take {format_bytes(plan.peak_bytes)}. Leave memory_limit out, or plan anew by leaving out plan."
        )


def _made_up(trainer: pl.Trainer, plan: Plan, options: Options, loaders: CombinedLoader) -> Division:
    """The plan's micro-batches; where they make up the step that the user wants, the plan's number of them, too."""
    current, size = common_size(loaders), plan.micro_batch_size
    reason = why_kept(loaders)
    num_samples = size * plan.num_micro_batches
    if reason is None and current is not None and samples_per_step(trainer, options, current) == num_samples:
        windows = Windows.of(trainer, micro_batch_size=current, num_samples=num_samples)
        sizes, reason = divisions(trainer, loaders, windows)
        if size in sizes:
            return Division(LoaderChange(size), windows, sizes, size, plan.num_micro_batches)
        reason = reason or f"in micro-batches of {size} an epoch does not have the same windows"
    if current == size:
        return Division()
    if reason is not None:
        rank_zero_warn(f"OSDP: the plan's micro-batch is {size}, but loaders keep theirs: {reason}.")
        return Division()
    return Division(LoaderChange(size))
