"""Seconds of a unit, term by term: what they have in common, and each against numbers worked out by hand."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_osdp.core.affine import Affine
from lightning_osdp.core.axes import ALL_MODES, DP, MODES, RESIDENT, ZDP
from lightning_osdp.core.cluster import UNIT_PARTS, Cluster, Link, UnitOverhead
from lightning_osdp.core.exchange import Exchange
from lightning_osdp.core.profile import ModelProfile, OperatorProfile, OptimizerProfile, ParameterProfile
from lightning_osdp.core.step import Step
from lightning_osdp.core.units import partition
from lightning_osdp.planner.cost import (
    TERMS,
    Workload,
    apart_s,
    optimizer_s,
    overhead_part_s,
    overhead_s,
    saved_bytes,
    unit_s,
)
from lightning_osdp.planner.cost.terms import activations_s, communication_s, compute_s, exchange_s
from lightning_osdp.planner.engine import EXCHANGES
from lightning_osdp.planner.simulation import simulate_step
from tests.support.tiers import examples

# ---- every term

cases = st.fixed_dictionaries(
    {
        "parameter_bytes": st.integers(0, 2**35),
        "frozen": st.booleans(),
        "num_calls": st.integers(1, 4),
        "activation_bytes_per_sample": st.floats(0, 1e9),
        "forward_s_per_sample": st.floats(0, 1.0),
        "backward_s_per_sample": st.floats(0, 1.0),
    }
)
sizes = {"world_size": st.integers(1, 512), "samples": st.integers(1, 64), "number": st.integers(1, 8)}


@pytest.mark.parametrize("name", TERMS)
@examples(50)
@given(case=cases, **sizes)
def test_every_term_is_pure_and_charges_nothing_negative(
    unit, cluster, workload, name, case, world_size, samples, number
):
    one, ring, work = (
        unit(**case),
        cluster(world_size, latency_s=1e-5, seconds_per_byte=1e-10),
        workload(samples, number),
    )
    for mode in MODES.values():
        time_s = TERMS[name](one, mode, cluster=ring, workload=work)
        assert time_s >= 0
        assert time_s == TERMS[name](one, mode, cluster=ring, workload=work)


@examples(50)
@given(bytes_of=st.lists(st.integers(1, 2**20), min_size=2, max_size=6), mode=st.sampled_from(ALL_MODES), **sizes)
def test_one_unit_in_place_of_several_saves_no_more_than_their_latencies_and_what_is_fixed(
    unit, cluster, workload, bytes_of, mode, world_size, samples, number
):
    overhead = {part: UnitOverhead(fixed_s=1e-4, seconds_per_byte=1e-10) for part in UNIT_PARTS}
    ring = replace(cluster(world_size, latency_s=1e-5, seconds_per_byte=1e-10), unit_overhead=overhead)
    given = {"cluster": ring, "workload": workload(samples, number)}
    apart = sum(unit_s(unit(num_bytes), mode, **given) for num_bytes in bytes_of)
    together = unit_s(unit(sum(bytes_of)), mode, **given)
    assert apart - together <= apart_s(len(bytes_of) - 1, **given) * (1 + 1e-9) + 1e-12


def test_units_are_dearer_apart_by_two_all_gathers_and_a_reduce_scatter_a_micro_batch(cluster, workload):
    overhead = {part: UnitOverhead(fixed_s=0.1, seconds_per_byte=1.0) for part in UNIT_PARTS}
    ring = replace(cluster(4, latency_s=0.01, seconds_per_byte=1e-10), unit_overhead=overhead)
    # three steps of each collective; two gathers, a flatten and a reduce
    assert apart_s(5, cluster=ring, workload=workload(1, 2)) == pytest.approx(5 * 2 * (3 * 3 * 0.01 + 4 * 0.1))
    assert apart_s(5, cluster=cluster(1, latency_s=0.01), workload=workload(1, 2)) == 0.0


@pytest.mark.parametrize("name", TERMS)
@examples(50)
@given(case=cases, **sizes)
def test_zdp_is_never_faster_than_dp(unit, cluster, workload, name, case, world_size, samples, number):
    one, ring, work = (
        unit(**case),
        cluster(world_size, latency_s=1e-5, seconds_per_byte=1e-10),
        workload(samples, number),
    )
    zdp_s, dp_s = (TERMS[name](one, mode, cluster=ring, workload=work) for mode in (ZDP, DP))
    assert zdp_s >= dp_s


@pytest.mark.parametrize("name", TERMS)
@examples(50)
@given(case=cases, **sizes)
def test_terms_are_linear_in_the_micro_batch_and_modes_differ_by_the_same_at_every_size(
    unit, cluster, workload, name, case, world_size, samples, number
):
    # the sweep over sizes relies on this: a bound at one size bounds all larger ones
    one, ring = unit(**case), cluster(world_size, latency_s=1e-5, seconds_per_byte=1e-10)

    def time_s(mode, size):
        return TERMS[name](one, mode, cluster=ring, workload=workload(size, number))

    zdp, dp = ([time_s(mode, size) for size in (samples, 2 * samples)] for mode in (ZDP, DP))
    assert zdp[1] - zdp[0] == pytest.approx(dp[1] - dp[0])
    assert zdp[1] <= 2 * zdp[0] * (1 + 1e-12)
    third = time_s(ZDP, 3 * samples)
    assert third - zdp[1] == pytest.approx(zdp[1] - zdp[0], abs=1e-9 * third)


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_a_unit_takes_the_sum_of_the_terms(unit, cluster, workload, mode):
    one = unit(800, activation_bytes_per_sample=3.0, forward_s_per_sample=2.0)
    arguments = {"cluster": cluster(4), "workload": workload(5)}
    assert unit_s(one, mode, **arguments) == pytest.approx(sum(term(one, mode, **arguments) for term in TERMS.values()))


# ---- communication: equation 2 against numbers worked out by hand


def seconds(unit, cluster, workload):
    """Returns a unit's seconds of communication under ZDP and under DP."""
    return [communication_s(unit, mode, cluster=cluster, workload=workload) for mode in (ZDP, DP)]


