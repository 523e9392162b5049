"""Treatments of what blocks save, chosen together with modes."""

import dataclasses
import itertools
import math

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lightning_osdp.core.affine import Affine
from lightning_osdp.core.axes import DP, LEVELS, ZDP
from lightning_osdp.core.cluster import Cluster, Link
from lightning_osdp.core.profile import BlockProfile, Level
from lightning_osdp.core.units import partition
from lightning_osdp.planner.assign import LeastSeconds, Setting, assign_modes, block_units, chosen_activations
from lightning_osdp.planner.cost import Workload, step_memory
from lightning_osdp.planner.engine import FSDP2
from lightning_osdp.planner.simulation import simulate_step
from tests.support.engines import ENGINES
from tests.support.tiers import examples

CHOICES = ("keep", "recompute", "offload")
WITH_LEVELS = ("keep", "recompute", LEVELS[0]), ("keep", *LEVELS[:2])
KEPT_BYTES = {LEVELS[0]: 30, LEVELS[1]: 90}


def per_sample(num):
    return Affine(0.0, float(num))


def saving_less(segments, *, border):
    """Segments of a block that saves so much of its inputs and results: the rest is workspace of its backward."""
    total = sum(segment.saved_bytes.per_sample for segment in segments)
    found = []
    for index, segment in enumerate(segments):
        found.append(
            dataclasses.replace(
                segment,
                saved_bytes=per_sample(0 if index else border),
                backward_workspace_bytes=per_sample(segment.backward_workspace_bytes.per_sample + total),
            )
        )
    return tuple(found)


def with_profiles(profile, names, *, reruns_early=False):
    """The profile, in which these modules are blocks that may do anything."""
    blocks = []
    for name in names:
        ((first, last),) = profile.spans[name]
        segments = profile.segments[first : last + 1]
        saved = sum((segment.saved_bytes for segment in segments), Affine())
        forward_s = sum((segment.forward_s for segment in segments), Affine())
        less = {"recompute": 8, "offload": 0} | {level: 8 + kept for level, kept in KEPT_BYTES.items()}
        blocks.append(
            BlockProfile(
                name=name,
                span=(first, last),
                segments={choice: saving_less(segments, border=border) for choice, border in less.items()},
                reruns_early=reruns_early,
                rerun_s=forward_s,
                levels={
                    level: Level(kept=tuple(range(number)), rerun_s=forward_s * (0.5 / number))
                    for number, level in enumerate(KEPT_BYTES, start=1)
                },
                copied_bytes={"offload": saved},
            )
        )
    return dataclasses.replace(profile, blocks=tuple(blocks))


@st.composite
def models(draw):
    """Operators of one to three blocks, each of one to three operators, with some outside."""
    num_bytes = st.integers(0, 300)
    names = []
    for block in range(draw(st.integers(1, 3))):
        names += [f"b{block}.{index}" for index in range(draw(st.integers(1, 3)))]
        names += [f"between{block}"] * draw(st.integers(0, 1))
    return [
        {
            "name": name,
            "parameter_bytes": draw(st.integers(1, 300)),
            "activation_bytes_per_sample": draw(num_bytes),
            "backward_workspace_bytes_per_sample": draw(num_bytes),
            "forward_s_per_sample": draw(st.sampled_from([0.0, 0.3, 0.5])),
        }
        for name in names
    ]


@pytest.fixture(scope="session")
def blocked(model, operator):
    def build(operators, *, reruns_early=False, **fields):
        profile = model(*(operator(**made) for made in operators))
        names = dict.fromkeys(made["name"].split(".")[0] for made in operators if "." in made["name"])
        profile = with_profiles(profile, names, reruns_early=reruns_early)
        return Setting(profile=profile, units=partition(profile, min_unit_bytes=0), **fields)

    return build


@st.composite
def settings_to_plan(draw):
    link = st.builds(
        Link, latency_s=st.sampled_from([0.0, 0.01]), seconds_per_byte=st.sampled_from([0.0, 0.001, 0.0123])
    )
    return {
        "operators": draw(models()),
        "reruns_early": draw(st.booleans()),
        "cluster": Cluster(
            world_size=draw(st.sampled_from([1, 2, 8])),
            all_gather=draw(link),
            reduce_scatter=draw(link),
            host_copy_s_per_byte=draw(st.sampled_from([0.0, 1e-3])),
            host_copies_overlap=draw(st.booleans()),
            overlaps=draw(st.booleans()),
        ),
        "workload": Workload(
            micro_batch_size=draw(st.integers(1, 3)), num_micro_batches=draw(st.sampled_from([1, 1, 2]))
        ),
        "engine": draw(ENGINES),
    }


