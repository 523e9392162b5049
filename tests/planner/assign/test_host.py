"""States on the host: chosen where memory asks for it, for as few seconds as may be, and never beyond the limit."""

import dataclasses
import itertools

import pytest

from lightning_osdp.core.axes import DP, HSDP, ZDP, modes_of
from lightning_osdp.core.cluster import Cluster, Link
from lightning_osdp.core.plans.search_space import SearchSpace
from lightning_osdp.core.profile import OptimizerProfile
from lightning_osdp.errors import ConfigurationError, InfeasibleError
from lightning_osdp.planner.assign import assign_modes, fill_spare
from lightning_osdp.planner.cost import Workload, host_bytes, more_optimizer_s
from lightning_osdp.planner.engine import FSDP2
from lightning_osdp.planner.engine.layout import owned_elements
from lightning_osdp.planner.scheduler import make_plan
from lightning_osdp.planner.search import SOLVERS
from tests.support.steps import TWO_NODES, filled_at_shares, plans_within_limits, step_of

LINK = Link(latency_s=0.0, seconds_per_byte=1e-3)
OPERATORS = [
    {"name": f"{index}", "parameter_bytes": num_bytes, "activation_bytes_per_sample": 100, "forward_s_per_sample": 0.1}
    for index, num_bytes in enumerate((800, 800, 1600, 400))
]
HOST = OptimizerProfile(s_per_element=1e-3, host_s_per_element=4e-3)
MODES = modes_of(["ZDP", "DP"], ["every"], ["device", "host"])


def given(setting, operators=OPERATORS, world_size=2, overlaps=False, optimizer=HOST, modes=MODES):
    found = setting(
        operators=operators,
        cluster=Cluster(
            world_size=world_size, all_gather=LINK, reduce_scatter=LINK, overlaps=overlaps, host_copy_s_per_byte=1e-4
        ),
        workload=Workload(micro_batch_size=1),
        modes=modes,
        engine=FSDP2(backward_prefetch="none"),
    )
    return dataclasses.replace(found, profile=dataclasses.replace(found.profile, optimizer=optimizer))


def test_the_host_updates_only_what_is_trained_and_only_where_that_was_profiled(setting):
    found = given(setting, [{**OPERATORS[0], "frozen": True}, *OPERATORS[1:]])
    options = {unit.name: of for unit, of in zip(found.units, found.costs.options, strict=True)}
    assert options["0"] == (ZDP, DP)
    assert options["1"] == (ZDP.but(states="host"), ZDP, DP.but(states="host"), DP)
    assert options[""] == (DP,)  # it has no parameters
    unknown = given(setting, optimizer=OptimizerProfile(s_per_element=1e-3))
    assert {mode["states"] for of in unknown.costs.options for mode in of} == {"device"}


def test_seconds_are_of_updates_and_copies_and_bytes_of_states(setting):
    found = given(setting)
    for place, unit in enumerate(found.units[1:]):
        elements = unit.parameter_bytes / 4 / 2
        expected_s = elements * (4e-3 - 1e-3) + 3 * 4 * elements * 1e-4
        more_s = more_optimizer_s(found, unit, ZDP.but(states="host"))
        assert more_s == pytest.approx(expected_s)
        of_unit = found.costs.memory.places[place + 1]
        device, host = (found.costs.memory.held(of_unit, ZDP.but(states=each)) for each in ("device", "host"))
        assert (device.prefix_bytes, host.prefix_bytes, host.window_bytes) == (0, 0, 0)
        assert device.window_bytes == 2 * 4 * elements
    device = tuple(DP if unit.is_root else ZDP for unit in found.units)
    host = tuple(mode.but(states="host") for mode in device)
    elements = sum(unit.parameter_bytes for unit in found.units) / 4 / 2
    peaks = [found.costs.exact_peak(modes).parts for modes in (device, host)]
    assert peaks[0]["optimizer state"] == 2 * 4 * elements
    assert "optimizer state" not in peaks[1]
    assert found.costs.step_time_s(host) - found.costs.step_time_s(device) == pytest.approx(
        elements * 3e-3 + 3 * 4 * elements * 1e-4
    )
    layout = FSDP2().layout_in(found, host)
    assert layout.host == (2 * 4 + 2 * 4) * elements == host_bytes(found, host)
    assert host_bytes(found, device) == 0


def test_copies_are_pinned_in_powers_of_two_where_they_run_beside_computing(model, linear):
    profile = model(linear("a", 3, 5), optimizer=HOST)
    found = step_of(profile)
    modes = tuple(mode.but(states="host") for mode in (DP, ZDP))
    (_, unit) = found.units
    elements = [owned_elements(each, 2, 0) for each in unit.parameters]
    assert host_bytes(found, modes) == 16 * sum(elements)
    pinned = dataclasses.replace(found, cluster=dataclasses.replace(found.cluster, host_copies_overlap=True))
    powers = [next(2**k for k in range(9) if 2**k >= 4 * each) for each in elements]
    assert host_bytes(pinned, modes) == 8 * sum(elements) + 2 * sum(powers) > host_bytes(found, modes)