@pytest.mark.parametrize(
    ("world_size", "zdp_s", "dp_s"),
    [
        # S = 800 bytes, alpha = 2 s, beta = 1/100 s per byte
        # N = 2: one ring 1 * 2 + 1/2 * 8 =  6 s; three of them 18 s, two 12 s
        (2, 18.0, 12.0),
        # N = 4: one ring 3 * 2 + 3/4 * 8 = 12 s
        (4, 36.0, 24.0),
        # N = 8: one ring 7 * 2 + 7/8 * 8 = 21 s
        (8, 63.0, 42.0),
        (1, 0.0, 0.0),
    ],
)
def test_zdp_takes_three_rings_and_dp_two(unit, cluster, workload, world_size, zdp_s, dp_s):
    ring = cluster(world_size, latency_s=2.0, seconds_per_byte=0.01)
    assert seconds(unit(800), ring, workload()) == pytest.approx([zdp_s, dp_s])


def test_all_gather_and_reduce_scatter_have_their_own_cost(unit, workload):
    # N = 2, S = 8: AG = 1 + 4 * 1 = 5 s, RS = 10 + 4 * 2 = 18 s; ZDP 2 * 5 + 18, DP 5 + 18
    cluster = Cluster(
        world_size=2,
        all_gather=Link(latency_s=1.0, seconds_per_byte=1.0),
        reduce_scatter=Link(latency_s=10.0, seconds_per_byte=2.0),
    )
    assert seconds(unit(8), cluster, workload()) == [28.0, 23.0]


def test_a_frozen_unit_is_gathered_but_reduces_nothing(model, operator, cluster, workload):
    # N = 4, S = 400: a ring takes 300 s; backward comes to what is frozen behind what is trained, and to nothing else
    profile = model(operator("m", 400, frozen=True), operator("first", 400), operator("n", 400, frozen=True))
    _, before, _, behind = partition(profile, min_unit_bytes=0)
    assert seconds(before, cluster(4), workload()) == [300.0, 300.0]
    assert seconds(behind, cluster(4), workload()) == [600.0, 300.0]


def test_a_partly_frozen_unit_reduces_the_gradients_that_there_are(unit, cluster, workload):
    # two rings of 400 bytes or one, 300 s each, and one of 100, 75 s
    partly = unit(400, trainable_bytes=100, gradient_bytes=100)
    assert seconds(partly, cluster(4), workload()) == [675.0, 375.0]


