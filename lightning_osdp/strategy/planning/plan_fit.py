"""Plan of a fit: all ranks measure and profile, and rank 0 plans for all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import lightning.pytorch as pl
import torch
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn

from lightning_osdp.callbacks.peak import elements_in
from lightning_osdp.core.batch_policy import MOST_SAMPLES, BatchPolicy
from lightning_osdp.core.cluster import CUDA_HEADROOM, Cluster
from lightning_osdp.core.correction import Correction
from lightning_osdp.core.plans.plan import Plan, workload_of
from lightning_osdp.core.plans.search_space import SearchSpace
from lightning_osdp.core.profile import ModelProfile
from lightning_osdp.core.text.byte_size import format_bytes
from lightning_osdp.core.text.duration import format_seconds
from lightning_osdp.errors import ConfigurationError, InfeasibleError, PlanFormatError
from lightning_osdp.planner.scheduler import PlanMethod
from lightning_osdp.profiler import measure_cluster, raise_if_fatal
from lightning_osdp.report.sentences import tell_accumulation, tell_correction
from lightning_osdp.strategy.batching.division import (
    Division,
    Windows,
    allowed_micro_batches,
    division_text,
    first_text,
    user_policy,
)
from lightning_osdp.strategy.batching.first_batch import BatchWatch
from lightning_osdp.strategy.batching.loaders import common_size
from lightning_osdp.strategy.checkpointing.entries import Resumed
from lightning_osdp.strategy.options import Options
from lightning_osdp.strategy.planning.plan_request import PlanRequest
from lightning_osdp.strategy.planning.profile_batch import BatchProfiler
from lightning_osdp.strategy.planning.profile_fit import FitProfiler
from lightning_osdp.strategy.planning.publish import shown_progress
from lightning_osdp.strategy.planning.training_step import ParameterGroup
from lightning_osdp.strategy.runtime.all_ranks import host_group, on_all_ranks, on_rank_zero

UNVALIDATED = (
    "unvalidated on CUDA: predictions were compared with measurements of one model on one GPU, whose bytes were right"
    " and whose steps took up to 15% longer, and 2.3 times as long where the host updates; on several GPUs with none"
)
"""Note in each plan of a fit on GPUs."""


class Choice(NamedTuple):
    """Plan and division that a model is sharded by; other fields are None unless the plan was made for this fit."""

    plan: Plan | None
    division: Division
    given_plan: Plan | None = None
    """Plan as the user gave it; the plan in use may have other micro-batches."""
    groups: Sequence[ParameterGroup] | None = None
    """Parameter groups of the whole model, until they are compared with those of the sharded one."""
    watch: BatchWatch | None = None
    """Warning of batches larger than the profiled one, where there are no plans for these."""
    later: BatchProfiler | None = None
    """Profiler of larger batches, for plans with less memory; None where there are none."""
    profile: ModelProfile | None = None
    cluster: Cluster | None = None
    is_raced: bool = False
    """True if the plan is the one of a checkpoint that had won a race."""
    sample_elements: float = 0.0
    """Elements of tensors for each sample of the profiled batch."""
    learned: Correction = Correction()
    """Correction of profile and cluster that races of the plan have found; both stay as they were planned by."""

    def corrected(self) -> tuple[ModelProfile, Cluster]:
        """Profile and cluster, which must be known, by what races have found."""
        assert self.profile is not None
        assert self.cluster is not None
        return self.learned.of_profile(self.profile), self.learned.of_cluster(self.cluster)


def with_note(plan: Plan, device: torch.device) -> Plan:
    """Returns the plan with a note that its numbers are unvalidated, where it is used on a GPU."""
    if device.type != "cuda" or UNVALIDATED in plan.notes:
        return plan
    return replace(plan, notes=(*plan.notes, UNVALIDATED))


def plan_fit(
    trainer: pl.Trainer,
    module: pl.LightningModule,
    options: Options,
    resumed: Resumed | None,
    *,
    previous: Plan | None,
) -> Choice:
    """Plans a fit: all ranks profile, rank 0 plans for all.

    Races of the checkpoint's plan, or of the ``previous`` one of the strategy, have corrected profile and cluster.

    Raises:
        OSDPError: a rank cannot profile, or no plan fits; raised on all ranks.
    """
    device, cluster = trainer.strategy.root_device, _measured_cluster(trainer, module, options)
    with shown_progress(is_global_zero=trainer.is_global_zero) as progress:
        profiler = FitProfiler(trainer, module, options, progress, resumed)
        profile, cluster, correction = _corrected(on_all_ranks(profiler.first), cluster, resumed, previous)
        current = common_size(profiler.loaders) or profiler.num_samples
        allowed, windows = allowed_micro_batches(trainer, options, profiler.loaders, current, profiler.why_not_mean)
        reason = None
        if options.batch_size == "auto" and len(allowed.micro_batch_sizes) > 1:  # "divide" asks for others in any case
            reason = first_text(profiler.why_not_same())
        policy = allowed if reason is None else user_policy(allowed, current, trainer.world_size, reason)
        free_bytes = cluster.memory_bytes
        assert free_bytes is not None
        if "device" not in options.search_space.states:
            rank_zero_info(
                "OSDP: the host updates all that is trained, and has what the optimizer keeps of it"
                + ("." if "device" in options.search_space.shards else ", and shards with their gradients.")
            )
        request = PlanRequest(
            cluster=cluster,
            memory_limit_bytes=_limit_bytes(options, free_bytes, device),
            host_limit_bytes=_host_limit_bytes(options, cluster, device),
            limit_varies=options.memory_limit_bytes is None,
            search_space=_search_space(options, str(trainer.precision)),
            has_host=options.offers_host_last(device),
            method=PlanMethod(
                search=options.search,
                cost_model=options.cost_model,
                blocks={block.name: "recompute" for block in profile.blocks} if options.recomputed else None,
            ),
            engine=options.engine,
            saved_plan=None if resumed is None else resumed.plan,
        )

        why_anew = ""

        def plan_for(profile: ModelProfile, policy: BatchPolicy) -> Plan:
            nonlocal why_anew
            plan, why_anew = on_rank_zero(lambda: request.plan(profile, policy, progress))
            return plan

        is_scaled = not policy.micro_batch_sizes
        fixed = None if resumed is None else _resumed_in(resumed, allowed, windows)
        sizes = (allowed if fixed else policy).micro_batch_sizes
        try:
            plan = _search_plan(partial(plan_for, profile), fixed or policy, allowed, None if fixed else reason)
            policy = fixed or policy
        except InfeasibleError as error:
            if resumed is None or fixed is None:
                raise
            if not is_scaled:
                saved = division_text(fixed.workload(fixed.micro_batch_sizes[0]))
                raise InfeasibleError(
                    f"{error} The run goes on from {resumed.path!r}, which counts in {saved}: in others, such as"
                    " batch_size= asks for, an epoch that was broken off is not continued at the same sample."
                ) from error
            rank_zero_warn(
                "OSDP: an optimizer step has fewer samples than before: micro-batches of"
                f" {fixed.micro_batch_sizes[0]} of the run that wrote the checkpoint do not fit, and the epoch that it"
                " was in is not continued at the same sample. To keep its steps, raise memory_limit, or accumulate."
            )
            plan = plan_for(profile, policy)
        nearer = _profile_nearer(profiler, profile, correction, plan.micro_batch_size, free_bytes)
        if nearer is not profile:
            plan = plan_for(nearer, policy)
    _log_plan_source(plan, request, why_anew)
    is_raced = resumed is not None and resumed.is_raced and not why_anew
    plan = with_note(replace(plan, correction=correction), device)
    if plan.micro_batch_size == policy.max_micro_batch_size:
        rank_zero_warn(
            f"OSDP: the micro-batch of {plan.micro_batch_size} is all that a rank has of the training data, so an epoch"
            " is one step. Give batch_size a number."
        )
    gain = tell_accumulation(plan, _with_user_windows(plan, windows))
    if gain:
        rank_zero_info(f"OSDP: {gain} (against your own micro-batches, each of which reduces all gradients)")
    is_unchanged = windows is None and plan.micro_batch_size == current and not is_scaled
    division = Division(None if is_unchanged else workload_of(plan), windows, sizes, profiler.peeked, is_scaled)
    later = profiler.of_later_batches(nearer, plan.micro_batch_size)
    watch = BatchWatch(profiler.batch, profiler.num_samples) if later is None else None
    return Choice(
        plan,
        division,
        None,
        profiler.groups,
        watch,
        later,
        nearer,
        cluster,
        is_raced,
        sample_elements=elements_in(profiler.batch) / max(1, profiler.num_samples),
    )


def _corrected(
    profile: ModelProfile, cluster: Cluster, resumed: Resumed | None, previous: Plan | None
) -> tuple[ModelProfile, Cluster, Correction]:
    correction = _learned(profile, cluster, resumed, previous)
    return correction.of_profile(profile), correction.of_cluster(cluster), correction


def _learned(profile: ModelProfile, cluster: Cluster, resumed: Resumed | None, previous: Plan | None) -> Correction:
    """Correction in the plan of a checkpoint, or of an earlier fit, for the same model and ranks; or none."""
    plans = [] if previous is None else [previous]
    if resumed is not None and resumed.plan is not None:
        with suppress(PlanFormatError):  # `PlanRequest` says so
            plans.insert(0, Plan.from_json(resumed.plan))
    world_size, node_size = cluster.world_size, cluster.node_size
    for plan in plans:
        differences = plan.differences(profile.fingerprint, world_size=world_size, node_size=node_size)
        if plan.correction.num_plans and not differences:
            rank_zero_info(f"OSDP: measurements are corrected by an earlier race: {tell_correction(plan.correction)}.")
            return plan.correction
    return Correction()


def _measured_cluster(trainer: pl.Trainer, module: pl.LightningModule, options: Options) -> Cluster:
    """Measures ranks and links, and logs how fast links are."""
    device = trainer.strategy.root_device
    with shown_progress(is_global_zero=trainer.is_global_zero) as progress:
        progress("measuring links and the overhead of a unit", "")
        tensors = (*module.parameters(), *module.buffers())
        model_bytes = sum(tensor.nbytes for tensor in tensors if tensor.device == device)  # made in configure_model
        cluster = measure_cluster(
            device,
            local_ranks=trainer.num_devices,
            model_bytes=model_bytes,
            node_size=options.node_size,
            hosts=host_group() if trainer.world_size > 1 else None,
            parameter_bytes=sum(parameter.nbytes for parameter in module.parameters()),
        )
    links = [("all-gather", cluster.all_gather), ("reduce-scatter", cluster.reduce_scatter)]
    if cluster.within_node is not None:
        links.append((f"all-gather in nodes of {cluster.node_size} ranks", cluster.within_node.all_gather))
    for name, link in links:
        rank_zero_info(
            f"OSDP: {name} over {cluster.backend or 'one rank'}: {format_seconds(link.latency_s)} a step of few bytes,"
            f" {format_seconds(link.seconds_per_byte * 2**20)} a MiB of many"
        )
    return cluster


def _profile_nearer(
    profiler: FitProfiler, profile: ModelProfile, correction: Correction, size: int, free_bytes: int
) -> ModelProfile:
    """Profiles again near the planned micro-batch, as `FitProfiler.nearer`; if the step fails, keeps the profile."""
    try:
        nearer = on_all_ranks(lambda: profiler.nearer(profile, size, free_bytes=free_bytes))
        return profile if nearer is profile else correction.of_profile(nearer)
    except Exception as error:  # the user's step may raise any
        raise_if_fatal(error)
        rank_zero_warn(
            f"OSDP: a micro-batch of {size} samples cannot be profiled ({type(error).__name__}: {error}). What is"
            f" planned of it follows from {profile.profiled_batch_size}."
        )
        return profile


def _resumed_in(resumed: Resumed, policy: BatchPolicy, windows: Windows | None) -> BatchPolicy | None:
    """Policy of the micro-batches that the checkpoint counts in; None where this run may not choose them."""
    saved, sizes = resumed.division, policy.micro_batch_sizes
    if windows is not None:
        workload = Division(windows=windows, sizes=sizes).resumed(saved)
        return None if workload is None else BatchPolicy.divide(workload.num_samples, (workload.micro_batch_size,))
    if sizes or saved is None or saved.micro_batch_size > (policy.max_micro_batch_size or MOST_SAMPLES):
        return None
    return BatchPolicy.fixed(saved.micro_batch_size, policy.num_micro_batches)


def _log_plan_source(plan: Plan, request: PlanRequest, why_anew: str) -> None:
    if request.saved_plan is not None and why_anew:
        rank_zero_info(f"OSDP: planned anew, not as in the checkpoint: {why_anew}.")
    elif request.saved_plan is not None:
        rank_zero_info(
            f"OSDP: training goes on under the checkpoint's plan, which is predicted to take"
            f" {format_bytes(plan.peak_bytes)} of {format_bytes(plan.memory_limit_bytes)} here."
        )
    if request.has_host and plan.search_space.states != request.search_space.states:
        rank_zero_info(
            "OSDP: nothing fits with all of it on the GPU, so that the host has states of optimizers and updates their"
            " units. Steps are slower for it than with more ranks or a larger memory_limit."
        )


def _search_plan(
    search: Callable[[BatchPolicy], Plan], policy: BatchPolicy, allowed: BatchPolicy, reason: str | None
) -> Plan:
    """Searches a plan; where the user's micro-batches stay for a reason, logs it and what others would gain."""
    if reason is None:
        return search(policy)
    divided, samples_per_s = search(allowed), 0.0
    try:
        plan = search(policy)
        samples_per_s = plan.samples_per_s
    finally:  # also where no plan fits: other micro-batches may be the remedy
        (size,), num_samples = policy.micro_batch_sizes, policy.num_samples or 0
        text = "No others are predicted to be faster"
        if divided.micro_batch_size != size:
            text = (
                "batch_size='divide', which does not look at that, makes them"
                f" {divided.micro_batch_size} x {divided.num_micro_batches}"
            )
            if samples_per_s:
                text += f", {divided.samples_per_s / samples_per_s:.3g} times the samples/s predicted"
        rank_zero_info(f"OSDP: micro-batches stay {size} x {num_samples // size}: {reason}. {text}.")
    return plan


