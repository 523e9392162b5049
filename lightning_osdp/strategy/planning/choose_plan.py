"""Choice of the plan that a model is sharded by: the user's, the model's earlier one, a new one for a fit, or none."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import lightning.pytorch as pl
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_info
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel

from lightning_osdp.apply import executed
from lightning_osdp.core.plans.plan import Plan, workload_of
from lightning_osdp.core.text.byte_size import format_bytes
from lightning_osdp.errors import ConfigurationError, ProfileError
from lightning_osdp.planner.engine import effects_of
from lightning_osdp.planner.scheduler import in_micro_batches
from lightning_osdp.profiler import fingerprint
from lightning_osdp.strategy.batching.division import Division, check_agrees, division_of_plan, division_text
from lightning_osdp.strategy.checkpointing.entries import Resumed, read_plan
from lightning_osdp.strategy.options import Options
from lightning_osdp.strategy.planning.plan_fit import Choice, plan_fit, with_note
from lightning_osdp.strategy.planning.training_step import check_in_children
from lightning_osdp.strategy.runtime.all_ranks import on_rank_zero


def choose_plan(
    module: pl.LightningModule, options: Options, *, previous: Plan | None, resumed: Resumed | None
) -> Choice:
    """Chooses a plan, or none; ``previous`` is the plan of the model that the strategy had before.

    A ``resumed`` fit keeps the micro-batches of its checkpoint.

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
        plan = _given_plan(module, options)
        check_agrees(plan, options)
        used, division = divide_plan(trainer, plan, options, resumed)
        return Choice(with_note(used, trainer.strategy.root_device), division, given_plan=plan)
    if trainer.state.fn == TrainerFn.FITTING:
        return plan_fit(trainer, module, options, resumed, previous=previous)
    if previous is not None and previous.fingerprint == fingerprint(module):
        return Choice(previous, Division())
    rank_zero_info(
        "OSDP: evaluating without a plan; each child and each block is a unit that is freed after forward. Pass plan="
        " to shard it as planned."
    )
    return Choice(None, Division())


def choose_manual_plan(
    module: pl.LightningModule, options: Options, *, previous: Plan | None, resumed: Resumed | None
) -> Choice | str:
    """Chooses a plan for manual optimization, where all parameters are in children; or says why there is none."""
    check_in_children(module)
    if options.batch_size in ("auto", "divide"):
        options = replace(options, batch_size="keep")
    try:
        choice = choose_plan(module, options, previous=previous, resumed=resumed)
    except ProfileError as error:
        return f"its step cannot be profiled as one backward of the sum of its losses: {error}"
    units = () if choice.plan is None else choice.plan.units  # None where the model is evaluated before a fit
    shared = next((operator for unit in units if not unit.name for operator in unit.operators), None)
    return f"{shared!r} shares parameters with another child" if shared else choice


def _given_plan(module: pl.LightningModule, options: Options) -> Plan:
    """Reads the user's plan and checks that it fits model, ranks and options."""
    given = options.plan
    plan = given if isinstance(given, Plan) else on_rank_zero(lambda: read_plan(Path(str(given))))
    executed(plan, ()).check(source="the plan of plan=")
    plan.check_matches(fingerprint(module), world_size=module.trainer.world_size, node_size=options.node_size)
    check_accumulates_in_fp32(plan, options, str(module.trainer.precision))
    for name, limit_bytes, taken_bytes in (
        ("memory_limit", options.memory_limit_bytes, plan.peak_bytes),
        ("host_memory_limit", options.host_memory_limit_bytes, plan.host_bytes),
    ):
        if limit_bytes is not None and taken_bytes > limit_bytes:
            raise ConfigurationError(
                f"Expected a plan that fits {name}={format_bytes(limit_bytes)}, got one that is predicted to take"
                f" {format_bytes(taken_bytes)}. Leave {name} out, or plan anew by leaving out plan."
            )
    return plan


def check_accumulates_in_fp32(plan: Plan, options: Options, precision: str) -> None:
    """Raises a `ConfigurationError` if units accumulate gradients in low precision, against the user's option."""
    late = next((unit for unit in plan.units if effects_of(unit.treatments[0]).waits), None)
    if options.accumulate_in_fp32 and "mixed" in precision and late is not None:
        raise ConfigurationError(
            f"Expected a plan with sync='every' for accumulate_in_fp32=True in {precision}, got sync={late.sync!r} for"
            f" unit {late.name!r}, whose gradients would add up in low precision. Leave accumulate_in_fp32 out, or"
            " plan anew by leaving out plan."
        )


def divide_plan(trainer: pl.Trainer, plan: Plan, options: Options, resumed: Resumed | None) -> tuple[Plan, Division]:
    """Adapts a plan made before this fit to the micro-batches of this fit, or of the checkpoint to resume.

    Raises:
        ConfigurationError: the checkpoint counts in micro-batches that need more memory than the plan's.
    """
    division, used = division_of_plan(trainer, plan, options)
    saved = None if resumed is None else division.resumed(resumed.division)
    if resumed is None or saved in (None, workload_of(plan)):
        return in_micro_batches(plan, used), division
    waits = any(effects_of(treatment).waits for unit in plan.units for treatment in unit.treatments)
    keeps_more = plan.num_micro_batches == 1 and waits
    if plan.peak_bytes and (saved.micro_batch_size > plan.micro_batch_size or keeps_more):
        raise ConfigurationError(
            f"Expected a plan for {division_text(saved)}, in which the checkpoint {resumed.path!r} counts, got one for"
            f" {division_text(workload_of(plan))}, of which nobody knows whether the larger ones fit. Leave plan out to"
            " plan for them, or pass the path of the checkpoint as plan=."
        )
    rank_zero_info(
        f"OSDP: training goes on with {division_text(saved)}, in which the checkpoint counts, instead of the plan's"
        f" {plan.micro_batch_size} x {plan.num_micro_batches}."
    )
    return in_micro_batches(plan, saved), replace(division, workload=saved)
