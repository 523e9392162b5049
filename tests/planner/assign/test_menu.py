"""Options left out of a unit's menu are of no use, whatever the other units and the limit."""

import dataclasses
import itertools
import random

import pytest

from lightning_osdp.core.axes import DP, NAMED_MODES, REPLICATED, RESIDENT, ZDP, modes_of
from lightning_osdp.core.cluster import Cluster, UnitOverhead
from lightning_osdp.core.units import partition
from lightning_osdp.planner.assign import Setting, assign_modes, block_units
from lightning_osdp.planner.assign.menu import unbeaten
from lightning_osdp.planner.cost import Workload
from lightning_osdp.planner.engine import FSDP2
from lightning_osdp.planner.simulation import simulate_step
from tests.support import corpus
from tests.support.steps import SLOW, filled_beside_all, numbers_of_all

MOST_ASSIGNMENTS = 4000


def test_what_another_one_beats_in_every_number_is_left_out_and_of_equal_ones_the_first_stays():
    assert unbeaten([]) == ()
    assert unbeaten([(1.0, 1.0)] * 3) == (0,)
    assert unbeaten([(3.0, 0.0), (1.0, 8.0), (2.0, 8.0), (2.0, 7.0), (4.0, 0.0)]) == (0, 1, 3)


def small(seed):
    """A setting of few different units with all that there is to choose, whose assignments can all be tried."""
    draw = random.Random(seed)
    while True:
        profile = corpus.draw_profile(draw, most_blocks=2)
        cluster = dataclasses.replace(corpus.draw_cluster(draw), world_size=8, node_size=draw.choice([None, 4]))
        setting = Setting(
            profile=profile,
            units=partition(profile, min_unit_bytes=draw.choice([0, 50_000])),
            cluster=cluster,
            workload=corpus.draw_workload(draw),
            modes=modes_of([*NAMED_MODES]),
            engine=FSDP2(backward_prefetch="none"),
        )
        found = [setting, *block_units(setting, ("keep", "recompute", "offload"))][-1]
        num = 1
        for options in found.costs.options:
            num *= len(options)
        if 100 < num <= MOST_ASSIGNMENTS:
            return found


def test_menus_are_shorter_than_what_is_offered():
    settings = [small(seed) for seed in range(4)]
    assert sum(len(menu) for found in settings for menu in found.costs.menus) < 0.8 * sum(
        len(options) for found in settings for options in found.costs.options
    )


@pytest.mark.parametrize("seed", range(10))
def test_nothing_better_is_lost_with_what_menus_leave_out(seed):
    found = small(seed)
    costs = found.costs
    assert all(set(menu) <= set(options) for menu, options in zip(costs.menus, costs.options, strict=True))
    every = [(costs.peak(modes).peak_bytes, costs.step_time_s(modes)) for modes in itertools.product(*costs.options)]
    least, most = (of(peak for peak, _ in every) for of in (min, max))
    for share in (0.0, 0.1, 0.3, 0.6, 1.0):
        limit_bytes = int(least + share * (most - least))
        fastest_s = min(time_s for peak, time_s in every if peak <= limit_bytes)
        assigned = assign_modes(found, memory_limit_bytes=limit_bytes)
        if assigned is None:  # the closed form left something out
            assert costs.exact_peak(costs.least_memory_modes).peak_bytes > limit_bytes
            continue
        assert assigned.bound_s <= fastest_s * (1 + 1e-9)
        if not found.overlaps and costs.exact_peak(assigned.modes).peak_bytes == assigned.peak.peak_bytes:
            best_s = min(
                time_s
                for modes in itertools.product(*costs.menus)
                if costs.peak(modes).peak_bytes <= limit_bytes
                for time_s in [costs.step_time_s(modes)]
            )
            assert best_s == pytest.approx(fastest_s, rel=1e-9)


def based(setting, *, overlaps=False, num_micro_batches=1, frozen=(800, 1600, 400)):
    """A model of frozen operators with a small trained one behind each."""
    sizes = {"frozen": frozen, "trained": (80, 40, 40)}
    operators = [
        {"name": f"{kind}{index}", "parameter_bytes": sizes[kind][index], "frozen": kind == "frozen"}
        | {"activation_bytes_per_sample": 100, "forward_s_per_sample": 0.1}
        for index in range(3)
        for kind in sizes
    ]
    return setting(
        operators=operators,
        cluster=Cluster(world_size=2, all_gather=SLOW, reduce_scatter=SLOW, overlaps=overlaps),
        workload=Workload(micro_batch_size=1, num_micro_batches=num_micro_batches),
        modes=modes_of([*NAMED_MODES]),
        engine=FSDP2(backward_prefetch="none"),
    )