def test_a_unit_without_parameters_of_its_own_costs_nothing(unit, cluster, workload):
    assert seconds(unit(0), cluster(4, latency_s=1.0), workload()) == [0.0, 0.0]


def test_a_unit_that_is_called_twice_is_gathered_again_if_it_was_freed(unit, cluster, workload):
    # a ring takes 300 s: ZDP gathers twice in forward and twice in backward, DP in forward and, as backward frees it
    # after its second call, for the first one again; both reduce once
    assert seconds(unit(400, num_calls=2), cluster(4), workload()) == [1500.0, 900.0]


def test_every_micro_batch_communicates_whatever_its_size(unit, cluster, workload):
    assert seconds(unit(400), cluster(4), workload(num_micro_batches=3)) == [2700.0, 1800.0]
    assert seconds(unit(400), cluster(4), workload(micro_batch_size=7)) == [900.0, 600.0]


def test_what_is_gathered_is_what_travels(unit, cluster, workload):
    halved = unit(400, gathered_bytes=200, gradient_bytes=200)
    assert seconds(halved, cluster(4), workload()) == [450.0, 300.0]


# ---- computing: the gamma term of equation 2


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@pytest.mark.parametrize(
    ("micro_batch_size", "num_micro_batches", "expected_s"),
    # gamma = 2 s forward + 3 s backward per sample
    [(1, 1, 5.0), (4, 1, 20.0), (4, 3, 60.0)],
)
def test_computing_takes_gamma_per_sample(
    unit, cluster, workload, mode, micro_batch_size, num_micro_batches, expected_s
):
    computing = unit(8, forward_s_per_sample=2.0, backward_s_per_sample=3.0)
    work = workload(micro_batch_size, num_micro_batches)
    for world_size in (1, 8):  # each rank computes its own samples
        assert compute_s(computing, mode, cluster=cluster(world_size), workload=work) == expected_s


# ---- overhead: as measured, as often as it happens, and nothing where nothing was measured

FREE = Link(latency_s=0.0, seconds_per_byte=0.0)
MEASURED = {
    part: UnitOverhead(fixed_s=1e-3 * 10**place, seconds_per_byte=1e-9) for place, part in enumerate(UNIT_PARTS)
}
EACH_S = {part: 1e-3 * 10**place + 1e-9 * 10**6 for place, part in enumerate(UNIT_PARTS)}
CLUSTER = Cluster(world_size=2, all_gather=FREE, reduce_scatter=FREE, unit_overhead=MEASURED)
OPERATOR = OperatorProfile(
    name="a",
    kind="Linear",
    enclosing=("a", ""),
    parameter_bytes=10**6,
    num_trainable=250_000,
    gathered_bytes=10**6,
    trainable_bytes=10**6,
    gradient_bytes=10**6,
    optimizer_bytes=0,
)
ROOT, UNIT = partition(ModelProfile.in_turn([OPERATOR]), min_unit_bytes=0)


@pytest.mark.parametrize("num_micro_batches", [1, 3])
@pytest.mark.parametrize(
    ("mode", "per_micro_batch", "once"),
    [
        (ZDP, {"gather": 2, "flatten": 1, "reduce": 1}, {}),
        (DP, {"gather": 1, "flatten": 1, "reduce": 1}, {}),
        # the last micro-batch reduces, all others accumulate
        (ZDP.but(sync="last"), {"gather": 2, "flatten": 1, "accumulate": 1}, {"reduce": 1, "accumulate": -1}),
        (DP.but(sync="last"), {"flatten": 1, "accumulate": 1}, {"gather": 1, "reduce": 1, "accumulate": -1}),
    ],
)
def test_parts_are_charged_as_often_as_they_happen(mode, per_micro_batch, once, num_micro_batches):
    workload = Workload(micro_batch_size=3, num_micro_batches=num_micro_batches)
    found_s = overhead_s(UNIT, mode, cluster=CLUSTER, workload=workload)
    counts = {part: num_micro_batches * per_micro_batch.get(part, 0) + once.get(part, 0) for part in UNIT_PARTS}
    assert found_s == pytest.approx(sum(count * EACH_S[part] for part, count in counts.items()))


