"""From a Trainer about to fit to a plan: a batch, a profile, the cluster, the search."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import FSDPStrategy
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from lightning_osdp.core.cluster import Cluster
from lightning_osdp.core.plans.plan import Plan
from lightning_osdp.core.plans.search_space import SearchSpace
from lightning_osdp.core.profile import ModelProfile
from lightning_osdp.core.text.byte_size import format_bytes
from lightning_osdp.core.text.duration import format_seconds
from lightning_osdp.core.text.progress import Progress
from lightning_osdp.engine import FSDP2
from lightning_osdp.errors import ConfigurationError
from lightning_osdp.profiler import CUDA_HEADROOM, measure_cluster, why_not_mean
from lightning_osdp.scheduler import make_plan
from lightning_osdp.simulation import StepEstimate, simulate
from lightning_osdp.strategy.batching.division import Division
from lightning_osdp.strategy.batching.larger_batches import BatchWatch
from lightning_osdp.strategy.batching.loaders import LoaderChange, common_size, samples_in
from lightning_osdp.strategy.options import Options, Prefetch
from lightning_osdp.strategy.planning.micro_batches import Wishes, wishes
from lightning_osdp.strategy.planning.parameter_groups import Group
from lightning_osdp.strategy.planning.profile_fit import FitProfiler, Profiled, standing_for
from lightning_osdp.strategy.planning.progress import shown_progress
from lightning_osdp.strategy.planning.publish import store_inputs
from lightning_osdp.strategy.planning.training_step import muted, training_step
from lightning_osdp.strategy.runtime.all_ranks import on_all_ranks, on_rank_zero


class Choice(NamedTuple):
    """What a model is to be sharded by.

    Attributes:
        plan: None where there is none.
        division: its micro-batches.
        estimate: what a step is predicted to take, where that was computed.
        groups: parameter groups of the whole model's optimizers, where they were configured.
        watch: for batches larger than what was profiled.
    """

    plan: Plan | None
    division: Division
    estimate: StepEstimate | None = None
    groups: Sequence[Group] | None = None
    watch: BatchWatch | None = None


def plan_fit(trainer: pl.Trainer, module: pl.LightningModule, options: Options, *, prefetch: Prefetch) -> Choice:
    """A plan for this fit, the same on all ranks.

    Every rank profiles; rank 0 plans.

    Raises:
        OSDPError: on all ranks, where any of them cannot profile or no plan fits.
    """
    strategy = trainer.strategy
    assert isinstance(strategy, FSDPStrategy)
    with shown_progress(is_global_zero=trainer.is_global_zero) as progress:
        progress("measuring links and the overhead of a unit", "")
        cluster = measure_cluster(
            strategy.root_device,
            num_nodes=strategy.num_nodes,
            local_ranks=strategy.num_processes,
        )
    for name, link in (("all-gather", cluster.all_gather), ("reduce-scatter", cluster.reduce_scatter)):
        rank_zero_info(
            f"OSDP: {name} over {cluster.backend or 'one rank'}: {format_seconds(link.latency_s)} a step +"
            f" {format_seconds(link.seconds_per_byte * 2**20)} a MiB, fitted within {link.fit_error:.0%}"
        )
    with shown_progress(is_global_zero=trainer.is_global_zero) as progress:
        profiler = FitProfiler(trainer, module, options, progress)
        profiled = on_all_ranks(profiler.first)
        current = common_size(profiled.loaders) or samples_in(profiled.batch)
        wanted = wishes(
            trainer, options, profiled.loaders, current, why_not_mean=lambda: _why_not_mean(trainer, module, profiled)
        )
        memory_limit_bytes = _limit_bytes(options, cluster, strategy.root_device)
        search = partial(
            _searched,
            trainer,
            options,
            cluster,
            wanted,
            memory_limit_bytes=memory_limit_bytes,
            prefetch=prefetch,
            progress=progress,
        )
        plan = search(profiled.model)
        measured = _nearer(profiler, profiled, plan, cluster)
        if measured is not profiled.model:
            plan = search(measured)
    if plan.micro_batch_size == wanted.policy.max_micro_batch_size:
        rank_zero_warn(
            f"OSDP: the micro-batch of {plan.micro_batch_size} is all that a rank has of the training data, so an epoch"
            " is one step. Give batch_size a number."
        )
    change = LoaderChange(None if plan.micro_batch_size == current else plan.micro_batch_size, profiled.peeked)
    division = Division(
        change, wanted.windows, wanted.policy.micro_batch_sizes, plan.micro_batch_size, plan.num_micro_batches
    )
    store_inputs(trainer, measured, cluster)
    told = division.compared(plan)
    if told:
        rank_zero_info(f"OSDP: {told} (against your own micro-batches, each of which reduces all gradients)")
    return Choice(plan, division, simulate(plan, measured, cluster), profiled.groups, BatchWatch(profiled.batch))


def _nearer(profiler: FitProfiler, profiled: Profiled, plan: Plan, cluster: Cluster) -> ModelProfile:
    """The profile, measured again where the plan's micro-batch is far from what was measured."""
    free_bytes = cluster.memory_bytes
    assert free_bytes is not None
    try:
        return on_all_ranks(lambda: profiler.nearer(profiled, plan.micro_batch_size, free_bytes=free_bytes)).model
    except Exception as error:  # of the user's step, on every rank
        rank_zero_warn(
            f"OSDP: a micro-batch of {plan.micro_batch_size} samples cannot be profiled ({type(error).__name__}:"
            f" {error}). What is planned of it follows from {profiled.model.profiled_batch_size}."
        )
        return profiled.model


