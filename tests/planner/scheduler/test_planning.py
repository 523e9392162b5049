"""Plans: the choice of the micro-batch size, what a plan states, and what is said where there is none."""

import contextlib
import dataclasses
import itertools
import math

import pytest

from lightning_osdp.core.affine import Affine
from lightning_osdp.core.batch_policy import BatchPolicy
from lightning_osdp.core.cluster import UnitOverhead
from lightning_osdp.core.plans.plan import Plan
from lightning_osdp.core.plans.search_space import SearchSpace
from lightning_osdp.errors import ConfigurationError, InfeasibleError
from lightning_osdp.planner.engine import FSDP2, engine_of
from lightning_osdp.planner.scheduler import PlanMethod, judge_plan, make_plan
from lightning_osdp.planner.search import SOLVERS
from lightning_osdp.planner.simulation import simulate
from tests.support.plans import keeping, waiting

EVERY_UNIT = SearchSpace(min_unit_bytes=0)
ON_HOST = SearchSpace(min_unit_bytes=0, states=("device", "host"))


def plan(profile, cluster, **options):
    return make_plan(profile, cluster, **{"search_space": EVERY_UNIT, "memory_limit_bytes": 560, **options})


def test_the_best_throughput_is_neither_the_largest_batch_nor_the_shortest_step(uneven, cluster):
    ring = cluster(2, seconds_per_byte=0.01)
    best = plan(uneven, ring, micro_batch_size=BatchPolicy.scale())
    assert (best.micro_batch_size, best.peak_bytes) == (3, 549)
    assert best.step_time_s == pytest.approx(1.33)
    assert best.samples_per_s == pytest.approx(6 / 1.33)
    shortest, largest = (plan(uneven, ring, micro_batch_size=size) for size in (1, 4))
    assert (shortest.step_time_s, largest.step_time_s) == pytest.approx((1.13, 1.93))
    assert (shortest.samples_per_s, largest.samples_per_s) == pytest.approx((2 / 1.13, 8 / 1.93))
    assert (shortest.peak_bytes, largest.peak_bytes) == (506, 529)  # rs(large) = 154.5+1.5 +350
    with pytest.raises(InfeasibleError):
        plan(uneven, ring, micro_batch_size=5)


@pytest.mark.parametrize(("most", "expected"), [(None, 3), (4, 3), (3, 3), (2, 2), (1, 1)])
def test_no_more_samples_are_chosen_than_allowed(uneven, cluster, most, expected):
    found = plan(uneven, cluster(2, seconds_per_byte=0.01), micro_batch_size=BatchPolicy.scale(most))
    assert found.micro_batch_size == expected


def test_a_model_that_saves_nothing_takes_as_much_as_is_allowed(model, cluster):
    # 0.5 s of communication however many samples: the most allowed is best
    profile = model(100, loss_s_per_sample=0.01)
    for most in (1, 777):
        found = plan(
            profile,
            cluster(2, seconds_per_byte=0.01),
            memory_limit_bytes=10_000,
            micro_batch_size=BatchPolicy.scale(most),
        )
        assert found.micro_batch_size == most


def test_between_equal_sizes_the_smallest_is_chosen(model, cluster):
    found = plan(
        model(100, loss_s_per_sample=0.5),
        cluster(1),
        memory_limit_bytes=10_000,
        micro_batch_size=BatchPolicy.scale(64),
    )
    assert found.micro_batch_size == 1


def test_what_keeping_saves_is_stated_even_where_it_is_not_offered(uneven, cluster):
    found = plan(
        uneven,
        cluster(2, seconds_per_byte=0.01),
        micro_batch_size=1,
        search_space=SearchSpace(modes=("ZDP",), min_unit_bytes=0),
    )
    assert [unit.modes for unit in found.units] == [("DP",), *([("ZDP",)] * 4)]
    # one ring of each: 100 and 1 bytes over two ranks
    saves_s, sizes = zip(*map(keeping, found.units), strict=True)
    assert saves_s == pytest.approx([0.0, 0.5, 0.005, 0.005, 0.005])
    assert sizes == (0, 100, 1, 1, 1)
    assert found.predicted_gain == 1.0


