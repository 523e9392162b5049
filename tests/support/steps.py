"""Steps to be judged, by ranks whose links take no time or in nodes, and assignments and plans beside all there are."""

import itertools
import math

import pytest

from lightning_osdp.core.cluster import Cluster, Link, Links
from lightning_osdp.core.step import Step, Workload
from lightning_osdp.core.units import partition
from lightning_osdp.errors import InfeasibleError
from lightning_osdp.planner.assign import assign_modes, fill_spare
from lightning_osdp.planner.scheduler import make_plan

FREE = Link(latency_s=0.0, seconds_per_byte=0.0)
SLOW, FAST = (Link(latency_s=0.0, seconds_per_byte=s_per_byte) for s_per_byte in (1e-3, 1e-6))
TWO_NODES = Cluster(
    world_size=8,
    all_gather=SLOW,
    reduce_scatter=SLOW,
    node_size=4,
    within_node=Links(all_gather=FAST, reduce_scatter=FAST, all_reduce=FAST),
)


def step_of(profile, *, world_size=2, micro_batch_size=1, num_micro_batches=1, reduce_scatter_copies=True):
    """A step in units of one operator."""
    return Step(
        profile=profile,
        units=partition(profile, min_unit_bytes=0),
        cluster=Cluster(
            world_size=world_size,
            all_gather=FREE,
            reduce_scatter=FREE,
            reduce_scatter_copies=reduce_scatter_copies,
        ),
        workload=Workload(micro_batch_size=micro_batch_size, num_micro_batches=num_micro_batches),
    )


def numbers_of_all(costs, options):
    """Seconds and exact peaks of all assignments of these options."""
    return [(costs.step_time_s(modes), costs.exact_peak(modes).peak_bytes) for modes in itertools.product(*options)]


def filled_beside_all(found, assignments, limit_bytes, *, times_best=math.inf, **how):
    """Assigns and fills within a limit, which it keeps; None where the closed form of the peak allows nothing.

    The assignment is no faster than the best of all assignments that fit, and takes at most ``times_best`` as long.
    """
    assigned = assign_modes(found, memory_limit_bytes=limit_bytes, **how)
    if assigned is None:  # the closed form is a bound
        assert found.costs.least_bytes > limit_bytes
        return None
    filled = fill_spare(assigned, memory_limit_bytes=limit_bytes)
    assert found.costs.exact_peak(assigned.modes).peak_bytes <= limit_bytes
    assert filled.peak == found.costs.exact_peak(filled.modes)
    assert filled.peak.peak_bytes <= limit_bytes
    best_s = min(time_s for time_s, peak_bytes in assignments if peak_bytes <= limit_bytes)
    assert best_s * (1 - 1e-9) <= filled.step_time_s <= times_best * best_s
    assert assigned.bound_s <= assigned.step_time_s * (1 + 1e-9)
    return filled


def filled_at_shares(found, search):
    """Yields what `filled_beside_all` does under limits from below the least peak of all assignments to the largest."""
    assignments = numbers_of_all(found.costs, found.costs.options)
    least, most = (of(peak for _, peak in assignments) for of in (min, max))
    for share in (-0.01, 0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 1.0):
        limit_bytes = int(least + share * (most - least))
        filled = filled_beside_all(found, assignments, limit_bytes, times_best=1.1, search=search)
        assert share >= 0 or filled is None
        if filled is not None:
            yield filled


def plans_within_limits(found, space, shares, rooms):
    """Plans below both limits, each with the seconds of the fastest assignment that keeps these.

    Limits of the device are the least peak of all assignments and shares of what the largest one has beyond it; rooms
    are limits of the host's bytes, the largest of which has room for everything.
    """
    costs = found.costs
    assignments = [
        (*numbers, costs.host_bytes(modes))
        for numbers, modes in zip(numbers_of_all(costs, costs.options), itertools.product(*costs.options), strict=True)
    ]
    least, most = (of(peak for _, peak, _ in assignments) for of in (min, max))
    for share, room_bytes in itertools.product(shares, rooms):
        limit_bytes = int(least + share * (most - least))
        fitting = [time_s for time_s, peak, host in assignments if peak <= limit_bytes and host <= room_bytes]
        limits = {"memory_limit_bytes": limit_bytes, "host_limit_bytes": room_bytes}
        options = {"micro_batch_size": 1, "search_space": space, "engine": found.engine}
        if not fitting:
            with pytest.raises(InfeasibleError, match="are lacking" if room_bytes < max(rooms) else "No plan fits"):
                make_plan(found.profile, found.cluster, **limits, **options)
            continue
        plan = make_plan(found.profile, found.cluster, **limits, **options)
        assert plan.peak_bytes <= limit_bytes
        assert plan.host_bytes <= room_bytes
        assert min(fitting) * (1 - 1e-9) <= plan.step_time_s <= 1.05 * min(fitting)
        assert plan.samples_per_s * (1 + plan.gap) >= 2 / min(fitting) * (1 - 1e-9)
        yield plan, min(fitting)
