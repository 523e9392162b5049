"""From a Trainer about to fit to a plan: a batch, a profile, the cluster, the search."""

from __future__ import annotations

from typing import Any, Literal

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import FSDPStrategy
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.states import TrainerFn
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
from lightning_osdp.errors import ConfigurationError, ProfileError
from lightning_osdp.profiler import CUDA_HEADROOM, ComputePrecision, fingerprint, measure_cluster, profile_model
from lightning_osdp.scheduler import make_plan
from lightning_osdp.simulation import StepEstimate, simulate
from lightning_osdp.strategy.agreement import on_all_ranks, on_rank_zero
from lightning_osdp.strategy.loaders import (
    LoaderChange,
    common_size,
    first_batch,
    samples_in,
    samples_per_rank,
    training_loaders,
    why_kept,
)
from lightning_osdp.strategy.once import Peeked
from lightning_osdp.strategy.options import Options, Prefetch
from lightning_osdp.strategy.progress import shown_progress
from lightning_osdp.strategy.step import configured_optimizers, forget_loaders, muted, training_step


def plan_fit(
    trainer: pl.Trainer, module: pl.LightningModule, options: Options, *, prefetch: Prefetch
) -> tuple[Plan, LoaderChange, StepEstimate]:
    """The plan for this fit, the same on all ranks, what its loaders become, and what a step is predicted to take.

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
        return _planned(trainer, module, options, cluster, prefetch=prefetch, progress=progress)


def _planned(
    trainer: pl.Trainer,
    module: pl.LightningModule,
    options: Options,
    cluster: Cluster,
    *,
    prefetch: Prefetch,
    progress: Progress,
) -> tuple[Plan, LoaderChange, StepEstimate]:
    loaders, peeked, batch, profile = on_all_ranks(lambda: _profile(trainer, module, progress))
    limit_bytes = options.memory_limit_bytes or cluster.memory_bytes
    assert limit_bytes is not None
    if options.memory_limit_bytes is None:
        rank_zero_info(
            f"OSDP: memory_limit is {format_bytes(limit_bytes)}, {_why_so_much(trainer.strategy.root_device)}"
        )
    current = common_size(loaders) or samples_in(batch)
    micro_batch_size, most = _micro_batch(options, loaders, current, world_size=trainer.world_size)
    plan = on_rank_zero(
        lambda: make_plan(
            profile,
            cluster,
            memory_limit_bytes=limit_bytes,
            micro_batch_size=micro_batch_size,
            max_micro_batch_size=most,
            num_micro_batches=trainer.accumulate_grad_batches,
            search=options.search,
            search_space=options.search_space,
            cost_model=options.cost_model,
            backward_prefetch=prefetch.backward,
            forward_prefetch=prefetch.forward,
            progress=progress,
        )
    )
    size = None if plan.micro_batch_size == current else plan.micro_batch_size
    return plan, LoaderChange(batch_size=size, peeked=peeked), simulate(plan, profile, cluster)


def _why_so_much(device: torch.device) -> str:
    if device.type == "cuda":
        headroom = f"less {CUDA_HEADROOM:.0%} (an assumption) for rounding and fragmentation of its allocator"
        return f"what is free on the GPU {headroom}, which no plan counts"
    return "the rank's share of the memory that this machine has free"


def given_plan(trainer: pl.Trainer, module: nn.Module, options: Options) -> tuple[Plan, LoaderChange]:
    """The user's plan, which fits this model, and what the training loaders become.

    Raises:
        PlanMismatchError: it was made for another model or number of ranks.
        ConfigurationError: it contradicts ``batch_size``.
    """
    given = options.plan
    plan = given if isinstance(given, Plan) else on_rank_zero(lambda: Plan.load(str(given)))
    plan.check_matches(fingerprint(module), world_size=trainer.world_size)
    size = options.batch_size
    if isinstance(size, int) and size != plan.micro_batch_size:
        raise ConfigurationError(
            f"Expected batch_size and plan to agree, got batch_size={size} and a plan for a micro-batch of"
            f" {plan.micro_batch_size}. Leave batch_size out, or plan anew by leaving out plan."
        )
    if size == "keep" or trainer.state.fn != TrainerFn.FITTING or not trainer.fit_loop._data_source.is_defined():
        return plan, LoaderChange()
    loaders = training_loaders(trainer)
    if common_size(loaders) == plan.micro_batch_size:
        return plan, LoaderChange()
    reason = why_kept(loaders)
    if reason is not None:
        rank_zero_warn(f"OSDP: the plan's micro-batch is {plan.micro_batch_size}, but loaders keep theirs: {reason}.")
        return plan, LoaderChange()
    return plan, LoaderChange(batch_size=plan.micro_batch_size)


def _profile(
    trainer: pl.Trainer, module: pl.LightningModule, progress: Progress
) -> tuple[CombinedLoader, list[Peeked], Any, ModelProfile]:
    step = training_step(module)
    strategy = trainer.strategy
    _check_synchronised_batch_norm(module, strategy.root_device)
    check_initializable(module, strategy.root_device)
    loaders = training_loaders(trainer)
    batch, peeked = first_batch(loaders)
    batch = trainer.precision_plugin.convert_input(batch)
    batch = module._on_before_batch_transfer(batch, dataloader_idx=0)
    batch = call._call_strategy_hook(trainer, "batch_to_device", batch, dataloader_idx=0)
    try:
        if not any(parameter.is_meta for parameter in module.parameters()):
            module.to(strategy.root_device)
        with muted(trainer, module):
            profile = profile_model(
                module,
                batch,
                batch_size=samples_in(batch),
                training_step=step,
                configure_optimizers=configured_optimizers(trainer),
                precision=_precision(strategy),
                context=trainer.precision_plugin.train_step_context,
                device=strategy.root_device,
                progress=progress,
            )
    except torch.OutOfMemoryError as error:
        raise ProfileError(
            "Expected the whole model and one step on the user's batch to fit on one device while it is profiled, but"
            f" memory ran out: {error}. Use a smaller batch with batch_size='scale', or pass plan=."
        ) from error
    finally:
        forget_loaders(trainer)
    return loaders, peeked, batch, profile


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


def _micro_batch(
    options: Options, loaders: CombinedLoader, current: int, *, world_size: int
) -> tuple[int | Literal["scale"], int | None]:
    """The micro-batch to plan for, or ``"scale"``, and the largest allowed."""
    if options.batch_size in ("auto", "keep", current):
        return current, None
    reason = why_kept(loaders)
    if reason is not None:
        rank_zero_warn(f"OSDP: batch_size={options.batch_size!r} is ignored, the loader keeps {current}: {reason}.")
        return current, None
    if options.batch_size == "scale":
        return "scale", samples_per_rank(loaders, world_size=world_size)
    assert isinstance(options.batch_size, int)
    return options.batch_size, None