def test_units_are_in_forward_order_and_name_what_they_hold(model, operator, cluster):
    profile = model(operator("h.0", 300), operator("h.0.ln", 1, kind="LayerNorm"), operator("head", 200))
    found = plan(profile, cluster(2), memory_limit_bytes=10**6, micro_batch_size=1, search_space=SearchSpace())
    assert [(unit.name, unit.operators, unit.kind) for unit in found.units] == [
        ("", (), ""),
        ("h.0", ("h.0", "h.0.ln"), "Linear, LayerNorm"),
        ("head", ("head",), "Linear"),
    ]
    assert [unit.parameter_bytes for unit in found.units] == [0, 301, 200]


def test_of_equal_operators_the_later_ones_are_kept(model, operator, cluster):
    # as in tests/planner/assign/test_cases.py: m5 is copied out in forward at 1650 with five freed, and 200 more are
    # allowed
    profile = model(*(operator(f"m{i}", 100, activation_bytes_per_sample=50) for i in range(6)))
    found = plan(profile, cluster(2), memory_limit_bytes=1850, micro_batch_size=1)
    assert [unit.modes[0] for unit in found.units] == ["DP", "ZDP", "ZDP", "ZDP", "DP", "DP", "DP"]


def test_where_fewer_samples_fit_the_error_says_how_many(uneven, cluster):
    with pytest.raises(InfeasibleError) as caught:
        plan(uneven, cluster(2), micro_batch_size=6)
    # 206 + 480 + 0 of all-ZDP at the loss, + 1 of c while it runs; large: 100 + 400/2, c: 1 + 4/2 + 6 * 80
    assert str(caught.value) == (
        "No plan fits: the limit is 560 B per rank, and a micro-batch of 6 on 2 ranks needs at least 687 B"
        " (in forward at 'c': parameter shards 52 B, optimizer state 103 B, reduced gradients 52 B,"
        " gathered parameters 1 B, activations 480 B)."
        " Largest contributors: c (483 B), large (300 B), a (3 B)."
        " Nearest remedy: micro-batches of 3 fit: OSDPStrategy(batch_size=3) with"
        " Trainer(accumulate_grad_batches=2) keeps the global batch."
        " Activations dominate; name modules that may recompute them: activation_checkpointing_policy={Block}."
        " It fits with the states of 1 of 4 units and the shards of 1 of 4 units on the host:"
        " SearchSpace(states=('device', 'host'), shards=('device', 'host'))."
    )


def test_the_global_batch_that_a_remedy_keeps_has_all_micro_batches(uneven, cluster):
    with pytest.raises(InfeasibleError, match=r"batch_size=3\) with Trainer\(accumulate_grad_batches=6\) keeps"):
        plan(uneven, cluster(2), micro_batch_size=BatchPolicy.fixed(6, 3))
    plan(uneven, cluster(2), micro_batch_size=BatchPolicy.fixed(3, 6))
    with pytest.raises(
        InfeasibleError, match=r"OSDPStrategy\(batch_size=1\) with Trainer\(accumulate_grad_batches=5\)"
    ):
        plan(uneven, cluster(2), micro_batch_size=5)


def test_a_batch_beyond_all_memory_is_refused_without_trying_each_smaller_one(uneven, cluster):
    with pytest.raises(InfeasibleError, match=r"Nearest remedy: a micro-batch of 4 fits, which changes"):
        plan(uneven, cluster(2), micro_batch_size=2**50)