def test_what_is_resident_is_gathered_in_no_step_and_is_there_at_every_moment(setting):
    for num_micro_batches in (1, 3):
        found = based(setting, num_micro_batches=num_micro_batches)
        kept = [DP if unit.is_root else ZDP for unit in found.units]
        base = [
            RESIDENT if unit.name.startswith("frozen") else mode for unit, mode in zip(found.units, kept, strict=True)
        ]
        estimate, without = (simulate_step(found, modes, engine=found.engine) for modes in (base, kept))
        assert without.communication_s - estimate.communication_s == pytest.approx(
            SLOW.ring_s(800, 2) * num_micro_batches
            + 2 * num_micro_batches * (SLOW.ring_s(1600, 2) + SLOW.ring_s(400, 2))
        )
        least = {min(moment.parts["gathered parameters"] for _, moment in each.moments) for each in (estimate, without)}
        assert least == {2800.0, 0.0}
        # the last one is gathered beside its buffer; without, the largest is
        assert estimate.evaluation_bytes - without.evaluation_bytes == 2800 + 400 - 2 * 1600
        assert found.costs.memory.peak(base).peak_bytes >= found.costs.exact_peak(base).peak_bytes
        assert found.costs.exact_peak(base) == estimate.peak


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("num_micro_batches", [1, 3])
def test_frozen_units_are_resident_as_far_as_memory_allows(setting, overlaps, num_micro_batches):
    # to gather one unit takes as much as two that are resident
    found = based(setting, overlaps=overlaps, num_micro_batches=num_micro_batches, frozen=(800, 800, 800))
    found = dataclasses.replace(found, modes=modes_of(["ZDP", "DP", "resident"]))
    costs, numbers = found.costs, set()
    offered = [{mode.name for mode in options} for options in costs.options[1:]]
    assert offered == [{"ZDP", "DP", "resident"}, {"ZDP", "DP"}] * 3
    every = numbers_of_all(costs, costs.menus)
    sizes = [peak_bytes for _, peak_bytes in every]
    for limit_bytes in range(min(sizes), max(sizes) + 500, 100):
        filled = filled_beside_all(found, every, limit_bytes)
        if filled is not None:
            numbers.add([mode.name for mode in filled.modes].count("resident"))
    assert {3} < numbers  # and fewer under lower limits


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("num_micro_batches", [1, 3])
def test_trained_units_are_whole_on_each_rank_as_far_as_memory_allows(setting, overlaps, num_micro_batches):
    found = based(setting, overlaps=overlaps, num_micro_batches=num_micro_batches)
    overhead = {"gather": UnitOverhead(fixed_s=1e4)}
    cluster = dataclasses.replace(found.cluster, unit_overhead=overhead)
    found = dataclasses.replace(found, cluster=cluster, modes=modes_of(["ZDP", "replicated"]))
    costs, numbers = found.costs, set()
    offered = [{mode.name for mode in options} for options in costs.options[1:]]
    assert offered == [{"ZDP"}, {"ZDP", "replicated"}] * 3
    every = numbers_of_all(costs, costs.menus)
    for modes in itertools.product(*costs.options):
        assert costs.peak(modes).peak_bytes >= costs.exact_peak(modes).peak_bytes
    sizes = [peak_bytes for _, peak_bytes in every]
    for limit_bytes in range(min(sizes), max(sizes) + 500, 20):
        filled = filled_beside_all(found, every, limit_bytes)
        if filled is not None:
            numbers.add([mode.name for mode in filled.modes].count("replicated"))
    assert {0, 3} < numbers


def test_a_unit_that_is_cast_is_not_whole_on_each_rank(setting):
    found = setting(
        operators=[{"name": "0", "parameter_bytes": 800, "gathered_bytes": 400}],
        cluster=Cluster(world_size=2, all_gather=SLOW, reduce_scatter=SLOW),
        workload=Workload(micro_batch_size=1),
        modes=modes_of(["ZDP", "replicated"]),
    )
    assert {mode.name for options in found.costs.options[1:] for mode in options} == {"ZDP"}


def test_gradients_of_what_is_whole_on_each_rank_are_all_reduced(setting):
    found = based(setting, num_micro_batches=3)
    for sync, number in (("every", 3), ("last", 1)):
        whole, sharded = (
            [mode if unit.gradient_bytes else DP if unit.is_root else RESIDENT for unit in found.units]
            for mode in (REPLICATED.but(sync=sync), ZDP.but(sync="every"))
        )
        estimate, other = (simulate_step(found, modes, engine=found.engine) for modes in (whole, sharded))
        reduced_s = sum(SLOW.ring_s(num_bytes, 2) for num_bytes in (80, 40, 40))
        assert estimate.communication_s == pytest.approx(2 * number * reduced_s)
        assert other.communication_s > estimate.communication_s
        # no shard of it, no buffer, and all of its gradients are held
        parts = [moment.parts for _, moment in estimate.moments]
        assert {each["parameter shards"] + each["gathered parameters"] for each in parts[8:]} == {2800.0 + 160.0}