def test_the_simulated_step_has_the_same_overhead(model, operator):
    profile = model(100, 200, operator("frozen", 300, frozen=True))
    units = partition(profile, min_unit_bytes=0)
    workload = Workload(micro_batch_size=1, num_micro_batches=5)
    for mode in ALL_MODES:
        modes = [DP if unit.is_root else mode for unit in units]
        terms = [
            overhead_s(unit, mode, cluster=CLUSTER, workload=workload) for unit, mode in zip(units, modes, strict=True)
        ]
        for overlaps in (False, True):
            cluster = replace(CLUSTER, overlaps=overlaps)
            found = simulate_step(Step(profile=profile, units=units, cluster=cluster, workload=workload), modes)
            assert found.overhead_s == pytest.approx(sum(terms))
            assert found.time_s == pytest.approx(sum(terms))  # nothing else takes time


def of_one_operator(*parameters):
    """A unit of these parameters."""
    trained = [each for each in parameters if each.is_trainable]
    whole, trainable = (4 * sum(each.num_elements for each in chosen) for chosen in (parameters, trained))
    made = replace(
        OPERATOR,
        parameters=parameters,
        num_trainable=trainable // 4,
        parameter_bytes=whole,
        gathered_bytes=whole,
        trainable_bytes=trainable,
        gradient_bytes=trainable,
    )
    return partition(ModelProfile.in_turn([made]), min_unit_bytes=0)[1]


def parameter(num_elements, *, is_trainable=True):
    return ParameterProfile(
        position=0, num_elements=num_elements, itemsize=4, gathered_itemsize=4, is_trainable=is_trainable
    )


@pytest.mark.parametrize(
    ("num_frozen", "num_trained", "gather_s", "gradients_s"),
    [
        # fixed 1 s; a second per 100 bytes, a tenth of it per tensor; 25 elements in each tensor
        (0, 2, 1 + 2 * 1.1, 1 + 2 * 1.1),
        (2, 1, 1 + 3 * 1.1, 1 + 1.1),
        (3, 0, 1 + 3 * 1.1, 0.0),
    ],
)
def test_what_is_frozen_is_gathered_but_has_no_gradients(num_frozen, num_trained, gather_s, gradients_s):
    each = UnitOverhead(fixed_s=1.0, seconds_per_byte=0.01, seconds_per_tensor=0.1)
    cluster = replace(CLUSTER, unit_overhead=dict.fromkeys(UNIT_PARTS, each))
    frozen = [parameter(25, is_trainable=False) for _ in range(num_frozen)]
    unit = of_one_operator(*frozen, *(parameter(25) for _ in range(num_trained)))
    found_s = {part: overhead_part_s(unit, part, cluster) for part in UNIT_PARTS}
    # hooks run in any case
    expected_s = {"gather": gather_s, "flatten": gradients_s or 1.0, "reduce": gradients_s, "accumulate": gradients_s}
    expected_s["stay"] = 1.0 + 0.1 * (num_frozen + num_trained)
    assert found_s == pytest.approx(expected_s)


@pytest.mark.parametrize(("reduced_itemsize", "reduce_s"), [(None, 2.0), (2, 2.0), (4, 3.0)])
def test_gradients_are_read_as_computed_and_written_as_reduced(reduced_itemsize, reduce_s):
    cluster = replace(CLUSTER, unit_overhead=dict.fromkeys(UNIT_PARTS, UnitOverhead(seconds_per_byte=0.01)))
    half = replace(parameter(100), gathered_itemsize=2, reduced_itemsize=reduced_itemsize)
    operator = replace(of_one_operator(half).operators[0], gathered_bytes=200, gradient_bytes=200)
    unit = partition(ModelProfile.in_turn([operator]), min_unit_bytes=0)[1]
    found_s = {part: overhead_part_s(unit, part, cluster) for part in UNIT_PARTS}
    assert found_s == pytest.approx({"gather": 2.0, "flatten": 2.0, "reduce": reduce_s, "accumulate": 2.0, "stay": 0.0})