def test_where_not_even_one_sample_fits_the_error_says_what_would_help(uneven, cluster):
    with pytest.raises(InfeasibleError) as caught:
        plan(uneven, cluster(2), micro_batch_size=BatchPolicy.scale(), memory_limit_bytes=410)
    # rs(large): 154.5 +1.5 +100 (sent) +100 (last) +50 +100 (gloo's copy); on four ranks 77.25 +0.75 +325 = 403
    assert str(caught.value) == (
        "No plan fits: the limit is 410 B per rank, and a micro-batch of 1 on 2 ranks needs at least 506 B"
        " (in reduce-scatter at 'large': parameter shards 52 B, optimizer state 103 B, reduced gradients 2 B,"
        " unsharded gradients 350 B)."
        " Largest contributors: large (300 B), c (83 B), a (3 B)."
        " Nearest remedy: raise memory_limit to '506 B', or use 4 ranks."
        " It fits with the states of 1 of 4 units on the host: SearchSpace(states=('device', 'host'))."
    )
    timed = dataclasses.replace(uneven, optimizer=dataclasses.replace(uneven.optimizer, host_s_per_element=1.0))
    hosted = plan(timed, cluster(2), micro_batch_size=1, memory_limit_bytes=410, search_space=ON_HOST)
    assert [unit.name for unit in hosted.units if unit.treatments[0]["states"] == "host"] == ["large", "a", "b", "c"]
    # states, and copies of shards and of their gradients
    assert (hosted.peak_bytes, hosted.host_bytes, hosted.host_limit_bytes) == (403, 206, None)
    for free_bytes, host_bytes in ((206, 206), (205, 204), (200, 200)):
        free = dataclasses.replace(cluster(2), host_memory_bytes=free_bytes)
        found = plan(timed, free, micro_batch_size=1, memory_limit_bytes=410, search_space=ON_HOST)
        assert (found.peak_bytes, found.host_bytes) == (506 - host_bytes // 2, host_bytes)
        assert found.host_limit_bytes == free_bytes
    lacking = "for which a rank needs 200 B of its host's memory, and may take 199 B: 1 B are lacking. Use smaller"
    options = {"micro_batch_size": 1, "memory_limit_bytes": 410}
    with pytest.raises(InfeasibleError, match=lacking):
        plan(timed, free, host_limit_bytes=199, search_space=ON_HOST, **options)
    # 154.6 s with states on the device, and 12.5 elements
    with pytest.raises(InfeasibleError, match=r"of 1 of 4 units on the host, 1\.08x slower: Search"):
        plan(timed, cluster(2), **options)
    with pytest.raises(InfeasibleError, match="it would fit, for which a rank needs 200 B of the host's memory, and"):
        plan(timed, cluster(2), host_limit_bytes=199, **options)
    with pytest.raises(
        InfeasibleError, match=r"needs at least 403 B .*: SearchSpace\(shards=\('device', 'host'\)\)\.$"
    ):
        plan(timed, cluster(2), micro_batch_size=1, memory_limit_bytes=400, search_space=ON_HOST)
    plan(uneven, cluster(2), micro_batch_size=1, memory_limit_bytes=506)
    plan(uneven, cluster(4), micro_batch_size=1, memory_limit_bytes=410)


def test_more_ranks_are_no_remedy_for_what_is_not_sharded(uneven, cluster):
    with pytest.raises(InfeasibleError, match=r"raise memory_limit to '506 B'\. With"):
        plan(uneven, cluster(2), micro_batch_size=1, memory_limit_bytes=300)  # one gradient three times


def test_on_one_rank_the_error_speaks_of_one_rank_and_the_root_is_named(model, operator, cluster):
    with pytest.raises(InfeasibleError) as caught:
        plan(model(operator("", 100)), cluster(1), micro_batch_size=1, memory_limit_bytes=10)
    # parameters, Adam, the gradient of the step before, and a copy of the parameters
    assert str(caught.value) == (
        "No plan fits: the limit is 10 B per rank, and a micro-batch of 1 on 1 rank needs at least 500 B"
        " (in forward: parameter shards 100 B, optimizer state 200 B, reduced gradients 100 B,"
        " gathered parameters 100 B)."
        " Largest contributors: the root unit (500 B)."
        " Nearest remedy: raise memory_limit to '500 B'."
        " With optimizer states and shards on the host 200 B are needed:"
        " SearchSpace(states=('device', 'host'), shards=('device', 'host'))."
    )


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"micro_batch_size": 0},
            "micro_batch_size must be a BatchPolicy or a number of samples, at least one, got 0.",
        ),
        (
            {"micro_batch_size": -3},
            "micro_batch_size must be a BatchPolicy or a number of samples, at least one, got -3.",
        ),
        (
            {"micro_batch_size": "big"},
            "micro_batch_size must be a BatchPolicy or a number of samples, at least one, got 'big'.",
        ),
        (
            {"micro_batch_size": 1.5},
            "micro_batch_size must be a BatchPolicy or a number of samples, at least one, got 1.5.",
        ),
        ({"memory_limit_bytes": 0}, "memory_limit_bytes must be at least 1 and less than 2^63, got 0."),
        (
            {"memory_limit_bytes": 2**63},
            "memory_limit_bytes must be at least 1 and less than 2^63, got 9223372036854775808.",
        ),
    ],
)
def test_options_that_make_no_sense_are_refused(uneven, cluster, options, text):
    with pytest.raises(ConfigurationError) as caught:
        plan(uneven, cluster(2), **{"micro_batch_size": 1, **options})
    assert str(caught.value) == text


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda: PlanMethod(search="magic"),
            f"search must be one of {tuple(SOLVERS)}, got 'magic'.",
        ),
        (lambda: PlanMethod(cost_model="guess"), "cost_model must be one of ('simulate', 'paper'), got 'guess'."),
        (
            lambda: BatchPolicy.fixed(0),
            "micro_batch_size must be a BatchPolicy or a number of samples, at least one, got 0.",
        ),
        (lambda: BatchPolicy.fixed(1, 0), "num_micro_batches must be at least 1, got 0."),
        (lambda: BatchPolicy.scale(0), "max_micro_batch_size must be None or at least 1, got 0."),
        (lambda: BatchPolicy.scale(num_micro_batches=0), "num_micro_batches must be at least 1, got 0."),
        (lambda: BatchPolicy.divide(0), "num_samples must be at least 1, got 0."),
        (
            lambda: BatchPolicy.divide(6, (2, 4)),
            "micro_batch_sizes must be divisors of num_samples=6, at least one, got (2, 4).",
        ),
        (
            lambda: BatchPolicy.divide(6, ()),
            "micro_batch_sizes must be divisors of num_samples=6, at least one, got ().",
        ),
    ],
)
def test_batches_that_make_no_sense_are_refused(make, text):
    with pytest.raises(ConfigurationError) as caught:
        make()
    assert str(caught.value) == text