def passed_by_in_a_detour():
    """Blocks whose recomputing goes on while a gather of backward waits: no part of both may count in a bound."""
    sizes = {"b0.2": (4, 151, 0.3), "b1.1": (45, 0, 0.0), "b1.2": (4, 1, 0.0)}
    names = ["b0.0", "b0.1", "b0.2", "b1.0", "b1.1", "b1.2"]
    fields = ("parameter_bytes", "activation_bytes_per_sample", "forward_s_per_sample")
    return {
        "operators": [{"name": name, **dict(zip(fields, sizes.get(name, (1, 0, 0.0)), strict=True))} for name in names],
        "cluster": Cluster(
            world_size=2,
            all_gather=Link(latency_s=0.0, seconds_per_byte=0.0123),
            reduce_scatter=Link(latency_s=0.0, seconds_per_byte=0.0),
            host_copy_s_per_byte=1e-3,
            overlaps=True,
        ),
        "workload": Workload(micro_batch_size=1),
        "engine": FSDP2(asynchronous_unshard=False),
    }


def simulated(setting, modes):
    return simulate_step(setting, modes, engine=setting.engine)


@examples(60)
@given(settings_to_plan(), st.floats(0, 1), st.sampled_from([CHOICES, *WITH_LEVELS]))
@example(passed_by_in_a_detour(), 0.0, CHOICES)
def test_blocks_and_modes_are_chosen_as_well_as_by_brute_force(blocked, fields, share, choices):
    setting = block_units(blocked(**fields), choices)[0]
    every = list(itertools.product(*setting.costs.options))
    peaks = [setting.costs.peak(modes).peak_bytes for modes in every]
    limit_bytes = int(min(peaks) + share * (max(peaks) - min(peaks)))
    fastest = min(
        setting.costs.step_time_s(modes) for modes, peak in zip(every, peaks, strict=True) if peak <= limit_bytes
    )
    found = assign_modes(setting, memory_limit_bytes=limit_bytes)
    if found is None:  # only the closed form has a plan that fits
        assert setting.costs.exact_peak(setting.costs.least_memory_modes).peak_bytes > limit_bytes
        return
    assert found.peak.peak_bytes == setting.costs.exact_peak(found.modes).peak_bytes <= limit_bytes
    assert found.bound_s <= fastest * (1 + 1e-9)
    if not setting.overlaps and setting.engine.backward_prefetch == "none":
        assert found.step_time_s == pytest.approx(fastest, rel=1e-9)


def left_out_bytes(setting, modes):
    """Bytes that the closed form may leave out, for the simulator decides in the end what fits.

    While a block runs, the one before is gathered ahead, and counted as if it saved what the running one's choice has
    it save.
    """
    if setting.engine.backward_prefetch == "none":
        return 0.0
    memory = setting.costs.memory
    beyond = (
        before[modes[unit]["saves"]] - before[modes[running]["saves"]]
        for (unit, before), (running, now) in itertools.pairwise(zip(memory.order, memory.saved_bytes, strict=True))
        if before and now
    )
    return max([0.0, *beyond])


@examples(60)
@given(settings_to_plan(), st.data(), st.sampled_from([CHOICES, *WITH_LEVELS]))
def test_what_the_search_sees_is_what_the_simulator_says(blocked, fields, data, choices):
    base = blocked(**fields)
    setting = block_units(base, choices)[0]
    modes = tuple(data.draw(st.sampled_from(options)) for options in setting.costs.options)
    estimate = simulated(setting, modes)
    assert setting.costs.step_time_s(modes) == pytest.approx(estimate.time_s, rel=1e-9)
    assert setting.costs.exact_peak(modes).peak_bytes == estimate.peak.peak_bytes
    assert estimate.peak.peak_bytes <= setting.costs.peak(modes).peak_bytes + left_out_bytes(setting, modes)
    # blocks decided before, with the operators for units
    fine = base.with_blocks(chosen_activations(setting, modes))
    modes = tuple(data.draw(st.sampled_from(options)) for options in fine.costs.options)
    estimate = simulated(fine, modes)
    assert fine.costs.step_time_s(modes) == pytest.approx(estimate.time_s, rel=1e-9)
    assert estimate.peak.peak_bytes <= fine.costs.peak(modes).peak_bytes
    assert all(num_bytes > -1e-6 for _, moment in estimate.moments for num_bytes in moment.parts.values())