@pytest.mark.parametrize("num_micro_batches", [1, 3])
def test_a_resident_unit_takes_the_host_one_call_in_a_step_and_others_those_after_the_first(num_micro_batches):
    unit = replace(of_one_operator(parameter(250_000, is_trainable=False)), modules=("a", "b", "c"))
    workload = Workload(micro_batch_size=1, num_micro_batches=num_micro_batches)
    cluster = replace(CLUSTER, call_s=100.0)
    found_s = {mode: overhead_s(unit, mode, cluster=cluster, workload=workload) for mode in (RESIDENT, ZDP)}
    assert found_s[RESIDENT] == pytest.approx(MEASURED["stay"].fixed_s + 100)
    each_s = EACH_S["gather"] + MEASURED["flatten"].fixed_s + 200  # backward does not come to it
    assert found_s[ZDP] == pytest.approx(num_micro_batches * each_s)
    root, again = (replace(unit, name="", modules=(), calls=unit.calls * number) for number in (1, 3))
    assert overhead_part_s(root, "flatten", cluster) == overhead_part_s(again, "flatten", cluster)


@pytest.mark.parametrize("mode", [ZDP, DP])
def test_a_frozen_unit_saves_no_reducing_in_the_last_micro_batch_only(mode):
    unit = of_one_operator(parameter(250_000, is_trainable=False))
    workload = Workload(micro_batch_size=1, num_micro_batches=4)
    every_s, last_s = (
        overhead_s(unit, mode.but(sync=sync), cluster=CLUSTER, workload=workload) for sync in ("every", "last")
    )
    gathers = 3 if mode == DP else 0  # a unit that is kept is gathered once a step
    assert every_s - last_s == pytest.approx(gathers * EACH_S["gather"])


def test_nothing_where_it_was_not_measured_or_the_unit_is_empty():
    unmeasured = replace(CLUSTER, unit_overhead={})
    assert overhead_s(UNIT, ZDP, cluster=unmeasured, workload=Workload(micro_batch_size=1)) == 0
    assert overhead_s(ROOT, DP, cluster=CLUSTER, workload=Workload(micro_batch_size=1)) == 0


def test_units_of_one_rank_have_their_hooks_and_copies():
    alone, workload = replace(CLUSTER, world_size=1), Workload(micro_batch_size=1)
    assert overhead_s(UNIT, ZDP, cluster=alone, workload=workload) == pytest.approx(
        overhead_s(UNIT, ZDP, cluster=CLUSTER, workload=workload)
    )


# ---- activations


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_to_keep_activations_takes_their_bytes_of_one_micro_batch_and_no_time(unit, cluster, workload, mode):
    saving = unit(8, activation_bytes_per_sample=2.5)
    assert [saved_bytes(saving, mode["saves"], size) for size in (1, 6)] == [2.5, 15.0]
    for ranks, size, number in [(1, 1, 1), (4, 1, 1), (4, 6, 1), (4, 6, 5)]:
        assert activations_s(saving, mode, cluster=cluster(ranks), workload=workload(size, number)) == 0.0


def test_what_is_fixed_of_the_optimizer_step_is_not_shared_among_ranks(model, cluster):
    profile = model(400, 800, optimizer=OptimizerProfile(fixed_s=0.25, s_per_element=0.01))
    assert optimizer_s(profile, cluster(1)) == pytest.approx(0.25 + 300 * 0.01)
    assert optimizer_s(profile, cluster(4)) == pytest.approx(0.25 + 75 * 0.01)


@pytest.mark.parametrize(
    ("kind", "operators", "agreeing"),
    [("column", ("a",), ["exchange_inputs"]), ("pair", ("a", "b"), ["exchange_inputs", "exchange_outputs"])],
)
def test_ranks_agree_by_way_of_their_hosts_before_inputs_and_the_end_of_a_pair(workload, kind, operators, agreeing):
    exchange = Exchange(kind, operators, *(Affine(0.0, 40.0),) * 3)
    link = Link(latency_s=1e-5, seconds_per_byte=1e-9)
    slow, fast = (
        Cluster(world_size=4, all_gather=link, reduce_scatter=link, agreement=Link(latency_s=s, seconds_per_byte=0.0))
        for s in (1e-3, 0.0)
    )
    more_s = {
        kind: exchange_s(exchange, kind, slow, workload(2)) - exchange_s(exchange, kind, fast, workload(2))
        for kind in EXCHANGES
    }
    assert more_s == {kind: pytest.approx(3e-3 if kind in agreeing else 0.0) for kind in EXCHANGES}