GIVEN = {
    "none": FSDP2(backward_prefetch="none"),
    "explicit": FSDP2(forward_prefetch=True),
    "implicit": FSDP2(asynchronous_unshard=False),
}


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("limit_bytes", [1950, 2050, 2150, 2350, 3000])
def test_prefetching_is_chosen_by_what_it_is_worth(model, operator, cluster, overlaps, limit_bytes):
    # base 1200; all-ZDP backward(m0) 1200 +350 +200 +200 in flight = 1950 without prefetch, and 100 more with it
    fields = {"forward_s_per_sample": 0.5, "backward_s_per_sample": 1.0}
    profile = model(*(operator(f"m{i}", 100, **fields) for i in range(8)))
    ring = dataclasses.replace(cluster(2, seconds_per_byte=0.02), overlaps=overlaps)
    options = {"micro_batch_size": 1, "memory_limit_bytes": limit_bytes}
    chosen = plan(profile, ring, **options)
    fitting = GIVEN if limit_bytes > 1950 else ("none",)
    given = {name: plan(profile, ring, engine=GIVEN[name], **options) for name in fitting}
    if not overlaps:
        assert engine_of(chosen) == GIVEN["none"]
        assert chosen.units == given["none"].units
        assert chosen.step_time_s == min(each.step_time_s for each in given.values())
        return
    # all units may be gathered ahead, or some of them
    assert chosen.step_time_s <= min(each.step_time_s for each in given.values()) * (1 + 1e-12)
    assert chosen.step_time_s < given["none"].step_time_s
    most = max(each.samples_per_s * (1 + each.gap) for each in given.values())
    assert chosen.samples_per_s * (1 + chosen.gap) >= most * (1 - 1e-3)


@pytest.mark.parametrize("modes", [None, ("ZDP", "DP", "resident", "replicated")])
def test_the_paper_plans_with_sums(model, operator, cluster, modes):
    # m_ZDP = 4 * 100 / 2, m_DP = 100 + 3 * 100 / 2; a ring takes 1 s, computing 2 s
    profile = model(
        *(operator(f"m{i}", 100, forward_s_per_sample=2.0, activation_bytes_per_sample=7) for i in range(3))
    )
    overhead = {"flatten": UnitOverhead(fixed_s=100.0)}
    ring = dataclasses.replace(cluster(2, seconds_per_byte=0.02), overlaps=True, unit_overhead=overhead)
    # the paper knows no other modes
    given = {"method": PlanMethod(cost_model="paper"), "search_space": SearchSpace(modes=modes)}
    for limit_bytes, kept in [(621, 0), (670, 0), (671, 1), (721, 2), (10**6, 3)]:
        found = plan(profile, ring, micro_batch_size=1, memory_limit_bytes=limit_bytes, **given)
        assert (found.cost_model, found.gap) == ("paper", 0.0)
        assert found.peak_bytes == 600 + 21 + 50 * kept
        assert found.step_time_s == pytest.approx(3 * (2 + 3) - kept)
        assert [unit.modes for unit in found.units].count(("DP",)) == kept + 1  # and the root
    with pytest.raises(InfeasibleError, match=r"needs at least 621 B \(in all phases: model states 600 B"):
        plan(profile, ring, micro_batch_size=1, memory_limit_bytes=620, **given)


