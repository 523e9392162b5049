"""Moments of a step, in order; `test_peak_memory` works out how large each is."""

from dataclasses import replace
from itertools import product

import pytest

from lightning_osdp.core.affine import Affine
from lightning_osdp.core.axes import DP, ZDP
from lightning_osdp.core.profile import ParameterProfile
from lightning_osdp.planner.cost import exact_peak, step_memory
from lightning_osdp.planner.engine import FSDP2
from lightning_osdp.planner.simulation import simulate_step
from tests.support.steps import step_of


def over_step(model, cluster, modes, *, world_size=2, **options):
    profile = model(40, 80, 120)
    chosen = [DP, *({"D": DP, "Z": ZDP}[letter] for letter in modes)]
    step = replace(step_of(profile, micro_batch_size=2), cluster=cluster(world_size))
    estimate = simulate_step(step, chosen, **options)
    closed_form = step_memory(step, **options).peak(chosen)
    exact = exact_peak(step, chosen, **options)
    assert estimate.peak == exact
    assert exact.peak_bytes <= closed_form.peak_bytes
    return [moment for _, moment in estimate.moments], exact


# base 120 + 240 = 360, s = 20, 40, 60; no activations; to reduce P takes 2 P + P / 2, and P that gloo copies
def test_moments_come_in_order(model, cluster):
    moments, _ = over_step(model, cluster, "ZDZ", engine=FSDP2(backward_prefetch="none"))
    assert [(m.phase, m.operator, m.num_bytes) for m in moments] == [
        ("forward", "m0", 480),  # the root holds nothing
        ("forward", "m0", 480 + 2 * 40),  # copied out of the buffer
        ("forward", "m0", 480 + 40),
        ("forward", "m1", 480 + 2 * 80),
        ("forward", "m1", 480 + 80),
        ("forward", "m2", 480 + 80 + 2 * 120),
        ("forward", "m2", 480 + 80 + 120),
        ("forward", "", 480 + 80),
        ("backward", "", 360 + 80),
        ("backward", "m2", 360 + 80 + 2 * 120),
        ("backward", "m2", 360 + 80 + 120 + 120),
        ("backward", "m2", 360 + 80 + 120 + 120),  # freed, and gradients in one tensor
        ("reduce-scatter", "m2", 360 + 80 + 120 + 120 + 60 + 120),
        ("backward", "m2", 360 + 80 + 120 + 120 + 60 + 120),
        # bytes that m2 has sent, and receives meanwhile, live until m1 reduces
        ("backward", "m1", 360 + 60 + 80 + 80 + 240),
        ("backward", "m1", 360 + 60 + 80 + 80),
        ("reduce-scatter", "m1", 360 + 60 + 80 + 80 + 40 + 80),
        ("backward", "m1", 360 + 60 + 80 + 80 + 40 + 80),
        ("backward", "m0", 360 + 100 + 2 * 40 + 160),
        ("backward", "m0", 360 + 100 + 40 + 40 + 160),
        ("backward", "m0", 360 + 100 + 40 + 40),
        ("reduce-scatter", "m0", 360 + 100 + 40 + 40 + 20 + 40),
        ("backward", "m0", 360 + 100 + 40 + 40 + 20 + 40),
        ("optimizer step", "", 480),
    ]
    assert all(sum(m.parts.values()) == pytest.approx(m.num_bytes) for m in moments)


def test_a_gather_that_casts_its_shard_finds_what_was_handed_on(model, operator, cluster):
    halves = [
        operator(
            f"m{i}",
            160,
            gathered_bytes=80,
            gradient_bytes=80,
            parameters=(ParameterProfile(position=i, num_elements=40, itemsize=4, gathered_itemsize=2),),
        )
        for i in range(2)
    ]
    profile = model(*halves)
    first, *others = profile.segments
    profile = replace(profile, segments=(replace(first, handed_bytes=Affine(0.0, 7.0)), *others))
    step = replace(step_of(profile, micro_batch_size=2), cluster=cluster(2))
    estimate = simulate_step(step, [DP, ZDP, ZDP])
    forward = [(m.operator, m.num_bytes) for _, m in estimate.moments if m.phase == "forward"]
    base = 160 + 160  # shards and reduced gradients
    assert forward == [
        ("m0", base),
        ("m0", base + 80 + 40),  # the buffer, and the shard in half precision
        ("m0", base + 2 * 80),
        ("m0", base + 80),
        ("m1", base + 80 + 40 + 2 * 7),
        ("m1", base + 2 * 80 + 2 * 7),
        ("m1", base + 80),
        ("", base),
    ]


@pytest.mark.parametrize("modes", [*map("".join, product("ZD", repeat=3))])
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    "settings", [{}, {"backward_prefetch": "none"}, {"forward_prefetch": True}, {"asynchronous_unshard": False}]
)
def test_the_largest_moment_is_the_peak(model, cluster, modes, world_size, settings):
    moments, peak = over_step(model, cluster, modes, world_size=world_size, engine=FSDP2(**settings))
    largest = max(moment.num_bytes for moment in moments)
    assert largest == pytest.approx(peak.peak_bytes)
    assert (peak.phase, peak.operator) in [(m.phase, m.operator) for m in moments if m.num_bytes == largest]


@pytest.mark.parametrize(
    ("settings", "modes", "expected"),
    [
        # while m2 reduces: 360, what it sends and the copy of that, its last gradient, and its half of the sum;
        # buffers of m1 and m2 while m2 is copied out in forward; all reduced gradients
        ({"asynchronous_unshard": False, "backward_prefetch": "none"}, "ZZZ", (360 + 3 * 120 + 60, 80 + 120, 120)),
        ({"asynchronous_unshard": True, "backward_prefetch": "none"}, "ZZZ", (360 + 3 * 120 + 60, 0, 120)),
    ],
)
def test_each_stream_has_a_pool_of_its_own(model, cluster, settings, modes, expected):
    profile = model(40, 80, 120)
    step = replace(step_of(profile), cluster=cluster(2))
    chosen = [DP, *({"D": DP, "Z": ZDP}[letter] for letter in modes)]
    found = simulate_step(step, chosen, engine=FSDP2(**settings))
    of_streams = [
        max(
            moment.num_bytes - moment.gather_buffers - moment.parts["reduced gradients"] for _, moment in found.moments
        ),
        max(moment.gather_buffers for _, moment in found.moments),
        max(moment.parts["reduced gradients"] for _, moment in found.moments),
    ]
    assert found.reserved_bytes == sum(of_streams)
    assert found.reserved_bytes >= found.peak.peak_bytes
    assert of_streams == [pytest.approx(each) for each in expected]