def _with_user_windows(plan: Plan, windows: Windows | None) -> Plan:
    """Gives a plan the user's micro-batches, each of which reduces all gradients."""
    size = plan.micro_batch_size if windows is None else windows.micro_batch_size
    number = plan.micro_batch_size * plan.num_micro_batches // size
    units = tuple(unit.treated(sync="every") for unit in plan.units)
    return replace(plan, micro_batch_size=size, num_micro_batches=number, units=units)


def _limit_bytes(options: Options, free_bytes: int, device: torch.device) -> int:
    """Memory limit of every rank; logs where it comes from, or warns that it is more than there is."""
    memory_limit_bytes = options.memory_limit_bytes or round(options.memory_share * free_bytes)
    free = f"{format_bytes(free_bytes)}, the rank's share of the memory that this machine has free"
    if device.type == "cuda":
        free = (
            f"{format_bytes(free_bytes)}, what is free on the GPU, or of its share that this process may take, less"
            f" {CUDA_HEADROOM:.0%} (an assumption) for rounding and fragmentation of its allocator, which no plan"
            " counts"
        )
    if options.memory_limit_bytes is None:
        share = f"{options.memory_share:.0%} of " if options.memory_share < 1 else ""
        rank_zero_info(f"OSDP: memory_limit is {share}{free}")
    elif memory_limit_bytes > free_bytes:
        rank_zero_warn(
            f"OSDP: memory_limit is {format_bytes(memory_limit_bytes)}, more than {free}. Training may run out of"
            " memory; leave memory_limit out to plan for what is there."
        )
    return memory_limit_bytes


