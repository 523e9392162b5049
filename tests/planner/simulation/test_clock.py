"""The simulated step where nothing overlaps is the additive one, and its peak within the closed form; its clock."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_osdp.core.affine import Affine
from lightning_osdp.core.axes import DP, HDP, NAMED_MODES, SHARD_CHOICES, STATES_CHOICES, ZDP, Subject, modes_of
from lightning_osdp.core.cluster import UNIT_PARTS, Cluster, Link, Links, UnitOverhead
from lightning_osdp.core.profile import OptimizerProfile, Segment
from lightning_osdp.core.units import partition
from lightning_osdp.planner.assign import Setting
from lightning_osdp.planner.cost import Workload
from lightning_osdp.planner.engine import COLLECTIVES, FSDP2, GATHERS, effects_of
from lightning_osdp.planner.simulation import simulate_step
from tests.support.engines import ENGINES
from tests.support.tiers import examples

SECONDS = st.sampled_from([0.0, 0.5, 1.0, 3.0])
MODES = modes_of([*NAMED_MODES], states=STATES_CHOICES, shards=SHARD_CHOICES)
LINKS = st.builds(Link, latency_s=st.sampled_from([0.0, 0.2]), seconds_per_byte=st.sampled_from([0.0, 0.01]))


@st.composite
def trees(draw, most=7):
    """Operators of a random module tree in forward order, and the fields of a profile."""
    names = [""]
    for index in range(draw(st.integers(1, most))):
        names.append(f"{draw(st.sampled_from(names))}.{index}".strip("."))
    num_bytes = st.integers(0, 500)
    operators = [
        {
            "name": name,
            "parameter_bytes": draw(num_bytes),
            "frozen": draw(st.sampled_from([False, False, True])),
            "num_calls": draw(st.sampled_from([1, 1, 1, 2])),
            "forward_s_per_sample": draw(SECONDS),
            "backward_fixed_s": draw(SECONDS),
            "activation_bytes_per_sample": draw(num_bytes),
            "forward_workspace_bytes_per_sample": draw(num_bytes),
            "backward_workspace_bytes_per_sample": draw(num_bytes),
        }
        for name in names[draw(st.integers(0, 1)) :]
    ]
    return operators, {
        "loss_s_per_sample": draw(SECONDS),
        "loss_activation_bytes_per_sample": draw(num_bytes),
        "optimizer": OptimizerProfile(
            s_per_element=draw(SECONDS),
            foreach_temporaries=2.0,
            is_foreach=True,
            host_s_per_element=draw(st.none() | SECONDS),
        ),
    }


@st.composite
def surroundings(draw, **fixed):
    """The rest of a `Setting`, and a list to draw modes from."""
    overhead = st.builds(UnitOverhead, fixed_s=SECONDS, seconds_per_byte=st.sampled_from([0.0, 0.001]))
    within = draw(st.none() | st.builds(Links, all_gather=LINKS, reduce_scatter=LINKS, all_reduce=LINKS))
    world_size = draw(st.sampled_from([1, 2, 3, 8]))
    cluster = {
        "world_size": world_size,
        "node_size": draw(st.sampled_from([None, 2, 4])) if world_size == 8 else None,
        "within_node": within,
        "between_nodes": draw(st.none() | st.builds(Links, all_gather=LINKS, reduce_scatter=LINKS, all_reduce=LINKS)),
        "all_gather": draw(LINKS),
        "reduce_scatter": draw(LINKS),
        "unit_overhead": draw(st.fixed_dictionaries(dict.fromkeys(UNIT_PARTS, overhead)) | st.just({})),
        "reduce_scatter_copies": draw(st.booleans()),
        "overlaps": draw(st.booleans()),
        "host_copy_s_per_byte": draw(st.sampled_from([0.0, 0.005])),
    }
    return {
        "modes": MODES,
        "cluster": Cluster(**cluster | fixed),
        "workload": Workload(micro_batch_size=draw(st.integers(1, 3)), num_micro_batches=draw(st.integers(1, 5))),
        "engine": draw(ENGINES),
    }


def simulated(found, modes):
    return simulate_step(found, modes, engine=found.engine)


def again(profile, turns):
    """The model with some of its operators, which are in no other, called again after all of them."""
    flat = [segment.operator for segment in profile.segments[:-1] if "." not in segment.operator]
    called = [flat[turn % len(flat)] for turn in turns if flat]
    spans = dict(profile.spans)
    segments = list(profile.segments[:-1])
    for name in called:
        spans[name] = (*spans[name], (len(segments), len(segments)))
        segments.append(Segment(operator=name, forward_s=Affine(0.5, 1.0), saved_bytes=Affine(0.0, 30.0)))
    return dataclasses.replace(profile, segments=(*segments, profile.loss), spans=spans)


CHOICES = st.lists(st.sampled_from(MODES), min_size=9, max_size=9)


def chosen(found, choices):
    """Returns these modes as far as the units have the choice."""
    waits = found.workload.num_micro_batches > 1 and found.cluster.world_size > 1
    modes = []
    for unit, choice in zip(found.units, choices, strict=False):
        mode = choice if waits and found.engine.may_wait(unit) else choice.but(sync="every")
        has_nodes, is_reached = found.cluster.has_nodes, unit.last >= unit.trained_from
        may = dict.fromkeys(("may_leave_alone", "may_stay"), not unit.gradient_bytes)
        may |= {"may_exchange": unit.exchange is not None, "is_trained": unit.gradient_bytes > 0}
        may["has_host"] = found.profile.optimizer.host_s_per_element is not None
        mode = mode.within(Subject(has_nodes=has_nodes, is_reached=is_reached, **may))
        if unit.is_root:
            mode = HDP if found.cluster.has_nodes and mode["home"] == "node" else DP
        modes.append(mode)
    return modes


@examples(200)
@given(
    tree=trees(), around=surroundings(overlaps=False), choices=CHOICES, turns=st.lists(st.integers(0, 6), max_size=3)
)
def test_where_nothing_overlaps_time_is_the_sum_and_memory_within_the_closed_form(
    model, operator, tree, around, choices, turns
):
    operators, fields = tree
    profile = again(model(*(operator(**made) for made in operators), **fields), turns)
    found = Setting(profile=profile, units=partition(profile, min_unit_bytes=0), **around)
    modes = chosen(found, choices)
    estimate = simulated(found, modes)
    assert estimate.time_s == pytest.approx(found.costs.additive.time_s(modes))
    assert found.costs.step_time_s(modes) == found.costs.additive.time_s(modes)
    assert estimate.exposed_communication_s == pytest.approx(estimate.communication_s, abs=1e-9)
    assert all(num_bytes > -1e-6 for _, moment in estimate.moments for num_bytes in moment.parts.values())
    assert estimate.peak == found.costs.exact_peak(modes)
    # what is gathered ahead in place of resident units may be larger than these
    passes_over = found.engine.prefetches and any(effects_of(mode).is_resident for mode in modes)
    if not passes_over and not any(mode.needs_nodes for mode in modes):
        assert estimate.peak.peak_bytes <= found.costs.peak(modes).peak_bytes


@examples(200)
@given(tree=trees(), around=surroundings(), choices=CHOICES, turns=st.lists(st.integers(0, 6), max_size=3))
def test_the_clock_shows_the_time_of_the_simulated_step(model, operator, tree, around, choices, turns):
    operators, fields = tree
    profile = again(model(*(operator(**made) for made in operators), **fields), turns)
    found = Setting(profile=profile, units=partition(profile, min_unit_bytes=0), **around)
    modes = chosen(found, choices)
    step, estimate = found.costs.clock.step(modes), simulated(found, modes)
    assert step.time_s == pytest.approx(estimate.time_s, rel=1e-12)  # computing in a row is added up before
    assert found.costs.step_time_s(modes) == pytest.approx(estimate.time_s)
    if found.cluster.overlaps:
        assert estimate.time_s <= found.costs.additive.time_s(modes) * (1 + 1e-12)
        assert estimate.time_s >= estimate.compute_s * (1 - 1e-12)
        # inside of nodes there is another communicator, and the link to the host is one, too
        has_one = not any(mode.needs_nodes or effects_of(mode).shard_on_host for mode in modes)
        assert not has_one or estimate.time_s >= estimate.communication_s * (1 - 1e-12)


@examples(100)
@given(tree=trees(), around=surroundings(), choices=CHOICES)
def test_collectives_of_a_step_are_those_of_its_modes(model, operator, tree, around, choices):
    operators, fields = tree
    profile = model(*(operator(**made) for made in operators), **fields)
    found = Setting(profile=profile, units=partition(profile, min_unit_bytes=0), **around)
    modes, repeats = chosen(found, choices), found.workload.num_micro_batches
    several = dataclasses.replace(
        found, cluster=dataclasses.replace(found.cluster, world_size=max(2, found.cluster.world_size))
    )
    events = [(event.kind, event.of) for micro_batch in found.engine.events_of(several, modes) for event in micro_batch]
    for index, (unit, mode) in enumerate(zip(found.units, modes, strict=True)):
        counts = effects_of(mode).counts(unit, num_micro_batches=min(3, repeats))
        for kind in COLLECTIVES:
            if not (unit.is_root and kind in GATHERS):  # the root is not gathered again
                assert events.count((kind, index)) == counts[kind]


def test_computing_stalls_before_units_that_are_gathered_late(model, operator, cluster):
    # a ring takes 1 s, forward and backward of a unit 2 s each
    profile = model(*(operator(f"m{i}", 100, forward_s_per_sample=2.0, backward_fixed_s=2.0) for i in range(3)))
    found = Setting(
        profile=profile,
        units=partition(profile, min_unit_bytes=0),
        cluster=dataclasses.replace(cluster(2, seconds_per_byte=0.02), overlaps=True),
        workload=Workload(micro_batch_size=1),
        engine=FSDP2(backward_prefetch="none"),
    )
    # AG0 1, F0 3, AG1 4, F1 6, AG2 7, F2 9; what is freed is gathered after the reduce-scatter before it:
    # AG2 10, B2 12, RS2 13, AG1 14, B1 16, RS1 17, AG0 18, B0 20, RS0 21
    freed, kept = (found.costs.clock.step((DP, mode, mode, mode)) for mode in (ZDP, DP))
    assert (freed.time_s, freed.stalls_s) == (21.0, {0: 0.0, 1: 2.0, 2: 2.0, 3: 1.0})
    # F2 9, B0 15, RS0 16
    assert (kept.time_s, kept.stalls_s) == (16.0, {0: 0.0, 1: 0.0, 2: 0.0, 3: 0.0})
    assert found.costs.clock.step((DP, DP, ZDP, ZDP)).time_s == 19.0
    # AG2 10 while the loss goes backward, AG1 11 behind it; RS2 13, AG0 14; B2 12, B1 14, B0 16, RS0 17
    hidden = dataclasses.replace(found, engine=FSDP2()).costs.clock.step((DP, ZDP, ZDP, ZDP))
    assert (hidden.time_s, hidden.stalls_s) == (17.0, {0: 0.0, 1: 0.0, 2: 0.0, 3: 1.0})
    # and in forward, too: AG1 2 beside F0, AG2 4 beside F1; F2 7, AG2 8, B0 14, RS0 15
    ahead = dataclasses.replace(found, engine=FSDP2(forward_prefetch=True)).costs.clock.step((DP, ZDP, ZDP, ZDP))
    assert (ahead.time_s, ahead.stalls_s[3]) == (15.0, 1.0)
    # a gather waits for copies alone, not for computing: m2 is there again when its forward is over
    implicit = dataclasses.replace(found, engine=FSDP2(asynchronous_unshard=False)).costs.clock.step(
        (DP, ZDP, ZDP, ZDP)
    )
    assert (implicit.time_s, set(implicit.stalls_s.values())) == (14.0, {0.0})
