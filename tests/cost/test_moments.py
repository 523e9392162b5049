"""Every moment of a step, in order; how large each is, `test_peak_memory` works out."""

from itertools import product

import pytest

from lightning_osdp.core.modes import DP, ZDP
from lightning_osdp.core.units import partition
from lightning_osdp.cost import Workload, memory_over_step, peak_memory


def over_step(model, modes, **options):
    profile = model(40, 80, 120)
    chosen = [DP, *({"D": DP, "Z": ZDP}[letter] for letter in modes)]
    given = (profile, partition(profile, min_unit_bytes=0), chosen)
    options = {"world_size": 2, "workload": Workload(micro_batch_size=2), **options}
    return memory_over_step(*given, **options), peak_memory(*given, **options)


# base 120 + 240 = 360, s = 20, 40, 60; no activations
def test_moments_come_in_order(model):
    moments, _ = over_step(model, "ZDZ", backward_prefetch="none")
    assert [(m.phase, m.operator, m.num_bytes) for m in moments] == [
        ("forward", "m0", 480 + 40),
        ("forward", "m1", 480 + 80),
        ("forward", "m2", 480 + 80 + 120),
        ("forward", "", 480 + 80),
        ("backward", "", 360 + 80),
        ("backward", "m2", 360 + 80 + 120 + 120),
        ("backward", "m2", 360 + 80 + 120 + 120 + 120),
        ("reduce-scatter", "m2", 360 + 80 + 120 + 120 + 60),
        ("backward", "m1", 360 + 60 + 80 + 80),
        ("backward", "m1", 360 + 60 + 80 + 80 + 80),
        ("reduce-scatter", "m1", 360 + 60 + 80 + 80 + 40),
        ("backward", "m0", 360 + 100 + 40 + 40),
        ("backward", "m0", 360 + 100 + 40 + 40 + 40),
        ("reduce-scatter", "m0", 360 + 100 + 40 + 40 + 20),
        # the root holds nothing
        ("backward", "m0", 480),
        ("reduce-scatter", "m0", 480),
        ("optimizer step", "", 480),
    ]
    assert all(sum(m.parts.values()) == pytest.approx(m.num_bytes) for m in moments)


@pytest.mark.parametrize("modes", [*map("".join, product("ZD", repeat=3))])
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("prefetch", [{}, {"backward_prefetch": "post"}, {"forward_prefetch": True}])
def test_the_largest_moment_is_the_peak(model, modes, world_size, prefetch):
    moments, peak = over_step(model, modes, world_size=world_size, **prefetch)
    largest = max(moment.num_bytes for moment in moments)
    assert largest == pytest.approx(peak.peak_bytes)
    assert (peak.phase, peak.operator) in [(m.phase, m.operator) for m in moments if m.num_bytes == largest]