def _limit_bytes(options: Options, cluster: Cluster, device: torch.device) -> int:
    """Of every rank; says what it is, or that it is more than there is."""
    free_bytes = cluster.memory_bytes
    assert free_bytes is not None
    memory_limit_bytes = options.memory_limit_bytes or round(options.memory_share * free_bytes)
    free = f"{format_bytes(free_bytes)}, {_why_so_much(device)}"
    if options.memory_limit_bytes is None:
        share = f"{options.memory_share:.0%} of " if options.memory_share < 1 else ""
        rank_zero_info(f"OSDP: memory_limit is {share}{free}")
    elif memory_limit_bytes > free_bytes:
        rank_zero_warn(
            f"OSDP: memory_limit is {format_bytes(memory_limit_bytes)}, more than {free}. Training may run out of"
            " memory; leave memory_limit out to plan for what is there."
        )
    return memory_limit_bytes


def _searched(
    trainer: pl.Trainer,
    options: Options,
    cluster: Cluster,
    wanted: Wishes,
    profile: ModelProfile,
    *,
    memory_limit_bytes: int,
    prefetch: Prefetch,
    progress: Progress,
) -> Plan:
    return on_rank_zero(
        lambda: make_plan(
            profile,
            cluster,
            memory_limit_bytes=memory_limit_bytes,
            micro_batch_size=wanted.policy,
            search=options.search,
            search_space=_search_space(options, trainer),
            cost_model=options.cost_model,
            blocks={block.name: "recompute" for block in profile.blocks} if options.recomputed else None,
            engine=FSDP2(backward_prefetch=prefetch.backward, forward_prefetch=prefetch.forward),
            progress=progress,
        )
    )


def _search_space(options: Options, trainer: pl.Trainer) -> SearchSpace:
    """What may be chosen: under mixed precision, only sums of gradients in float32 if that was asked for."""
    space = options.search_space
    if not options.accumulate_in_fp32 or "mixed" not in str(trainer.precision_plugin.precision):
        return space
    if "every" not in space.sync:
        raise ConfigurationError(
            f"Expected 'every' in SearchSpace(sync=...) with accumulate_in_fp32=True, got {space.sync!r}. Leave out one"
            " of the two."
        )
    return dataclasses.replace(space, sync=("every",))


def _why_so_much(device: torch.device) -> str:
    if device.type == "cuda":
        headroom = f"less {CUDA_HEADROOM:.0%} (an assumption) for rounding and fragmentation of its allocator"
        return f"what is free on the GPU {headroom}, which no plan counts"
    return "the rank's share of the memory that this machine has free"


def _why_not_mean(trainer: pl.Trainer, module: pl.LightningModule, profiled: Profiled) -> str | None:
    """Why another division into micro-batches may train differently, by what the model does."""
    for schedule in profiled.schedules:
        given = schedule if isinstance(schedule, dict) else {}
        if given.get("interval") == "step" and given.get("frequency", 1) != 1:
            return f"a learning-rate schedule with frequency {given['frequency']} counts micro-batches"
    with muted(trainer, module), standing_for(module, is_too_large=profiled.is_too_large):
        return why_not_mean(module, training_step(module), profiled.batch, batch_size=samples_in(profiled.batch))
