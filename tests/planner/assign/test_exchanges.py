"""Units that may move activations, among others: against brute force, and simulated."""

import dataclasses
import itertools
import random

import pytest

from lightning_osdp.core.axes import DP, NODE_STATIONARY, STATIONARY, ZDP, modes_of
from lightning_osdp.core.units import partition
from lightning_osdp.planner.assign import Setting, assign_modes
from lightning_osdp.planner.assign.paths import Paths
from lightning_osdp.planner.cost import exact_peak, step_memory
from lightning_osdp.planner.engine import effects_of
from lightning_osdp.planner.simulation import simulate_step
from tests.support import corpus
from tests.support.tiers import but_slow

MOST_ASSIGNMENTS = 3000


def drawn(draw, *, most_blocks=2, world_sizes=(2, 4, 8), prefetch=None, in_nodes=False):
    """A setting in which some units may move activations, over all ranks or those of a node."""
    while True:
        profile = corpus.with_exchanges(draw, corpus.draw_profile(draw, most_blocks=most_blocks))
        profile = dataclasses.replace(profile, blocks=())
        cluster = corpus.draw_cluster(draw)
        if not in_nodes:
            cluster = dataclasses.replace(
                cluster, world_size=draw.choice(world_sizes), node_size=None, within_node=None
            )
        elif not cluster.has_nodes:
            continue
        units = partition(profile, min_unit_bytes=0)
        engine = corpus.draw_engine(draw, [unit.name for unit in units])
        if prefetch is not None:
            engine = dataclasses.replace(engine.all_ahead, backward_prefetch=prefetch, forward_prefetch=False)
        setting = Setting(
            profile=profile,
            units=units,
            cluster=cluster,
            workload=corpus.draw_workload(draw),
            modes=modes_of(["ZDP", "DP", "stationary", *(["HSDP", "node_stationary"] if in_nodes else [])]),
            engine=engine,
        )
        if sum(STATIONARY in options for options in setting.costs.options) > 1:
            return setting


def some_modes(draw, setting):
    return tuple(draw.choice(options) for options in setting.costs.options)


DRAWN = [*((seed, False) for seed in range(40)), *((seed, True) for seed in range(20))]


@pytest.mark.parametrize(("seed", "in_nodes"), DRAWN)
def test_clock_closed_forms_and_the_simulated_step_agree(seed, in_nodes):
    draw = random.Random(seed)
    found = drawn(draw, in_nodes=in_nodes)
    for _ in range(3):
        modes = some_modes(draw, found)
        estimate = simulate_step(found, modes, engine=found.engine)
        assert found.costs.clock.step(modes).time_s == pytest.approx(estimate.time_s, rel=1e-9)
        assert found.costs.step_time_s(modes) == pytest.approx(estimate.time_s, rel=1e-9)
        assert found.costs.exact_peak(modes) == estimate.peak
        assert all(num_bytes > -1e-6 for _, moment in estimate.moments for num_bytes in moment.parts.values())
        if found.overlaps:
            assert Paths(found).least_s() <= estimate.time_s * (1 + 1e-9)


@pytest.mark.parametrize(("seed", "in_nodes"), DRAWN)
def test_every_path_is_a_bound_on_all_modes(seed, in_nodes):
    draw = random.Random(seed)
    found = drawn(draw, in_nodes=in_nodes)
    found = dataclasses.replace(found, cluster=dataclasses.replace(found.cluster, overlaps=True))
    paths = Paths(found)
    chosen = [tuple(draw.choice(options) for options in found.costs.menus) for _ in range(12)]
    for modes in chosen[:4]:
        path = paths.at(paths.longest(modes))
        assert all(path.time_s(others) <= found.costs.step_time_s(others) * (1 + 1e-9) for others in chosen)
    for mean in paths.means:
        assert all(mean.time_s(others) <= found.costs.step_time_s(others) * (1 + 1e-9) for others in chosen)
    assert all(paths.least_s() <= found.costs.step_time_s(others) * (1 + 1e-9) for others in chosen)


