"""Shards of frozen units on the host: chosen where memory asks for it, for as few seconds as may be, within limits."""

import dataclasses

import pytest

from lightning_osdp.core.axes import DP, HPZ, HSDP, RESIDENT, ZDP, modes_of, on_device
from lightning_osdp.core.cluster import UNIT_PARTS, Cluster, Contention, Link, UnitOverhead
from lightning_osdp.core.plans.search_space import SearchSpace
from lightning_osdp.core.profile import OptimizerProfile
from lightning_osdp.errors import InfeasibleError
from lightning_osdp.planner.cost import Workload, copies_s, host_bytes, more_optimizer_s
from lightning_osdp.planner.engine import FSDP2, effects_of
from lightning_osdp.planner.engine.layout import chunk_elements
from lightning_osdp.planner.scheduler import make_plan
from lightning_osdp.planner.search import SOLVERS
from lightning_osdp.planner.simulation import simulate_step
from lightning_osdp.report.sentences import explain
from tests.support.steps import TWO_NODES, filled_at_shares, plans_within_limits, step_of

LINK = Link(latency_s=0.0, seconds_per_byte=1e-3)
OPERATORS = [
    {
        "name": f"{index}",
        "parameter_bytes": num_bytes,
        "activation_bytes_per_sample": 100,
        "forward_s_per_sample": 1.0,
        "backward_fixed_s": 1.0,
        "frozen": index != 1,
    }
    for index, num_bytes in enumerate((800, 400, 800, 1600))
]
MODES = modes_of(["ZDP", "DP"], ["every"], shards=["device", "host"])
BOTH = modes_of(["ZDP", "DP"], ["every"], states=["device", "host"], shards=["device", "host"])
HOST = OptimizerProfile(s_per_element=1e-3, host_s_per_element=4e-3)


def given(setting, operators=OPERATORS, world_size=2, overlaps=False, modes=MODES, optimizer=None, **fields):
    cluster = {"all_gather": LINK, "reduce_scatter": LINK, "host_copy_s_per_byte": 1e-3}
    engine = fields.pop("engine", FSDP2(backward_prefetch="none"))
    workload = Workload(micro_batch_size=1, num_micro_batches=fields.pop("num_micro_batches", 1))
    found = setting(
        operators=operators,
        cluster=Cluster(world_size=world_size, overlaps=overlaps, **cluster, **fields),
        workload=workload,
        modes=modes,
        engine=engine,
    )
    if optimizer is None:
        return found
    return dataclasses.replace(found, profile=dataclasses.replace(found.profile, optimizer=optimizer))


def test_shards_of_trained_units_may_be_there_with_their_states_and_have_their_gradients_there(setting):
    found = given(setting, modes=BOTH, optimizer=HOST, num_micro_batches=3)
    options = {unit.name: of for unit, of in zip(found.units, found.costs.options, strict=True)}
    there = [
        (ZDP.but(states="host", shard="host"), ZDP.but(states="host"), ZDP),
        (DP.but(states="host", shard="host"), DP.but(states="host"), DP),
    ]
    assert options["1"] == (*there[0], *there[1])
    assert options["0"] == (ZDP.but(shard="host"), ZDP, DP.but(shard="host"), DP)
    place = found.costs.memory.places[2]
    held = [found.costs.memory.held(place, mode).window_bytes for mode in there[0]]
    assert held == [0, 200 + 200, 200 + 200 + 400]  # of 50 elements: weights and gradients, two states
    unit, cluster = found.units[2], found.cluster
    device, host = ((DP, ZDP, each, ZDP, ZDP) for each in (ZDP, there[0][0]))
    layout = FSDP2().layout_in(found, host)
    assert (layout.host, layout.host_copies) == (200 + 200 + 400, 400 + 400)
    assert (layout.units[2].kept_gradient, layout.units[2].reduced) == (0, 200)
    copies_s = (2 * 3 * 200 + 3 * 200) * cluster.host_copy_s_per_byte  # two all-gathers and a reduction each
    more_s = found.costs.step_time_s(host) - found.costs.step_time_s(device)
    assert more_s == pytest.approx(copies_s + 50 * 3e-3)
    cast = dataclasses.replace(
        unit, operators=tuple(dataclasses.replace(each, gathered_bytes=200) for each in unit.operators)
    )
    assert more_optimizer_s(found, cast, host[2]) - more_optimizer_s(found, unit, host[2]) == pytest.approx(
        50 * 4e-3 * (4 + 2) / (3 * 4 + 2 * 8)
    )


