"""Planning again under other circumstances: ranks, links, memory and batches; and what a bit more memory saves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from lightning_osdp.core.batch_policy import BatchPolicy
from lightning_osdp.core.cluster import MOST_RANKS, Cluster
from lightning_osdp.core.plans.plan import Plan
from lightning_osdp.core.profile import ModelProfile
from lightning_osdp.errors import ConfigurationError, InfeasibleError
from lightning_osdp.planner.scheduler import make_plan, method_of


@dataclass(frozen=True, kw_only=True)
class Case:
    """Circumstances, and the best plan in them."""

    world_size: int
    link_rate: float
    """Bytes/s of the links over those that were measured; latencies are as measured."""
    memory_limit_bytes: int
    micro_batch_size: int
    num_micro_batches: int
    plan: Plan | None
    """Best plan; None where nothing fits."""
    why_not: str = ""
    """Text of the error that says what would fit."""


def what_if(
    profile: ModelProfile,
    cluster: Cluster,
    *,
    memory_limits_bytes: Sequence[int],
    micro_batch_sizes: Sequence[int],
    world_sizes: Sequence[int] = (),
    link_rates: Sequence[float] = (1.0,),
    num_micro_batches: int = 1,
) -> list[Case]:
    """The best plan in every combination of circumstances, with everything to choose from.

    Args:
        profile: of the model.
        cluster: as it was measured.
        memory_limits_bytes: most bytes of live tensors on one rank.
        micro_batch_sizes: samples per rank and micro-batch.
        world_sizes: numbers of ranks; none: the cluster's own. Latency per ring step and bytes/s stay as measured;
            those inside of a node where all ranks fit in one.
        link_rates: bytes/s of all links over those that were measured.
        num_micro_batches: of an optimizer step.

    Raises:
        ConfigurationError: a number below 1, a rate that is not positive, or links that were not measured.
    """
    world_sizes = world_sizes or (cluster.world_size,)
    if min(world_sizes) < 1 or max(world_sizes) > MOST_RANKS or not all(0 < rate < math.inf for rate in link_rates):
        raise ConfigurationError(
            f"Expected at least one rank, at most 2^20, and links with a positive rate, got {[*world_sizes]} and"
            f" {[*link_rates]}."
        )
    if cluster.world_size == 1 < max(world_sizes):
        raise ConfigurationError(
            f"Expected a cluster whose links were measured for {max(world_sizes)} ranks, got that of one rank. Measure"
            " it in a run with at least two."
        )
    cases = []
    for ranks, rate, memory, batch in product(world_sizes, link_rates, memory_limits_bytes, micro_batch_sizes):
        plan, why_not = None, ""
        try:
            plan = make_plan(
                profile,
                cluster.as_if(ranks, link_rate=rate),
                memory_limit_bytes=memory,
                micro_batch_size=BatchPolicy.fixed(batch, num_micro_batches),
            )
        except InfeasibleError as error:
            why_not = str(error)
        cases.append(
            Case(
                world_size=ranks,
                link_rate=rate,
                memory_limit_bytes=memory,
                micro_batch_size=batch,
                num_micro_batches=num_micro_batches,
                plan=plan,
                why_not=why_not,
            )
        )
    return cases


@dataclass(frozen=True, kw_only=True)
class Price:
    """Seconds that more memory saves between two plans in the same micro-batches, searched alike."""

    more_bytes: int
    step_time_s: float
    """Seconds of an optimizer step under the limit as it is."""
    with_more_s: float
    saves: float
    """Fraction of the step time."""


def memory_price(plan: Plan, profile: ModelProfile, cluster: Cluster, *, more_bytes: int | None = None) -> Price:
    """Plans anew under a plan's limit and under a larger one, in its micro-batches, from what it was chosen from.

    Prefetching is chosen, too.

    Args:
        plan: whose limit, micro-batches, search space, solver and cost model.
        profile: of its model.
        cluster: of as many ranks.
        more_bytes: above the limit; None: a power of two, from a sixteenth to an eighth of the limit.

    Raises:
        InfeasibleError: nothing fits under the plan's own limit.
    """
    limit_bytes = plan.memory_limit_bytes
    more_bytes = more_bytes or 2 ** max(0, (limit_bytes // 8).bit_length() - 1)
    now, then = (_planned_anew(plan, profile, cluster, limit_bytes + more) for more in (0, more_bytes))
    return Price(
        more_bytes=more_bytes,
        step_time_s=now.step_time_s,
        with_more_s=then.step_time_s,
        saves=1 - then.step_time_s / now.step_time_s,
    )


def _planned_anew(plan: Plan, profile: ModelProfile, cluster: Cluster, memory_limit_bytes: int) -> Plan:
    return make_plan(
        profile,
        cluster,
        memory_limit_bytes=memory_limit_bytes,
        host_limit_bytes=plan.host_limit_bytes,
        micro_batch_size=BatchPolicy.fixed(plan.micro_batch_size, plan.num_micro_batches),
        search_space=plan.search_space,
        method=method_of(plan),
    )