@pytest.mark.parametrize(("frozen", "modes"), [(True, {"replicated"}), (False, {"DP"})])
def test_what_is_trained_beside_what_is_frozen_is_replicated_unasked(model, operator, cluster, frozen, modes):
    profile = model(operator("base", 4000, frozen=frozen), operator("adapter.down", 40), operator("adapter.up", 40))
    ring = dataclasses.replace(cluster(2, seconds_per_byte=0.02), unit_overhead={"gather": UnitOverhead(fixed_s=1.0)})
    given = {"micro_batch_size": 1, "memory_limit_bytes": 10**6}
    found = plan(profile, ring, **given)
    assert {mode for unit in found.units if unit.name.startswith("adapter") for mode in unit.modes} == modes
    assert found.search_space.modes is None
    assert ("replicated" in found.offered(profile).offered_modes) == frozen
    # judged anew, it is offered what it has
    assert judge_plan(found, profile, ring, memory_limit_bytes=10**6).step_time_s == pytest.approx(found.step_time_s)
    named = plan(profile, ring, search_space=SearchSpace(min_unit_bytes=0, modes=("ZDP", "DP", "resident")), **given)
    assert "replicated" not in {mode for unit in named.units for mode in unit.modes}


def test_a_profile_without_times_predicts_none(model, cluster):
    found = plan(model(100), cluster(1), micro_batch_size=1, memory_limit_bytes=10**6)
    assert (found.step_time_s, found.samples_per_s) == (0.0, 0.0)
    assert Plan.from_json(found.to_json()) == found


def test_accumulating_multiplies_the_work_and_keeps_gradients(uneven, cluster):
    ring = cluster(2, seconds_per_byte=0.01)
    space = SearchSpace(sync=("every",))
    one, three = (
        plan(uneven, ring, micro_batch_size=BatchPolicy.fixed(1, number), search_space=space) for number in (1, 3)
    )
    assert three.step_time_s == pytest.approx(3 * one.step_time_s)
    assert three.samples_per_s == pytest.approx(one.samples_per_s)
    assert (one.peak_bytes, three.peak_bytes) == (506, 556)  # and the other micro-batches' 50 bytes of the large one


def test_where_there_is_room_gradients_are_reduced_once_a_step(uneven, cluster):
    ring = cluster(2, seconds_per_byte=0.01)
    every, last = (
        plan(
            uneven,
            ring,
            micro_batch_size=BatchPolicy.fixed(1, 3),
            memory_limit_bytes=10**4,
            search_space=SearchSpace(min_unit_bytes=0, share_units=False, sync=sync),
        )
        for sync in (("every",), ("every", "last"))
    )
    assert {unit.sync for unit in every.units} == {"every"}
    assert {(unit.modes, unit.sync) for unit in last.units if unit.name} == {(("DP",), "last")}
    # one ring of each kind in place of three: half of what a unit holds is sent in each
    rings_s = sum(0.01 / 2 * unit.parameter_bytes for unit in last.units if unit.name)
    assert every.step_time_s - last.step_time_s == pytest.approx(2 * 2 * rings_s)
    for unit in last.units[1:]:
        saves_s, whole_bytes = waiting(unit)
        assert whole_bytes == math.ceil(0.5 * unit.parameter_bytes)  # S - S / 2
        assert saves_s == pytest.approx(2 * 2 * 0.01 / 2 * unit.parameter_bytes)
        # freed, it would be gathered six times a step, and not once
        assert keeping(unit)[0] == pytest.approx(5 * 0.01 / 2 * unit.parameter_bytes)
    assert [keeping(unit)[0] for unit in every.units[1:]] == pytest.approx(
        [3 * 0.01 / 2 * unit.parameter_bytes for unit in every.units[1:]]
    )