@pytest.mark.parametrize("seed", but_slow(range(12), slow=[5, 11]))  # which are searched longest
def test_modes_fit_and_are_the_fastest_that_do_where_nothing_overlaps(seed):
    draw = random.Random(seed)
    while True:
        found = drawn(draw, most_blocks=1, prefetch="none")
        found = dataclasses.replace(found, cluster=dataclasses.replace(found.cluster, overlaps=False))
        every = list(itertools.product(*found.costs.options))
        if len(every) <= MOST_ASSIGNMENTS:
            break
    costs = found.costs
    judged = [(modes, costs.peak(modes).peak_bytes, costs.step_time_s(modes)) for modes in every]
    least, most = (of(peak for _, peak, _ in judged) for of in (min, max))
    for share in (0.0, 0.2, 0.5, 1.0):
        limit_bytes = int(least + share * (most - least))
        assigned = assign_modes(found, memory_limit_bytes=limit_bytes)
        fastest_s = min(time_s for _, peak, time_s in judged if peak <= limit_bytes)
        if assigned is None:  # the closed form left something out
            assert costs.exact_peak(costs.least_memory_modes).peak_bytes > limit_bytes
            continue
        assert assigned.bound_s <= fastest_s * (1 + 1e-9)
        assert costs.exact_peak(assigned.modes).peak_bytes <= limit_bytes
        fits_exactly = [
            time_s
            for modes, peak, time_s in judged
            if peak <= limit_bytes and costs.exact_peak(modes).peak_bytes <= limit_bytes
        ]
        fastest, _, _ = min(judged, key=lambda each: (each[1] > limit_bytes, each[2]))
        if costs.exact_peak(fastest).peak_bytes <= limit_bytes:
            assert assigned.step_time_s == pytest.approx(min(fits_exactly), rel=1e-9)


@pytest.mark.parametrize("seed", [20, 27])
def test_single_units_are_tried_the_other_way_where_something_overlaps(seed):
    found = drawn(random.Random(seed), most_blocks=1)
    found = dataclasses.replace(found, cluster=dataclasses.replace(found.cluster, overlaps=True))
    assigned = assign_modes(found, memory_limit_bytes=2**60)
    best_s = min(map(found.costs.step_time_s, itertools.product(*found.costs.options)))
    assert assigned.step_time_s == pytest.approx(best_s, rel=1e-3)


@pytest.mark.parametrize(
    ("seed", "mode"), [*((seed, STATIONARY) for seed in range(30)), *((seed, NODE_STATIONARY) for seed in range(15))]
)
def test_where_it_is_known_what_moves_the_closed_form_counts_it_and_bounds_the_peak(seed, mode):
    draw = random.Random(seed)
    found = drawn(draw, prefetch="none", in_nodes=mode == NODE_STATIONARY)
    may = [unit.name for unit, options in zip(found.units, found.costs.options, strict=True) if mode in options]
    moving = dataclasses.replace(found, moving=frozenset(may[::2]), moving_mode=mode)
    for _ in range(3):
        modes = tuple(
            mode
            if unit.name in moving.moving
            else draw.choice([each for each in options if not effects_of(each).exchanges])
            for unit, options in zip(moving.units, moving.costs.options, strict=True)
        )
        exact = exact_peak(moving, modes, engine=moving.engine).peak_bytes
        assert exact <= moving.costs.peak(modes).peak_bytes
        assert all(each in options for each, options in zip(modes, moving.costs.options, strict=True))


def test_weights_that_are_never_gathered_need_not_fit(model, operator):
    big = operator("big", 40_000)
    profile = model(operator("first", 400), big, operator("last", 400))
    exchange = corpus.Exchange("row", ("big",), *(corpus.Affine(0.0, 40.0),) * 4)
    profile = dataclasses.replace(profile, exchanges=(exchange,))
    link = corpus.Link(latency_s=0.0, seconds_per_byte=1.0)
    found = Setting(
        profile=profile,
        units=partition(profile, min_unit_bytes=0),
        cluster=corpus.Cluster(world_size=4, all_gather=link, reduce_scatter=link),
        workload=corpus.Workload(micro_batch_size=1),
        modes=modes_of(["ZDP", "DP", "stationary"]),
    )
    moving = dataclasses.replace(found, moving=frozenset(["big"]))
    # shards, states and gradients of a quarter, and something for the others: gathered, it takes all of 40,000 twice
    assert moving.costs.least_bytes < 55_000
    assert found.costs.least_bytes > 90_000
    assigned = assign_modes(moving, memory_limit_bytes=55_000)
    assert assigned.modes == (DP, DP, STATIONARY, DP)
    assert assigned.peak.peak_bytes == exact_peak(moving, assigned.modes).peak_bytes <= 55_000
    assert step_memory(found).peak((DP, ZDP, ZDP, ZDP)).peak_bytes > 90_000