@examples(60)
@given(
    settings_to_plan(),
    st.sampled_from([CHOICES[:2], CHOICES, *WITH_LEVELS]),
    st.lists(st.integers(1, 300), min_size=2, max_size=4),
)
def test_what_is_known_of_one_micro_batch_size_tells_the_memory_of_others(blocked, fields, choices, sizes):
    setting, known = block_units(blocked(**fields), choices)[0], {}
    for size in sizes:
        step = setting.at(size)
        told = step_memory(step, activations=choices, engine=step.engine, known=known)
        read = step_memory(step, activations=choices, engine=step.engine)
        assert told.largest_bytes == pytest.approx(read.largest_bytes, rel=1e-9, abs=1e-6)
        modes = tuple(options[-1] for options in step.costs.options)
        assert told.peak_bytes(modes) == told.peak(modes).peak_bytes == read.peak(modes).peak_bytes
        first, again = (each.costs.exact_peak_bytes(modes) for each in (step, dataclasses.replace(step)))
        assert first == again == step.costs.exact_peak(modes).peak_bytes
    assert len(known) <= len(choices)


@examples(60)
@given(settings_to_plan(), st.data(), st.sampled_from([CHOICES[:2], CHOICES, *WITH_LEVELS]), st.integers(1, 5))
def test_whatever_fits_takes_no_less_than_what_does_not_fit_costs(blocked, fields, data, choices, more):
    base = blocked(**fields)
    own = base.workload.micro_batch_size
    smaller, larger = (block_units(base.at(size), choices)[0] for size in (own, own + more))
    modes = tuple(data.draw(st.sampled_from(options)) for options in larger.costs.options)
    fine = base.at(own + more).with_blocks(chosen_activations(larger, modes))
    for found, chosen in (
        (larger, modes),
        (fine, tuple(data.draw(st.sampled_from(options)) for options in fine.costs.options)),
    ):
        limit_bytes = found.costs.exact_peak(chosen).peak_bytes
        least = LeastSeconds(base, choices, memory_limit_bytes=limit_bytes)
        assert least.step_s(own + more) <= found.costs.step_time_s(chosen) + 1e-9
        if not found.overlaps:
            same = smaller if found is larger else fine.at(own)
            grown_s = found.costs.step_time_s(chosen) - same.costs.step_time_s(chosen)
            assert least.more_s(own + more, own) <= grown_s + 1e-9


def test_what_does_not_fit_is_made_again(blocked, cluster):
    operators = [
        {
            "name": f"b{block}.0",
            "parameter_bytes": 4,
            "activation_bytes_per_sample": 1008,
            "forward_s_per_sample": 1.0,
            "backward_s_per_sample": 2.0,
        }
        for block in range(4)
    ]
    base = blocked(operators, cluster=cluster(2, seconds_per_byte=0.0), workload=Workload(micro_batch_size=1))
    # 24 bytes of shards and states; each block that recomputes saves 1000 of 1008 bytes of a sample, and takes 1 s more
    least = LeastSeconds(base, ("keep", "recompute"), memory_limit_bytes=24 + 4032 + 1500)
    again = (2 * 4032 - 4032 - 1500) / 2000  # blocks
    assert least.step_s(1) == pytest.approx(12.0)
    assert least.step_s(2) == pytest.approx(2 * (12.0 + again))
    assert least.more_s(2, 1) == pytest.approx(12.0 + again)
    assert least.step_s(1000) == least.more_s(1000, 1) == math.inf


def test_a_unit_inside_a_block_that_recomputes_is_gathered_for_that_and_stays_for_its_backward(blocked, cluster):
    fields = {"cluster": cluster(2, seconds_per_byte=0.01), "workload": Workload(micro_batch_size=1)}
    operators = [{"name": f"b{block}.{index}", "parameter_bytes": 100} for block in range(2) for index in range(4)]
    for reruns_early in (False, True):
        base = blocked(operators, reruns_early=reruns_early, **fields)
        fine = base.with_blocks({"b0": "recompute", "b1": "recompute"})
        for modes in (fine.all_zdp_modes, (DP,) * len(fine.units)):
            assert fine.costs.step_time_s(modes) == pytest.approx(base.costs.step_time_s(modes))
        # base 1200, and 300 of a unit's gradients beside what the one before sends and receives: b0.1 beside b0.0,
        # prefetched, and six gradient shards of 50; or else the block's four units and the buffer of a gather beside
        # the 200 in flight, four gradient shards and 8 bytes of inputs
        peaks = [found.costs.exact_peak(found.all_zdp_modes) for found in (base, fine)]
        assert [peak.peak_bytes for peak in peaks] == [1500 + 200 + 6 * 50, 1400 + 500 + 4 * 50 + 8]
        assert [peak.parts["gathered parameters"] for peak in peaks] == [200, 500]