@pytest.mark.parametrize("search", SOLVERS)
@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    "temporaries", [{}, {"is_foreach": True, "foreach_temporaries": 1.0}, {"temporaries": ((1.0, 1.0),)}]
)
def test_modes_fit_and_are_about_as_fast_as_any_that_do(setting, search, overlaps, world_size, temporaries):
    found = given(setting, OPERATORS[:3], world_size, overlaps, dataclasses.replace(HOST, **temporaries))
    places = {frozenset(mode["states"] for mode in filled.modes[1:]) for filled in filled_at_shares(found, search)}
    assert places == {frozenset({"host"}), frozenset({"host", "device"}), frozenset({"device"})}


@pytest.mark.parametrize("overlaps", [False, True])
def test_the_root_has_states_on_the_device_where_they_fit_and_bounds_know(setting, overlaps):
    root = {"name": "", "parameter_bytes": 400, "activation_bytes_per_sample": 100, "forward_s_per_sample": 0.1}
    found = given(setting, [root, *OPERATORS[:2]], overlaps=overlaps)
    (host,), *others = found.costs.options
    assert host == DP.but(states="host")
    assignments = [
        (found.costs.step_time_s(modes), found.costs.exact_peak(modes).peak_bytes, modes[0])
        for modes in itertools.product((host, DP), *others)
    ]
    least, most = (of(peak for _, peak, _ in assignments) for of in (min, max))
    roots = []
    for share in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0):
        limit_bytes = int(least + share * (most - least))
        assigned = assign_modes(found, memory_limit_bytes=limit_bytes)
        if assigned is None:  # the closed form is a bound
            assert found.costs.least_bytes > limit_bytes
            continue
        filled = fill_spare(assigned, memory_limit_bytes=limit_bytes)
        assert filled.peak.peak_bytes <= limit_bytes
        assert assigned.bound_s <= min(time_s for time_s, peak, _ in assignments if peak <= limit_bytes) * (1 + 1e-9)
        roots.append(filled.modes[0])
    assert (roots[0], roots[-1]) == (host, DP)


@pytest.mark.parametrize("overlaps", [False, True])
def test_all_states_are_on_the_host_where_no_other_place_is_offered(setting, overlaps):
    root = {"name": "", "parameter_bytes": 400, "activation_bytes_per_sample": 100, "forward_s_per_sample": 0.1}
    found = given(setting, [root, *OPERATORS[:2], {**OPERATORS[2], "frozen": True}], overlaps=overlaps)
    options = {"micro_batch_size": 1, "engine": found.engine, "memory_limit_bytes": 10**6}
    alone = SearchSpace(min_unit_bytes=0, states=("host",))
    plan = make_plan(found.profile, found.cluster, search_space=alone, **options)
    assert all(
        each["states"] == ("host" if unit.gradient_bytes else "device")
        for unit in plan.units
        for each in unit.treatments
    )
    assert plan.host_bytes == 16 * (400 + 800 + 800) // 4 // 2
    with pytest.raises(InfeasibleError, match=r"needs 3\.91 KiB of its host.s memory, .* 3\.81 KiB: 100 B are"):
        make_plan(found.profile, found.cluster, search_space=alone, host_limit_bytes=3900, **options)
    untimed = dataclasses.replace(found.profile, optimizer=OptimizerProfile(s_per_element=1e-3))
    with pytest.raises(ConfigurationError, match="Expected states that can all be on the host, for cpu_offload=True"):
        make_plan(untimed, found.cluster, search_space=alone, **options)


# ---- two limits

SPACE = SearchSpace(
    modes=("ZDP", "DP"),
    sync=("every",),
    states=("device", "host"),
    slices=(1,),
    activations=("keep",),
    share_units=False,
    min_unit_bytes=0,
)


@pytest.mark.parametrize(("overlaps", "host_s_per_element"), [(False, 4e-3), (True, 1e-3)])
def test_plans_keep_both_limits_and_are_about_as_fast_as_any_that_do(setting, overlaps, host_s_per_element):
    """Units are updated on the host to keep others unsharded, as far as there is room, where that takes few seconds."""
    optimizer = dataclasses.replace(HOST, host_s_per_element=host_s_per_element)
    found = given(setting, OPERATORS[:3], overlaps=overlaps, optimizer=optimizer)
    hosts, loose = set(), []
    for plan, fastest_s in plans_within_limits(found, SPACE, (0.2, 0.5, 0.7), (0, 1600, 3200, 4800, 6400)):
        hosts.add(plan.host_bytes)
        loose.append(plan.samples_per_s * (1 + plan.gap) * fastest_s / 2 - 1)
    assert len(hosts) > 2
    assert max(loose) < 0.06, loose


def test_where_the_host_is_short_states_there_are_those_of_the_largest_units_over_all_ranks(setting):
    found = given(setting, modes=(*(each.but(states=place) for place in ("host", "device") for each in (ZDP, HSDP)),))
    found = dataclasses.replace(found, cluster=TWO_NODES)
    sizes = {unit.name: unit.parameter_bytes * 4 / 8 for unit in found.units}
    assert {each["home"] for of in found.costs.options[1:] for each in of if "states" in each} == {"all", "node"}
    for room_bytes, names in ((1600, {"2", "0", "1"}), (1599, {"2", "0", "3"}), (1399, {"2", "0"}), (199, set())):
        short = dataclasses.replace(found, host_room_bytes=room_bytes)
        hosting = {
            unit.name: {each["home"] for each in of if "states" in each}
            for unit, of in zip(short.units, short.costs.options, strict=True)
        }
        assert {name for name, homes in hosting.items() if homes} == names
        assert all(homes <= {"all"} for homes in hosting.values())
        assert sum(sizes[name] for name in names) <= room_bytes