def _host_limit_bytes(options: Options, cluster: Cluster, device: torch.device) -> int | None:
    """Most memory of the host that a rank may take; warns if it is more than what is free.

    On CPU there is one memory, of which a part is that of the device where the user says how much.
    """
    given_bytes, free_bytes = options.host_memory_limit_bytes, cluster.host_memory_bytes
    if free_bytes is None:
        return given_bytes
    if device.type == "cpu":
        free_bytes = max(0, free_bytes - (options.memory_limit_bytes or 0))
    if given_bytes is not None and given_bytes > free_bytes:
        rank_zero_warn(
            f"OSDP: host_memory_limit is {format_bytes(given_bytes)}, more than {format_bytes(free_bytes)}, the rank's"
            " share of what is free on its machine. Training may run out of memory there."
        )
    return free_bytes if given_bytes is None else given_bytes


def _search_space(options: Options, precision: str) -> SearchSpace:
    """Search space of the user; with ``accumulate_in_fp32`` under mixed precision, each micro-batch reduces."""
    space = options.search_space
    if not options.accumulate_in_fp32 or "mixed" not in precision:
        return space
    if "every" not in space.sync:
        raise ConfigurationError(
            f"Expected 'every' in SearchSpace(sync=...) with accumulate_in_fp32=True, got {space.sync!r}. Leave out one"
            " of the two."
        )
    return replace(space, sync=("every",))
