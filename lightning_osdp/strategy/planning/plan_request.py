"""Request for the plan of a fit, which is the checkpoint's where that still meets the request, or a new one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

from lightning_osdp.core.axes import STATES_CHOICES
from lightning_osdp.core.batch_policy import BatchPolicy
from lightning_osdp.core.cluster import Cluster
from lightning_osdp.core.plans.plan import Plan, workload_of
from lightning_osdp.core.plans.search_space import SearchSpace
from lightning_osdp.core.profile import ModelProfile
from lightning_osdp.core.text.byte_size import format_bytes
from lightning_osdp.core.text.progress import Progress
from lightning_osdp.errors import ConfigurationError, InfeasibleError, PlanFormatError
from lightning_osdp.planner.engine import AUTO, FSDP2
from lightning_osdp.planner.scheduler import PlanMethod, judge_plan, make_plan
from lightning_osdp.strategy.batching.division import division_text

_MEMORY_VARIATION = 1.1
"""Factor by which the free memory may differ between equal runs."""


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """Cluster, limits and search options of a plan, without profile and micro-batches."""

    cluster: Cluster
    memory_limit_bytes: int
    host_limit_bytes: int | None
    limit_varies: bool
    """True if the limit is a share of the memory that happens to be free."""
    search_space: SearchSpace
    has_host: bool
    """True if the host may have states where nothing fits else, though nobody has named it."""
    method: PlanMethod
    engine: FSDP2
    saved_plan: str | None
    """Plan of the checkpoint that the fit resumes, as JSON text; None where there is none."""

    def plan(self, profile: ModelProfile, policy: BatchPolicy, progress: Progress) -> tuple[Plan, str]:
        """Gives the checkpoint's plan, or the fastest plan and the reason why the checkpoint's is not kept.

        Raises:
            InfeasibleError: no plan fits the limit.
        """
        judged = "" if self.saved_plan is None else self._judge_saved_plan(self.saved_plan, profile, policy)
        if isinstance(judged, Plan):
            return judged, ""
        search = partial(
            make_plan,
            profile,
            self.cluster,
            memory_limit_bytes=self.memory_limit_bytes,
            host_limit_bytes=self.host_limit_bytes,
            micro_batch_size=policy,
            method=self.method,
            engine=self.engine,
            progress=progress,
        )
        try:
            return search(search_space=self.search_space), judged
        except InfeasibleError:
            if not self.has_host or profile.optimizer.host_s_per_element is None:
                raise
        return search(search_space=_with_host(self.search_space)), judged

    def _judge_saved_plan(self, text: str, profile: ModelProfile, policy: BatchPolicy) -> Plan | str:
        """Predicts a checkpoint's plan in this run; or says why the plan does not meet the request."""
        try:
            plan = Plan.from_json(text, source="the plan in the checkpoint")
            why = next(filter(None, self._differences(plan, profile, policy)), "")
            if why:
                return why
            judged = judge_plan(
                plan,
                profile,
                self.cluster,
                memory_limit_bytes=self.memory_limit_bytes,
                host_limit_bytes=self.host_limit_bytes,
            )
        except (PlanFormatError, ConfigurationError) as error:
            return str(error).removesuffix(".")
        parameter_bytes = {unit.name: unit.parameter_bytes for unit in judged.units}
        # 0 in a plan that was written by hand
        if any(unit.parameter_bytes not in (0, parameter_bytes[unit.name]) for unit in plan.units):
            return "its units gather parameters in another precision"
        for name, taken_bytes, limit_bytes in (
            ("memory_limit", judged.peak_bytes, self.memory_limit_bytes),
            ("host_memory_limit", judged.host_bytes, self.host_limit_bytes),
        ):
            if limit_bytes is not None and taken_bytes > limit_bytes:
                return (
                    f"it is predicted to take {format_bytes(taken_bytes)}, more than {name} {format_bytes(limit_bytes)}"
                )
        return judged

    def _differences(self, plan: Plan, profile: ModelProfile, policy: BatchPolicy) -> Iterator[str]:
        """Yields in what the request of a plan differs from this one, the plan's predictions aside."""
        yield plan.differences(
            profile.fingerprint, world_size=self.cluster.world_size, node_size=self.cluster.node_size
        )
        # a plan stores no activations in its search space where the user chose the blocks
        search_space, blocks = self.search_space, self.method.blocks
        search_space = search_space if blocks is None else replace(search_space, activations=("keep",))
        used_space = plan.search_space
        if search_space.modes is None and used_space.modes == search_space.offered_modes:
            used_space = replace(used_space, modes=None)  # an older plan stores these where nobody has named any
        if self.has_host and used_space == _with_host(search_space):
            used_space = search_space
        size = plan.micro_batch_size
        if size not in policy.micro_batch_sizes or policy.workload(size) != workload_of(plan):
            yield f"it is for {division_text(workload_of(plan))}, and training goes on in others"
        for name, used, requested in (
            ("search", plan.solver or self.method.search, self.method.search),
            ("cost_model", plan.cost_model, self.method.cost_model),
            ("backward_prefetch", plan.backward_prefetch, self.engine.backward_prefetch),
            ("forward_prefetch", plan.forward_prefetch, self.engine.forward_prefetch),
            ("activation_checkpointing_policy", plan.given_blocks, blocks or {}),
            ("search_space", used_space, search_space),
        ):
            if requested not in (AUTO, used):
                yield f"{name} is another one than it was made with"
        used_bytes = plan.memory_limit_bytes
        if self.memory_limit_bytes > used_bytes * (_MEMORY_VARIATION if self.limit_varies else 1):
            yield (
                f"memory_limit {format_bytes(self.memory_limit_bytes)} is larger than {format_bytes(used_bytes)}, which"
                " it was made for"
            )


def _with_host(space: SearchSpace) -> SearchSpace:
    """The space with the host among the places of states; shards were not trained there on a GPU yet."""
    return replace(space, states=STATES_CHOICES)