def test_shards_of_frozen_units_may_be_there_whose_bytes_the_device_has_while_they_are_gathered(setting):
    found = given(setting)
    options = {unit.name: of for unit, of in zip(found.units, found.costs.options, strict=True)}
    assert options["1"] == (ZDP, DP)
    assert options["0"] == (ZDP.but(shard="host"), ZDP, DP.but(shard="host"), DP)
    assert options[""] == (DP,)  # without parameters
    place = found.costs.memory.places[1]
    held = [found.costs.memory.held(place, mode) for mode in options["0"]]
    assert [(each.prefix_bytes, each.window_bytes) for each in held] == [(0, 0), (0, 400), (800, 0), (800, 400)]
    device, host = ((DP, *(ZDP.but(shard=each) if index != 1 else ZDP for index in range(4))) for each in PLACES)
    peaks = [found.costs.exact_peak(modes).parts for modes in (device, host)]
    assert [peak["parameter shards"] for peak in peaks] == [1800, 200]
    layout = FSDP2().layout_in(found, host)
    assert (layout.host, host_bytes(found, host), host_bytes(found, device)) == (1600, 1600, 0)
    assert [(size.shard, size.host_shard, size.sent_shard) for size in layout.units[1:3]] == [
        (0, 400, 400),
        (200, 0, 0),
    ]


PLACES = ("device", "host")


