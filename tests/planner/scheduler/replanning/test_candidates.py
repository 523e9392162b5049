"""Candidates of a race: different plans of one structure that fit, each of which may follow any other."""

import contextlib
import dataclasses
import functools
import math
import random
from itertools import permutations

import pytest

from lightning_osdp.core.batch_policy import BatchPolicy
from lightning_osdp.core.cluster import UnitOverhead
from lightning_osdp.core.correction import Correction
from lightning_osdp.core.plans.plan import Plan
from lightning_osdp.core.plans.search_space import SearchSpace
from lightning_osdp.errors import InfeasibleError
from lightning_osdp.planner.engine import FSDP2, check_change, engine_of
from lightning_osdp.planner.scheduler import (
    PlanMethod,
    Racer,
    are_close,
    candidates,
    correction_of,
    judge_plan,
    make_plan,
    room_for_longer,
    thriftier,
)
from lightning_osdp.planner.scheduler.replanning.candidates import MOST_CANDIDATES, MOST_LONGER, MOST_SLOWER, ROOMY
from lightning_osdp.planner.simulation import planned_step, seconds_by_link, simulate
from tests.support import corpus
from tests.support.plans import bare_plan
from tests.support.tiers import slow

SEEDS = (2, 3, 4, 15, 19, 29)


FEW = SEEDS[:3]
"""Seeds for what is the same of any model."""


@functools.cache
def planned(seed, **wanted):
    """Plans of a random model in little and in much memory, with their profile and cluster; searched once."""
    found, draw = [], random.Random(seed)
    profile, cluster, workload = corpus.draw_profile(draw), corpus.draw_cluster(draw), corpus.draw_workload(draw)
    wanted["micro_batch_size"] = BatchPolicy.fixed(workload.micro_batch_size, workload.num_micro_batches)
    largest = make_plan(profile, cluster, memory_limit_bytes=2**40, **wanted)
    for share in (0.6, 0.8, 1.0):
        with contextlib.suppress(InfeasibleError):
            limit_bytes = round(share * largest.peak_bytes)
            found.append((make_plan(profile, cluster, memory_limit_bytes=limit_bytes, **wanted), profile, cluster))
    return found


def how_it_runs(plan):
    units = tuple(tuple(sorted(each.items()) for each in unit.treatments) for unit in plan.units)
    blocks = {block.name: (block.activations, block.kept) for block in plan.blocks}
    return repr((units, sorted(blocks.items()), engine_of(plan)))


def reductions(plan):
    return [unit.sync for unit in plan.units]


# of all models that of seed 11 is searched longest
@pytest.mark.parametrize(("may_round", "seeds"), [(False, SEEDS), (True, SEEDS), slow(True, (*SEEDS, 11))])
def test_candidates_fit_differ_and_may_follow_one_another(may_round, seeds):
    names, differ = set(), 0
    for plan, profile, cluster in (each for seed in seeds for each in planned(seed)):
        found = candidates(plan, profile, cluster, may_round=may_round)
        assert found[0] == Racer(name="the plan", plan=plan)
        assert len({how_it_runs(each.plan) for each in found}) == len(found) == len({each.name for each in found})
        assert sum(not each.is_plain for each in found) <= MOST_CANDIDATES
        for each in found[1:]:
            stored = Plan.from_json(each.plan.to_json())
            judged = judge_plan(stored, profile, cluster, memory_limit_bytes=plan.memory_limit_bytes)
            assert each.plan.peak_bytes == judged.peak_bytes <= plan.memory_limit_bytes
            assert each.plan.step_time_s == pytest.approx(judged.step_time_s)
            assert each.plan.all_zdp_step_time_s == plan.all_zdp_step_time_s
            assert each.is_plain or each.plan.step_time_s <= MOST_SLOWER * plan.step_time_s * (1 + 1e-9)
            assert may_round or reductions(each.plan) == reductions(plan)
            differ += reductions(each.plan) != reductions(plan)
        for one, other in permutations(found, 2):
            check_change(one.plan, other.plan)
        names.update(each.name for each in found)
    assert bool(differ) == may_round
    assert {"all DP", "all ZDP", "fewer collectives", "less memory", "nothing gathered ahead"} <= names
    assert {"no recomputation, all ZDP", "all blocks recomputing, fewer collectives"} & names


