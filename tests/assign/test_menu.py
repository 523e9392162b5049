"""What is left out of a unit's menu is of no use, whatever the other units and the limit."""

import dataclasses
import itertools
import random

import pytest

from lightning_osdp.assign import Setting, assign_modes, block_units
from lightning_osdp.assign.menu import unbeaten
from lightning_osdp.core.axes import NAMED_MODES, modes_of
from lightning_osdp.core.units import partition
from lightning_osdp.engine import FSDP2
from tests import corpus

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