@pytest.mark.parametrize(
    ("offloading", "in_flight"), [((), 0), ((1,), 300), ((0, 1), 200 + 300), ((0, 1, 2), 400 + 300)]
)
def test_of_blocks_that_copy_beside_computing_two_are_in_flight(blocked, cluster, offloading, in_flight):
    saved = (200, 300, 400)
    operators = [
        {"name": f"b{block}.0", "parameter_bytes": 4, "activation_bytes_per_sample": num_bytes}
        for block, num_bytes in enumerate(saved)
    ]
    base = blocked(operators, cluster=cluster(2), workload=Workload(micro_batch_size=1))
    base = base.with_blocks({f"b{block}": "offload" for block in offloading})
    ahead = dataclasses.replace(base, cluster=dataclasses.replace(base.cluster, host_copies_overlap=True))
    for peak_of in (lambda costs: costs.exact_peak(base.all_zdp_modes), lambda costs: costs.peak(base.all_zdp_modes)):
        waiting, found = peak_of(base.costs), peak_of(ahead.costs)
        assert found.peak_bytes == waiting.peak_bytes + in_flight
        assert found.parts.get("copies in flight", 0) == in_flight
    step = simulate_step(ahead, base.all_zdp_modes, engine=ahead.engine)
    in_optimizer = [moment.parts["copies in flight"] for _, moment in step.moments if moment.phase == "optimizer step"]
    assert in_optimizer == [0]


def test_blocks_that_are_kept_longest_recompute_first(blocked, cluster):
    operators = [
        {
            "name": f"b{block}.{index}",
            "parameter_bytes": 100,
            "activation_bytes_per_sample": 200,
            "forward_s_per_sample": 1.0,
        }
        for block in range(4)
        for index in range(2)
    ]
    fields = {"cluster": cluster(2, seconds_per_byte=0.01), "workload": Workload(micro_batch_size=1)}
    setting = block_units(blocked(operators, engine=FSDP2(backward_prefetch="none"), **fields), CHOICES[:2])[0]
    most = setting.costs.peak(tuple(options[-1] for options in setting.costs.options)).peak_bytes
    found = assign_modes(setting, memory_limit_bytes=most - 700)
    assert list(chosen_activations(setting, found.modes)) == ["b0"]
    assert found.gap == 0.0


def test_what_was_made_before_offers_the_modes_of_the_setting_that_asks(blocked, cluster):
    operators = [{"name": f"b{block}.0", "parameter_bytes": 100} for block in range(2)]
    base = blocked(operators, cluster=cluster(2), workload=Workload(micro_batch_size=1))
    recomputing = {"b0": "recompute", "b1": "recompute"}
    assert base.with_blocks(recomputing).modes == base.modes
    sharded = dataclasses.replace(base, modes=(ZDP,)).with_blocks(recomputing)
    assert sharded.costs.options == ((DP,), (ZDP,), (ZDP,))


def test_blocks_without_a_level_are_taken_to_recompute_where_others_are_at_it(blocked, cluster):
    """Blocks of another kind have fewer levels; the bound on the peak must not have them keep everything."""
    operators = [
        {"name": f"b{block}.0", "parameter_bytes": 100, "activation_bytes_per_sample": 1000} for block in range(3)
    ]
    base = blocked(operators, cluster=cluster(2), workload=Workload(micro_batch_size=1))
    first, *rest = base.profile.blocks
    segments = {choice: less for choice, less in first.segments.items() if choice not in LEVELS}
    without = dataclasses.replace(first, levels={}, segments=segments)
    fewer = dataclasses.replace(base, profile=dataclasses.replace(base.profile, blocks=(without, *rest)))
    fewer = dataclasses.replace(fewer, units=partition(fewer.profile, min_unit_bytes=0))
    choices = ("keep", "recompute", LEVELS[0])
    mixed, plain = (block_units(each, choices)[0] for each in (fewer, base))
    modes = tuple(
        options[0].but(saves="keep" if unit.is_root else "recompute" if unit.name == "b0" else LEVELS[0])
        for unit, options in zip(mixed.units, mixed.costs.options, strict=True)
    )
    assert mixed.costs.peak(modes) == plain.costs.peak(modes)
    assert mixed.costs.exact_peak(modes).peak_bytes <= mixed.costs.peak(modes).peak_bytes