def test_what_was_measured_wrongly_is_told_by_the_steps_of_candidates():
    told = 0
    for plan, profile, cluster in (each for seed in SEEDS for each in planned(seed)):
        wrong = Correction(computing=1.6, links={"all": 0.7, "node": 0.4} if cluster.within_node else {"all": 0.7})
        beside = Correction(links={link: factor / wrong.computing for link, factor in wrong.links.items()})
        plans = [each.plan for each in candidates(plan, profile, cluster)]
        taken = [simulate(each, wrong.of_profile(profile), wrong.of_cluster(cluster)) for each in plans]
        for each, step in zip(plans, taken, strict=True):
            seconds = seconds_by_link(*planned_step(each, profile, cluster), engine=engine_of(each))
            assert wrong.computing * seconds(beside.factor) == pytest.approx(step.time_s)
            assert step.peak == simulate(each, profile, cluster).peak
        found = correction_of(plans, [[step.time_s] for step in taken], profile, cluster)
        if not isinstance(found, str):
            told += 1
            corrected = (simulate(each, found.of_profile(profile), found.of_cluster(cluster)) for each in plans)
            assert [step.time_s for step in corrected] == pytest.approx([step.time_s for step in taken], rel=0.05)
            assert found.error < 0.02 < found.error_before
    assert told > 0


def test_the_papers_sums_are_not_corrected(model, cluster):
    profile, ring = model(400, 400, 400), cluster(2)
    method = PlanMethod(cost_model="paper")
    plan = make_plan(profile, ring, memory_limit_bytes=2**40, micro_batch_size=2, method=method)
    assert correction_of([plan] * 4, [[1.0]] * 4, profile, ring) == "predictions are the paper's sums"


def test_plain_ones_treat_all_units_alike():
    for plan, profile, cluster in (each for seed in SEEDS for each in planned(seed)):
        for each in candidates(plan, profile, cluster):
            if each.is_plain:
                kept = {unit.treatments[0]["keep"] for unit in each.plan.units if unit.name and unit.menu}
                assert kept == {"whole" if each.name == "all DP" else "nothing"}


@pytest.mark.parametrize("modes", [("DP",), ("ZDP",), ("DP", "ZDP")])
def test_plain_ones_are_those_that_the_search_space_has(model, cluster, modes):
    profile, ring = model(400, 400, 400), dataclasses.replace(cluster(2), overlaps=True)
    space = SearchSpace(modes=modes)
    plan = make_plan(profile, ring, memory_limit_bytes=2**40, micro_batch_size=2, search_space=space)
    late = dataclasses.replace(plan, late_forward=tuple(unit.name for unit in plan.units if unit.name))
    plain = {each.name for each in candidates(late, profile, ring) if each.is_plain}
    assert plain == ({"all DP", "all ZDP"} if len(modes) > 1 else set())


def test_plain_ones_leave_alone_what_is_replicated(model, operator, cluster):
    frozen = (operator(name, 4000, frozen=True) for name in ("first", "second"))
    profile = model(*frozen, operator("adapter.down", 40), operator("adapter.up", 40))
    ring = dataclasses.replace(cluster(2, seconds_per_byte=0.02), unit_overhead={"gather": UnitOverhead(fixed_s=1.0)})
    space = SearchSpace(min_unit_bytes=0)
    plan = make_plan(profile, ring, memory_limit_bytes=2**40, micro_batch_size=1, search_space=space)
    assert "replicated" in {mode for unit in plan.units for mode in unit.modes}
    plain = [each for each in candidates(plan, profile, ring) if each.is_plain]
    assert {each.name for each in plain} == {"all DP", "all ZDP"}
    for each in plain:
        assert "replicated" in {mode for unit in each.plan.units for mode in unit.modes}


def test_plain_ones_are_looked_at_whatever_is_predicted_of_them(model, cluster):
    profile, ring = model(400, 400, 400), cluster(2, seconds_per_byte=0.01)
    plan = make_plan(profile, ring, memory_limit_bytes=2**40, micro_batch_size=2)
    last = candidates(plan, profile, ring)[-1]
    assert last.name == "all ZDP"
    assert last.plan.step_time_s > MOST_SLOWER * plan.step_time_s


def test_the_search_space_holds_for_candidates():
    spaces = [SearchSpace(modes=("ZDP",)), SearchSpace(activations=("keep",))]
    for space in spaces:
        for plan, profile, cluster in (each for seed in FEW for each in planned(seed, search_space=space)):
            for each in candidates(plan, profile, cluster, may_round=True):
                modes = {mode for unit in each.plan.units if unit.name for mode in unit.modes}
                assert modes <= set(space.offered_modes)
                assert each.plan.blocks == () or "recompute" in space.activations


@pytest.mark.slow
def test_settings_of_prefetching_hold_for_candidates():
    engine = FSDP2(backward_prefetch="pre", forward_prefetch=False, asynchronous_unshard=False)
    for plan, profile, cluster in (each for seed in FEW for each in planned(seed, engine=engine)):
        for each in candidates(plan, profile, cluster, engine=engine):
            assert engine_of(each.plan) == engine_of(plan) == engine


