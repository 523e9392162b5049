"""Which plan a model is sharded by - the user's, a new one, the one that it had, or none - and the sharding."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_info
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from lightning_osdp.apply import ShardedModel, called_children, fully_shard_arguments, with_recomputed
from lightning_osdp.core.plans.plan import Block, Plan
from lightning_osdp.core.units import SMALL_UNIT_BYTES
from lightning_osdp.errors import ConfigurationError, ProfileError
from lightning_osdp.profiler import fingerprint
from lightning_osdp.strategy.batching.division import Division
from lightning_osdp.strategy.options import Options, Prefetch
from lightning_osdp.strategy.planning.given_plan import check_accumulates_in_fp32, given_plan
from lightning_osdp.strategy.planning.manual_step import check_in_children
from lightning_osdp.strategy.planning.plan_fit import Choice, plan_fit


def chosen(module: pl.LightningModule, options: Options, *, prefetch: Prefetch, known: Plan | None) -> Choice:
    """A plan, or none.

    Args:
        module: about to be sharded by its trainer.
        options: of the strategy.
        prefetch: settings of prefetching.
        known: the plan of the model that the strategy had before.

    Raises:
        ConfigurationError: the model is sharded already.
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
        return Choice(*given_plan(trainer, module, options))
    if trainer.state.fn == TrainerFn.FITTING:
        return plan_fit(trainer, module, options, prefetch=prefetch)
    if known is not None and known.fingerprint == fingerprint(module):
        return Choice(known, Division())
    rank_zero_info(
        "OSDP: evaluating without a plan; each child and each block is a unit that is freed after forward. Pass plan="
        " to shard it as planned."
    )
    return Choice(None, Division())


def sharded(
    module: pl.LightningModule, plan: Plan | None, options: Options, *, device: torch.device, **fsdp_kwargs: Any
) -> ShardedModel:
    """The module as planned; for want of a plan, in units of its children and blocks."""
    arguments = fully_shard_arguments(fsdp_kwargs)
    if plan is None:
        return ShardedModel.unplanned(module, device=device, **arguments)
    executed = replace(plan, blocks=with_recomputed(plan.blocks, options.recomputed))
    found = ShardedModel.planned(module, executed, device=device, **arguments)
    found.plan, found.recomputed = plan, options.recomputed
    precision = str(module.trainer.precision_plugin.precision)
    found.check_options = lambda plan: check_accumulates_in_fp32(plan, options, precision)
    return found


def planned_by_hand(
    module: pl.LightningModule, options: Options, *, prefetch: Prefetch, known: Plan | None
) -> Choice | str:
    """As `chosen`, for a module that optimizes manually; or why there is no plan.

    Raises:
        ConfigurationError: a given plan does not fit, or a parameter is in no child.
        InfeasibleError: no plan fits under the limit.
    """
    check_in_children(module)
    if options.batch_size == "auto":
        options = replace(options, batch_size="keep")
    try:
        found = chosen(module, options, prefetch=prefetch, known=known)
    except ProfileError as error:
        return f"its step cannot be profiled as one backward of the sum of its losses: {error}"
    units = () if found.plan is None else found.plan.units  # evaluated before there is one
    shared = next((operator for unit in units if not unit.name for operator in unit.operators), None)
    return f"{shared!r} shares parameters with another child" if shared else found


def separated(
    module: pl.LightningModule, why: str, options: Options, *, device: torch.device, **fsdp_kwargs: Any
) -> ShardedModel:
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
    found = ShardedModel.separated(module, blocks, min_unit_bytes=smallest, device=device, **arguments)
    rank_zero_info(
        f"OSDP: nothing is planned in manual optimization, for {why}: {names} are sharded each by itself, in"
        f" {found.num_units} ZDP units (plain FSDP). memory_limit and batch_size have no effect."
    )
    return found