def test_with_less_room_some_units_accumulate(model, operator, cluster):
    even, ring = model(*(operator(f"{index}", 100) for index in range(8))), cluster(2, seconds_per_byte=0.01)

    def found(limit_bytes, **space):
        policy = BatchPolicy.fixed(1, 3)
        space = SearchSpace(min_unit_bytes=0, share_units=False, **space)
        return plan(even, ring, micro_batch_size=policy, memory_limit_bytes=limit_bytes, search_space=space)

    least = found(10**4, modes=("ZDP",), sync=("every",)).peak_bytes
    most = found(10**4).peak_bytes
    limits = range(least, most + 1, (most - least) // 16)
    plans = [found(limit_bytes) for limit_bytes in limits]
    assert all(each.peak_bytes <= limit_bytes for each, limit_bytes in zip(plans, limits, strict=True))
    assert len({tuple((unit.modes, unit.sync) for unit in each.units) for each in plans}) > 2
    assert any({unit.sync for unit in each.units if unit.name} == {"every", "last"} for each in plans)
    assert plans[-1].step_time_s < plans[0].step_time_s


def test_samples_of_a_step_are_divided_as_is_fastest(uneven, cluster):
    ring = cluster(2, seconds_per_byte=0.01)
    much = {"memory_limit_bytes": 10**4, "search_space": SearchSpace(sync=("every",))}
    auto = plan(uneven, ring, micro_batch_size=BatchPolicy.divide(6), **much)
    each = {
        size: plan(uneven, ring, micro_batch_size=BatchPolicy.fixed(size, 6 // size), **much).step_time_s
        for size in (1, 2, 3, 6)
    }
    assert (auto.micro_batch_size, auto.num_micro_batches) == (6, 1)
    assert auto.step_time_s == min(each.values())
    assert auto.gap == 0.0


def test_the_micro_batch_that_is_there_stays_unless_another_one_is_worth_it(uneven, cluster):
    idle = cluster(2, seconds_per_byte=0.0)  # nothing is saved by fewer micro-batches
    found = plan(uneven, idle, micro_batch_size=BatchPolicy.divide(6, (2, 1, 6)))
    assert (found.micro_batch_size, found.num_micro_batches) == (2, 3)


def test_what_does_not_fit_in_one_micro_batch_is_divided(uneven, cluster):
    ring = cluster(2, seconds_per_byte=0.01)
    limit_bytes = plan(uneven, ring, micro_batch_size=BatchPolicy.fixed(2, 3)).peak_bytes
    found = plan(uneven, ring, micro_batch_size=BatchPolicy.divide(6), memory_limit_bytes=limit_bytes)
    assert found.micro_batch_size * found.num_micro_batches == 6
    assert found.peak_bytes <= limit_bytes
    with pytest.raises(InfeasibleError, match="a micro-batch of 1 on 2 ranks needs at least"):
        plan(uneven, ring, micro_batch_size=BatchPolicy.divide(6), memory_limit_bytes=10)


@pytest.fixture(scope="module")
def wide(model, linear):
    """A Linear that is most of the model."""
    return model(linear("a", 16, 16), linear("large", 64, 64, position=1), linear("b", 16, 16, position=2))


def test_operators_are_split_where_nothing_else_fits(wide, cluster):
    ring = cluster(2, latency_s=0.001, seconds_per_byte=1e-6)
    whole = SearchSpace(min_unit_bytes=0, slices=(1,))
    limit_bytes = 50_000
    with pytest.raises(InfeasibleError, match="needs at least"):
        plan(wide, ring, micro_batch_size=1, memory_limit_bytes=limit_bytes, search_space=whole)
    found = plan(wide, ring, micro_batch_size=1, memory_limit_bytes=limit_bytes)
    large = next(unit for unit in found.units if unit.name == "large")
    assert large.operators == ("large",)
    assert large.num_slices > 1
    assert found.peak_bytes <= limit_bytes
    assert simulate(found, wide, ring).peak.peak_bytes == found.peak_bytes
    assert simulate(found, wide, ring).time_s == pytest.approx(found.step_time_s)
    assert Plan.from_json(found.to_json()) == found
    free = plan(wide, ring, micro_batch_size=1, memory_limit_bytes=10**6)
    assert {unit.num_slices for unit in free.units} == {1}  # where there is room, slices only cost latency


def test_scaling_goes_on_with_slices(wide, cluster):
    ring = cluster(2, latency_s=0.001, seconds_per_byte=1e-6)
    sizes = {
        slices: plan(
            dataclasses.replace(wide, batch_bytes=Affine(0.0, 1000.0)),
            ring,
            micro_batch_size=BatchPolicy.scale(),
            memory_limit_bytes=80_000,
            search_space=SearchSpace(min_unit_bytes=0, slices=slices),
        ).samples_per_s
        for slices in ((1,), (1, 2, 4))
    }
    assert sizes[1, 2, 4] > sizes[1,]


def test_plans_do_not_depend_on_the_solver_where_all_are_exact(uneven, cluster):
    ring = cluster(2, seconds_per_byte=0.01)
    for size, limit_bytes in itertools.product((1, 3), (510, 530, 560)):
        if size == 3 and limit_bytes < 560:
            continue
        plans = [
            plan(uneven, ring, micro_batch_size=size, memory_limit_bytes=limit_bytes, method=PlanMethod(search=name))
            for name in ("depth_first", "exhaustive")
        ]
        assert plans[0].units == plans[1].units


@pytest.mark.parametrize("limit_bytes", [540, 700, 10_000])
def test_the_gain_is_over_the_best_plain_fsdp_that_fits(uneven, cluster, limit_bytes):
    ring = cluster(2, seconds_per_byte=0.01)
    options = {"memory_limit_bytes": limit_bytes, "method": PlanMethod(search="exhaustive")}
    space = SearchSpace(min_unit_bytes=0, share_units=False)
    found = plan(uneven, ring, micro_batch_size=BatchPolicy.divide(4), search_space=space, **options)
    alternatives = []
    for size, sync in itertools.product((1, 2, 4), ("every", "last")):
        only = dataclasses.replace(space, modes=("ZDP",), sync=(sync,))
        sizes = {"micro_batch_size": BatchPolicy.fixed(size, 4 // size), "search_space": only}
        with contextlib.suppress(InfeasibleError):
            alternatives.append(plan(uneven, ring, **sizes, **options).step_time_s)
    assert found.all_zdp_step_time_s == pytest.approx(min(alternatives))
    assert found.all_zdp_peak_bytes <= limit_bytes
    assert found.predicted_gain >= 1.0


@pytest.mark.parametrize("limit_bytes", [700, 1500, 4000])
def test_where_any_micro_batch_may_be_chosen_the_gain_is_over_plain_fsdp_at_its_best(uneven, cluster, limit_bytes):
    ring = cluster(2, seconds_per_byte=0.01)
    space = SearchSpace(min_unit_bytes=0, share_units=False, slices=(1,))
    only, options = dataclasses.replace(space, modes=("ZDP",)), {"memory_limit_bytes": limit_bytes}
    found = plan(uneven, ring, micro_batch_size=BatchPolicy.scale(), search_space=space, **options)
    most = 0.0
    for size in range(1, 60):
        with contextlib.suppress(InfeasibleError):
            alone = plan(uneven, ring, micro_batch_size=size, search_space=only, **options)
            most = max(most, size * ring.world_size / alone.all_zdp_step_time_s)
    assert found.predicted_gain == pytest.approx(found.samples_per_s / most)


def test_plain_fsdp_that_does_not_fit_is_nothing_to_compare_with(wide, cluster):
    ring = cluster(2, latency_s=0.01, seconds_per_byte=0.001)
    whole = SearchSpace(min_unit_bytes=0, slices=(1,), modes=("ZDP",), sync=("every",))
    least = plan(wide, ring, micro_batch_size=1, search_space=whole, memory_limit_bytes=10**9)
    found = plan(wide, ring, micro_batch_size=1, memory_limit_bytes=least.all_zdp_peak_bytes - 1)
    assert found.peak_bytes < least.all_zdp_peak_bytes == found.all_zdp_peak_bytes
    assert (found.all_zdp_step_time_s, found.predicted_gain) == (0.0, 1.0)