def test_what_users_have_blocks_do_stays():
    for plan, profile, ring in (each for seed in SEEDS for each in planned(seed)[-1:]):
        given = dataclasses.replace(plan, search_space=dataclasses.replace(plan.search_space, activations=("keep",)))
        for each in candidates(given, profile, ring):
            assert [(block.name, block.treatment) for block in each.plan.blocks] == [
                (block.name, block.treatment) for block in plan.blocks
            ]


def test_on_one_rank_there_is_nothing_to_gather(model, cluster):
    profile = model(400, 400, 400)
    plan = make_plan(profile, cluster(1), memory_limit_bytes=2**40, micro_batch_size=2)
    assert candidates(plan, profile, cluster(1)) == (Racer(name="the plan", plan=plan),)


def test_predictions_leave_open_which_is_fastest_where_the_best_two_are_close_and_computing_hides_links(cluster):
    def are(*seconds, ring):
        return are_close([Racer(name="", plan=bare_plan(step_time_s=each)) for each in seconds], ring)

    overlapping = dataclasses.replace(cluster(2), overlaps=True)
    assert are(1.3, 1.0, 1.14, ring=overlapping)
    assert not are(1.3, 1.0, 1.16, ring=overlapping)
    assert not are(1.0, ring=overlapping)
    assert not are(1.0, 1.0, ring=dataclasses.replace(overlapping, overlaps=False))
    assert not are(1.0, 1.0, ring=dataclasses.replace(overlapping, world_size=1))


def limited(plan, share):
    return dataclasses.replace(plan, memory_limit_bytes=round(share * plan.peak_bytes))


def peak_bytes(plan, profile, cluster, num_samples):
    with_samples = dataclasses.replace(plan, micro_batch_size=num_samples)
    return judge_plan(with_samples, profile, cluster, memory_limit_bytes=2**40).peak_bytes


@pytest.mark.parametrize("share", [1.0, 1.3, 3.0])
def test_room_for_longer_batches_is_that_for_more_samples(share):
    rooms = set()
    for plan, profile, cluster in (each for seed in SEEDS for each in planned(seed)[-1:]):
        size, within = plan.micro_batch_size, limited(plan, share)
        room, evaluating = room_for_longer(within, profile, cluster, num_samples=size)
        assert 1 <= room <= MOST_LONGER
        longest = dataclasses.replace(within, micro_batch_size=math.floor(size * evaluating**2))
        judged = judge_plan(longest, profile, cluster, memory_limit_bytes=2**40)
        assert not evaluating or judged.evaluation_peak_bytes <= within.memory_limit_bytes
        assert peak_bytes(plan, profile, cluster, math.floor(size * room**2)) <= within.memory_limit_bytes
        if room < MOST_LONGER:
            assert peak_bytes(plan, profile, cluster, math.ceil(1.3 * size * room**2)) > within.memory_limit_bytes
        rooms.add(room)
    assert share == 1.0 or max(rooms) > 1.0


def test_there_is_no_room_where_the_batch_itself_does_not_fit():
    plan, profile, cluster = planned(SEEDS[0])[-1]
    assert room_for_longer(limited(plan, 0.99), profile, cluster, num_samples=plan.micro_batch_size).training == 0


def test_thriftier_plans_fit_or_take_least_leave_room_last_and_may_follow_at_any_time():
    left_room = changed = faster = 0
    for plan, profile, cluster in (each for seed in SEEDS for each in planned(seed)):
        num_samples = 4 * plan.micro_batch_size
        usual_bytes = peak_bytes(plan, profile, cluster, num_samples)
        for limit_bytes in (plan.memory_limit_bytes, usual_bytes):
            within = dataclasses.replace(plan, memory_limit_bytes=limit_bytes)
            found = thriftier(within, profile, cluster, num_samples=num_samples)
            for each in found:
                check_change(plan, each)
                assert reductions(each) == reductions(plan)
                assert each.peak_bytes == peak_bytes(each, profile, cluster, num_samples)
            leaves_room = found[-1].peak_bytes <= ROOMY * limit_bytes
            assert leaves_room or found[-1].peak_bytes <= usual_bytes
            left_room += leaves_room
            changed += how_it_runs(found[-1]) != how_it_runs(plan)
            if len(found) > 1:
                first, last = found
                assert first.peak_bytes <= limit_bytes
                assert first.step_time_s < last.step_time_s
                faster += 1
    assert left_room
    assert changed
    assert faster


@pytest.mark.slow  # it does for candidates
def test_the_search_space_holds_for_thriftier_plans():
    for space in (SearchSpace(modes=("DP",)), SearchSpace(activations=("keep",))):
        for plan, profile, cluster in (each for seed in FEW for each in planned(seed, search_space=space)):
            for found in thriftier(plan, profile, cluster, num_samples=8 * plan.micro_batch_size):
                modes = {mode for unit in found.units if unit.name for mode in unit.modes}
                assert modes <= set(space.offered_modes)
                assert found.blocks == () or "recompute" in space.activations