@pytest.mark.parametrize("itemsizes", [(4,), (4, 2)])
def test_pinned_shards_take_powers_of_two_in_the_dtypes_at_rest_and_gathered(model, linear, itemsizes):
    frozen = linear("a", 3, 5, frozen=True)
    parameters = tuple(dataclasses.replace(each, gathered_itemsize=itemsizes[-1]) for each in frozen.parameters)
    profile = model(dataclasses.replace(frozen, parameters=parameters), linear("b", 2, 2))
    found = step_of(profile)
    modes = (DP, ZDP.but(shard="host"), ZDP)
    sizes = [size * chunk_elements(each, 2) for each in found.units[1].parameters for size in itemsizes]
    (_, size, _) = FSDP2().layout_in(found, modes).units
    assert (size.host_shard, size.sent_shard) == (4 * (6 * 5 // 4 + 1 + 3), itemsizes[-1] * 11)
    assert host_bytes(found, modes) == sum(sizes)
    pinned = dataclasses.replace(found, cluster=dataclasses.replace(found.cluster, host_copies_overlap=True))
    powers = [next(2**k for k in range(9) if 2**k >= size) for size in sizes]
    assert host_bytes(pinned, modes) == sum(powers) > sum(sizes)


@pytest.mark.parametrize(
    ("mode", "num_micro_batches", "expected"), [(ZDP, 1, 2), (ZDP, 3, 6), (DP, 3, 3), (HPZ, 3, 3), (RESIDENT, 3, 0)]
)
def test_each_all_gather_of_the_shard_takes_a_copy(setting, mode, num_micro_batches, expected):
    found = given(setting)
    (*_, last) = found.units
    there = mode.but(shard="host") if mode != RESIDENT else mode
    assert effects_of(there).counts(last, num_micro_batches=num_micro_batches)["copy_in"] == expected
    workload = Workload(micro_batch_size=1, num_micro_batches=num_micro_batches)
    seconds = copies_s(last, there, cluster=found.cluster, workload=workload)
    assert seconds == pytest.approx(expected * 1600 / 2 * 1e-3)


@pytest.mark.parametrize("contention", [Contention(), Contention(computing=1.0, collectives=1.0 + 1e-12)])
@pytest.mark.parametrize(
    ("world_size", "is_asynchronous", "hides"), [(2, True, False), (2, False, True), (1, True, True), (1, False, True)]
)
def test_copies_hold_up_computing_but_on_one_rank_and_where_gathers_begin_by_themselves(
    setting, contention, world_size, is_asynchronous, hides
):
    """Forward and backward of each unit take 1 s, and its copy 0.4 or 0.8 s, or twice that on one rank."""
    engine = FSDP2(asynchronous_unshard=is_asynchronous)
    options = {"engine": engine, "contention": contention, "host_copies_overlap": True}
    found = given(setting, world_size=world_size, overlaps=True, **options)
    host = (DP, *(ZDP.but(shard="host") if unit["frozen"] else ZDP for unit in OPERATORS))
    times_s = [found.costs.step_time_s(modes) for modes in (tuple(map(on_device, host)), host)]
    assert times_s[1] == pytest.approx(simulate_step(found, host, engine=engine).time_s)
    pairs = zip(found.units, host, strict=True)
    copied_s = sum(copies_s(*each, cluster=found.cluster, workload=found.workload) for each in pairs)
    exposed_s = times_s[1] - times_s[0]
    assert copied_s == pytest.approx((0.4 + 2 * 0.4 + 2 * 0.8) * 2 / world_size)
    assert 0 < exposed_s < 0.7 * copied_s if hides else exposed_s == pytest.approx(copied_s)


@pytest.mark.parametrize("search", SOLVERS)
@pytest.mark.parametrize(
    ("world_size", "overlaps", "is_asynchronous"),
    [(1, False, True), (2, False, True), (2, True, True), (2, True, False)],
)
@pytest.mark.parametrize("modes", [MODES, BOTH])
def test_modes_fit_and_are_about_as_fast_as_any_that_do(setting, search, world_size, overlaps, is_asynchronous, modes):
    engine = FSDP2(asynchronous_unshard=is_asynchronous)
    found = given(setting, OPERATORS[:3], world_size, overlaps, modes, HOST, engine=engine)
    places = {frozenset(filled.modes[unit]["shard"] for unit in (1, 3)) for filled in filled_at_shares(found, search)}
    assert {frozenset({"host"}), frozenset({"device"})} <= places or (places and not is_asynchronous)


SPACE = SearchSpace(
    modes=("ZDP", "DP"),
    sync=("every",),
    shards=("device", "host"),
    slices=(1,),
    activations=("keep",),
    share_units=False,
    min_unit_bytes=0,
)


@pytest.mark.parametrize("overlaps", [False, True])
def test_plans_keep_both_limits_and_are_about_as_fast_as_any_that_do(setting, overlaps):
    found = given(setting, OPERATORS[:3], overlaps=overlaps)
    hosts = {plan.host_bytes for plan, _ in plans_within_limits(found, SPACE, (0.1, 0.3, 0.6), (0, 400, 800))}
    assert len(hosts) == 3


@pytest.mark.parametrize("overlaps", [False, True])
def test_plans_with_shards_of_what_is_trained_there_keep_both_limits(setting, overlaps):
    trained = [{**unit, "frozen": index == 2} for index, unit in enumerate(OPERATORS[:3])]
    found = given(setting, trained, overlaps=overlaps, modes=BOTH, optimizer=HOST)
    space = dataclasses.replace(SPACE, states=("device", "host"))
    plans = [plan for plan, _ in plans_within_limits(found, space, (0.0, 0.2, 0.5), (0, 1600, 3200))]
    places = {(each["states"], each["shard"]) for plan in plans for unit in plan.units for each in unit.treatments}
    assert ("host", "host") in places


@pytest.mark.parametrize("overlaps", [False, True])
def test_all_frozen_shards_are_there_where_no_other_place_is_offered_and_plans_tell(setting, overlaps):
    root = {"name": "", "parameter_bytes": 400, "activation_bytes_per_sample": 100, "frozen": True}
    found = given(setting, [root, *OPERATORS], overlaps=overlaps)
    options = {"micro_batch_size": 1, "engine": found.engine, "memory_limit_bytes": 10**6}
    alone = dataclasses.replace(SPACE, shards=("host",))
    plan = make_plan(found.profile, found.cluster, search_space=alone, **options)
    assert {(unit.name, *{each["shard"] for each in unit.treatments}) for unit in plan.units} == {
        ("1", "device"),
        *((name, "host") for name in ("", "0", "2", "3")),
    }
    assert plan.host_bytes == (400 + 800 + 800 + 1600) // 2
    assert any(note.startswith("shards of 4 of 5 units, 1.76 KiB per rank, are in memory") for note in plan.notes)
    (last,) = (unit for unit in plan.units if unit.name == "3")
    assert "; its shard is on the host: 800 B less for 800 ms" in explain([last], plan)
    with pytest.raises(InfeasibleError, match=r"needs 1\.76 KiB of its host.s memory, .* 1\.66 KiB: 100 B are"):
        make_plan(found.profile, found.cluster, search_space=alone, host_limit_bytes=1700, **options)


def test_an_error_tells_of_shards_that_could_be_there(setting):
    found, space = given(setting), dataclasses.replace(SPACE, shards=("device",))
    options = {"micro_batch_size": 1, "engine": found.engine, "search_space": space}
    least_bytes = make_plan(found.profile, found.cluster, memory_limit_bytes=10**6, **options).all_zdp_peak_bytes
    text = (
        r"It fits with the shards of 1 of 4 units on the host, 1\.\d\dx slower:"
        r" SearchSpace\(shards=\('device', 'host'\)\)"
    )
    with pytest.raises(InfeasibleError, match=text):
        make_plan(found.profile, found.cluster, memory_limit_bytes=least_bytes - 1, **options)
    trained = dataclasses.replace(found.profile, optimizer=OptimizerProfile(s_per_element=1e-3))
    with pytest.raises(InfeasibleError, match=r"With optimizer states and shards on the host [\d.]+ \w+ are"):
        make_plan(trained, found.cluster, memory_limit_bytes=600, **options)


def test_in_nodes_shards_there_are_those_over_all_ranks(setting):
    modes = modes_of(["ZDP", "HSDP"], ["every"], shards=["device", "host"])
    found = dataclasses.replace(given(setting, modes=modes), cluster=TWO_NODES)
    homes = {(mode["home"], mode["shard"]) for mode in found.costs.options[1]}
    assert homes == {("all", "host"), ("all", "device"), ("node", "device")}
    alone = dataclasses.replace(found, modes=modes_of(["ZDP", "HSDP", "resident"], ["every"], shards=["host"]))
    assert alone.costs.options[1] == (ZDP.but(shard="host"),)
    assert alone.costs.options[2] == (ZDP, HSDP)
    short = dataclasses.replace(found, host_room_bytes=300)
    there = [any(mode["shard"] == "host" for mode in of) for of in short.costs.options[1:]]
    assert there == [True, False, False, True]  # 100 and 200 bytes of eight ranks


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_is_shared_with_what_is_trained_has_its_states_there_where_that_is_the_only_place(setting, world_size):
    """Small trained operators are in the root, until a block of frozen ones becomes one unit."""
    small = {"parameter_bytes": 8, "forward_s_per_sample": 0.1}
    layers = [
        operator
        for index in range(3)
        for operator in (
            {**OPERATORS[0], "name": f"h.{index}.a", "frozen": True},
            {**OPERATORS[0], "name": f"h.{index}.b", "frozen": True},
            {**small, "name": f"h.{index}.c"},
        )
    ]
    overhead = UnitOverhead(fixed_s=0.1)
    found = given(setting, layers, world_size=world_size, unit_overhead=dict.fromkeys(UNIT_PARTS, overhead))
    optimizer = OptimizerProfile(s_per_element=1e-3, host_s_per_element=4e-3)
    space = SearchSpace(states=("host",), shards=("host",), slices=(1,), min_unit_bytes=16)
    profile = dataclasses.replace(found.profile, optimizer=optimizer)
    plan = make_plan(profile, found.cluster, memory_limit_bytes=10**6, micro_batch_size=1, search_space=space)
    places = {(unit.gradient_bytes > 0, each["states"]) for unit in plan.units for each in unit.treatments}
    assert places <= {(True, "host"), (False, "device")}
