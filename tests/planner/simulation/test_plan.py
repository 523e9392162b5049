import dataclasses

import pytest

from lightning_osdp.core.axes import named
from lightning_osdp.errors import ConfigurationError
from lightning_osdp.planner.engine import FSDP2
from lightning_osdp.planner.scheduler import make_plan
from lightning_osdp.planner.simulation import planned_step, simulate


@pytest.fixture
def profile(model, operator):
    sizes = [400, 800, 1200, 800, 400]
    return model(
        *(operator(f"h.{i // 2}.m{i}", size, activation_bytes_per_sample=50) for i, size in enumerate(sizes)),
        batch_bytes_per_sample=8.0,
        loss_activation_bytes_per_sample=900,
    )


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("limit_bytes", [12_000, 12_500, 2**20])
@pytest.mark.parametrize(
    "settings", [{}, {"backward_prefetch": "none"}, {"forward_prefetch": True}, {"asynchronous_unshard": False}]
)
def test_the_largest_moment_is_the_peak_of_the_plan(profile, cluster, world_size, limit_bytes, settings):
    ranks = cluster(world_size, latency_s=1.0)
    plan = make_plan(
        profile,
        ranks,
        memory_limit_bytes=limit_bytes * (3 - world_size),
        micro_batch_size=3,
        engine=FSDP2(**settings),
    )
    estimate = simulate(plan, profile, ranks)
    assert estimate.peak.peak_bytes == plan.peak_bytes
    assert max(moment.num_bytes for _, moment in estimate.moments) == pytest.approx(plan.peak_bytes, abs=1)
    assert estimate.time_s == pytest.approx(plan.step_time_s)


def test_slices_of_what_cannot_be_split_are_refused(profile, cluster):
    plan = make_plan(profile, cluster(2), memory_limit_bytes=2**20, micro_batch_size=3)
    split = plan.units[1].in_modes("ZDP", "DP")
    with pytest.raises(ConfigurationError, match=r"an operator that can be split, got 'h\.0\.m0' \(Linear\)"):
        simulate(dataclasses.replace(plan, units=(plan.units[0], split, *plan.units[2:])), profile, cluster(2))


@pytest.mark.parametrize("changes", [{"operators": ("h.9",)}, {"name": "h.0", "treatments": named("ZDP", "DP")}])
def test_units_of_other_operators_are_refused(profile, cluster, changes):
    plan = make_plan(profile, cluster(2), memory_limit_bytes=2**20, micro_batch_size=3)
    other = dataclasses.replace(plan.units[1], **{"operators": ("h.0.m0", "h.0.m1"), **changes})
    with pytest.raises(ConfigurationError, match=r"in (unit )?'h\.0"):
        simulate(dataclasses.replace(plan, units=(plan.units[0], other, *plan.units[2:])), profile, cluster(2))


def test_slices_are_gathered_one_after_the_other(model, linear, cluster):
    # base 2 * 4 * 1100 / 2 * 3; P = 4400 each
    profile = model(linear("a", 10, 100), linear("b", 10, 100, position=1))
    plan = make_plan(
        profile, cluster(2), memory_limit_bytes=2**20, micro_batch_size=1, engine=FSDP2(backward_prefetch="none")
    )
    states = 3 * 8800 / 2

    def peak_bytes(*modes):
        units = [unit.in_modes(*modes) for unit in plan.units[1:]]
        return simulate(dataclasses.replace(plan, units=(plan.units[0], *units)), profile, cluster(2)).peak.peak_bytes

    # a is copied out, or has gradients, beside what b has sent, receives and has reduced
    assert peak_bytes("ZDP") == states + 4400 / 2 + 4 * 4400
    assert peak_bytes(*["ZDP"] * 5) < states + 4400 + 4 * 4400 / 5 + 1000
    assert peak_bytes(*["ZDP"] * 5) < peak_bytes("ZDP", "ZDP", "ZDP", "ZDP", "DP") < peak_bytes(*["DP"] * 5)


def test_modules_in_one_unit_are_gathered_from_the_first_to_the_last(model, operator, cluster):
    profile = model(operator("a", 100), operator("b", 200), operator("c", 400))
    plan = make_plan(profile, cluster(2), memory_limit_bytes=2**20, micro_batch_size=1)
    root, *_, b, _ = plan.units
    ends = dataclasses.replace(b.in_modes("ZDP"), name="a", operators=("a", "c"), modules=("a", "c"))
    middle = b.in_modes("ZDP")
    step, _ = planned_step(dataclasses.replace(plan, units=(root, ends, middle)), profile, cluster(2))
    assert [unit.calls for unit in step.units] == [((0, 3),), ((0, 2),), ((1, 1),)]
    apart = dataclasses.replace(ends, modules=())
    step, _ = planned_step(dataclasses.replace(plan, units=(root, apart, middle)), profile, cluster(2))
    assert [unit.calls for unit in step.units] == [((0, 3),), ((0, 0),), ((1, 1),)]


def test_a_plan_with_states_on_the_host_needs_the_seconds_of_updates_there(profile, cluster):
    plan = make_plan(profile, cluster(2), memory_limit_bytes=2**20, micro_batch_size=3)
    hosted = dataclasses.replace(plan, units=(plan.units[0], plan.units[1].treated(states="host"), *plan.units[2:]))
    with pytest.raises(ConfigurationError, match=r"in which the host updates unit 'h\.0\.m0', got one without"):
        simulate(hosted, profile, cluster(2))
    timed = dataclasses.replace(profile, optimizer=dataclasses.replace(profile.optimizer, host_s_per_element=0.5))
    assert simulate(hosted, timed, cluster(2)).time_s == pytest.approx(simulate(plan, profile, cluster(2)).time_s + 25)
