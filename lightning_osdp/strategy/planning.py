"""From a Trainer about to fit to a plan: a batch, a profile, the cluster, the search."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import FSDPStrategy
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import nn

from lightning_osdp.apply import check_initializable
from lightning_osdp.core.byte_size import format_bytes
from lightning_osdp.core.cluster import Cluster
from lightning_osdp.core.duration import format_seconds
from lightning_osdp.core.plan import Plan
from lightning_osdp.core.profile import ModelProfile
from lightning_osdp.core.progress import Progress
from lightning_osdp.core.search_space import SearchSpace
from lightning_osdp.errors import ConfigurationError, ProfileError
from lightning_osdp.profiler import (
    CUDA_HEADROOM,
    ComputePrecision,
    measure_cluster,
    profile_model,
    why_not_mean,
)
from lightning_osdp.scheduler import make_plan
from lightning_osdp.simulation import StepEstimate, simulate
from lightning_osdp.strategy.agreement import in_step, on_all_ranks, on_rank_zero
from lightning_osdp.strategy.averaging import with_averages
from lightning_osdp.strategy.division import Division
from lightning_osdp.strategy.loaders import (
    LoaderChange,
    common_size,
    first_batch,
    samples_in,
    training_loaders,
)
from lightning_osdp.strategy.once import Peeked
from lightning_osdp.strategy.options import Options, Prefetch
from lightning_osdp.strategy.progress import shown_progress
from lightning_osdp.strategy.step import configured_optimizers, forget_loaders, muted, to_device, training_step
from lightning_osdp.strategy.wishes import Wishes, wishes


def plan_fit(
    trainer: pl.Trainer, module: pl.LightningModule, options: Options, *, prefetch: Prefetch
) -> tuple[Plan, Division, StepEstimate]:
    """The plan for this fit, the same on all ranks, its micro-batches, and what a step is predicted to take.

    Every rank profiles; rank 0 plans.

    Raises:
        OSDPError: on all ranks, where any of them cannot profile or no plan fits.
    """
    strategy = trainer.strategy
    assert isinstance(strategy, FSDPStrategy)
    with shown_progress(is_global_zero=trainer.is_global_zero) as progress:
        progress("measuring links and the overhead of a unit", "")
        cluster = measure_cluster(
            strategy.root_device, num_nodes=strategy.num_nodes, local_ranks=strategy.num_processes
        )
    for name, link in (("all-gather", cluster.all_gather), ("reduce-scatter", cluster.reduce_scatter)):
        rank_zero_info(
            f"OSDP: {name} over {cluster.backend or 'one rank'}: {format_seconds(link.latency_s)} a step +"
            f" {format_seconds(link.seconds_per_byte * 2**20)} a MiB, fitted within {link.fit_error:.0%}"
        )
    with shown_progress(is_global_zero=trainer.is_global_zero) as progress:
        profiled = on_all_ranks(lambda: _profile(trainer, module, options, progress))
        current = common_size(profiled.loaders) or samples_in(profiled.batch)
        wanted = wishes(
            trainer, options, profiled.loaders, current, why_not_mean=lambda: _why_not_mean(trainer, module, profiled)
        )
        plan = _planned(trainer, profiled.model, options, cluster, wanted, prefetch=prefetch, progress=progress)
    change = LoaderChange(None if plan.micro_batch_size == current else plan.micro_batch_size, profiled.peeked)
    division = Division(change, wanted.windows, wanted.sizes, plan.micro_batch_size, plan.num_micro_batches)
    told = division.compared(plan)
    if told:
        rank_zero_info(f"OSDP: {told} (against your own micro-batches, each of which reduces all gradients)")
    return plan, division, simulate(plan, profiled.model, cluster)


def _planned(
    trainer: pl.Trainer,
    profile: ModelProfile,
    options: Options,
    cluster: Cluster,
    wanted: Wishes,
    *,
    prefetch: Prefetch,
    progress: Progress,
) -> Plan:
    free_bytes = cluster.memory_bytes
    assert free_bytes is not None
    limit_bytes = options.memory_limit_bytes or free_bytes
    free = f"{format_bytes(free_bytes)}, {_why_so_much(trainer.strategy.root_device)}"
    if options.memory_limit_bytes is None:
        rank_zero_info(f"OSDP: memory_limit is {free}")
    elif limit_bytes > free_bytes:
        rank_zero_warn(
            f"OSDP: memory_limit is {format_bytes(limit_bytes)}, more than {free}. Training may run out of memory;"
            " leave memory_limit out to plan for what is there."
        )
    return on_rank_zero(
        lambda: make_plan(
            profile,
            cluster,
            memory_limit_bytes=limit_bytes,
            search=options.search,
            search_space=_search_space(options, trainer),
            cost_model=options.cost_model,
            blocks={block.name: "recompute" for block in profile.blocks} if options.recomputed else None,
            backward_prefetch=prefetch.backward,
            forward_prefetch=prefetch.forward,
            progress=progress,
            **wanted.arguments,
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


def _activations(options: Options) -> Sequence[str]:
    """What blocks may do with what they save; where some are named that recompute, they do, and no others."""
    if options.cost_model == "paper":
        return ("keep",)
    return ("keep", "recompute") if options.recomputed else options.search_space.activations


def _why_so_much(device: torch.device) -> str:
    if device.type == "cuda":
        headroom = f"less {CUDA_HEADROOM:.0%} (an assumption) for rounding and fragmentation of its allocator"
        return f"what is free on the GPU {headroom}, which no plan counts"
    return "the rank's share of the memory that this machine has free"


@dataclass(frozen=True)
class _Profiled:
    loaders: CombinedLoader
    peeked: list[Peeked]
    batch: Any
    model: ModelProfile
    schedules: list[Any]


def _profile(trainer: pl.Trainer, module: pl.LightningModule, options: Options, progress: Progress) -> _Profiled:
    step = training_step(module)
    strategy = trainer.strategy
    _check_synchronised_batch_norm(module, strategy.root_device)
    check_initializable(module, strategy.root_device)
    loaders = training_loaders(trainer)
    batch, peeked = first_batch(loaders)
    batch = to_device(trainer, module, batch)
    schedules: list[Any] = []
    try:
        if not any(parameter.is_meta for parameter in module.parameters()):
            module.to(strategy.root_device)
        with muted(trainer, module):
            profile = profile_model(
                module,
                batch,
                batch_size=samples_in(batch),
                training_step=step,
                configure_optimizers=configured_optimizers(trainer, schedules),
                precision=_precision(strategy),
                context=trainer.precision_plugin.train_step_context,
                device=strategy.root_device,
                activations=_activations(options),
                blocks=options.recomputed or None,
                together=in_step,
                progress=progress,
            )
    except torch.OutOfMemoryError as error:
        raise ProfileError(
            "Expected the whole model and one step on the user's batch to fit on one device while it is profiled, but"
            f" memory ran out: {error}. Use a smaller batch with batch_size='scale', or pass plan=."
        ) from error
    finally:
        forget_loaders(trainer)
    profile = with_averages(profile, trainer, strategy.root_device)
    return _Profiled(loaders, peeked, batch, profile, schedules)


def _why_not_mean(trainer: pl.Trainer, module: pl.LightningModule, profiled: _Profiled) -> str | None:
    """Why another division into micro-batches may train differently, by what the model does."""
    for schedule in profiled.schedules:
        given = schedule if isinstance(schedule, dict) else {}
        if given.get("interval") == "step" and given.get("frequency", 1) != 1:
            return f"a learning-rate schedule with frequency {given['frequency']} counts micro-batches"
    with muted(trainer, module):
        return why_not_mean(module, training_step(module), profiled.batch, batch_size=samples_in(profiled.batch))


def _check_synchronised_batch_norm(module: nn.Module, device: torch.device) -> None:
    if device.type == "cpu" and any(isinstance(child, nn.SyncBatchNorm) for child in module.modules()):
        raise ConfigurationError(
            "Expected a GPU for synchronised batch normalisation, got ranks on CPU, where torch.nn.SyncBatchNorm does"
            " not run. Leave out sync_batchnorm=True, or train on GPUs."
        )


def _precision(strategy: Any) -> ComputePrecision:
    config = strategy.mixed_precision_config
    return (
        ComputePrecision(config.param_dtype, tuple(config._module_classes_to_ignore)) if config else ComputePrecision()
    )
