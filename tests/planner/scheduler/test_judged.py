"""Plans that are there, as they are predicted of a profile and a cluster."""

import contextlib
import dataclasses
import random

import pytest

from lightning_osdp.core.affine import Affine
from lightning_osdp.core.batch_policy import BatchPolicy
from lightning_osdp.core.plans.plan import Plan
from lightning_osdp.core.plans.search_space import SearchSpace
from lightning_osdp.errors import ConfigurationError, InfeasibleError, PlanMismatchError
from lightning_osdp.planner.scheduler import PlanMethod, in_micro_batches, judge_plan, make_plan
from lightning_osdp.planner.simulation import simulate
from tests.support import corpus
from tests.support.tiers import slow


def planned(seed):
    """Random plans in little and in much memory, with their profile and cluster."""
    draw = random.Random(seed)
    profile, cluster, workload = corpus.draw_profile(draw), corpus.draw_cluster(draw), corpus.draw_workload(draw)
    blocks = {block.name: "recompute" for block in profile.blocks} if draw.random() < 0.2 else None
    wanted = {
        "micro_batch_size": BatchPolicy.fixed(workload.micro_batch_size, workload.num_micro_batches),
        "search_space": SearchSpace(min_unit_bytes=draw.choice([None, 0])),
        "method": PlanMethod(cost_model=draw.choice(["simulate", "simulate", "simulate", "paper"]), blocks=blocks),
    }
    largest = make_plan(profile, cluster, memory_limit_bytes=2**40, **wanted)
    yield largest, profile, cluster
    for share in (0.6, 0.8, 0.95):
        with contextlib.suppress(InfeasibleError):
            limit_bytes = round(share * largest.peak_bytes)
            yield make_plan(profile, cluster, memory_limit_bytes=limit_bytes, **wanted), profile, cluster


SEEDS = (2, 3, 4, 15, 19, 29)


@pytest.mark.parametrize("seeds", [SEEDS, slow((*SEEDS, 11))], ids=["few", "all"])  # seed 11 is searched longest
def test_a_plan_is_judged_as_it_was_when_it_was_searched(seeds):
    seen = []
    for seed in seeds:
        for plan, profile, cluster in planned(seed):
            stored = Plan.from_json(plan.to_json())
            judged = judge_plan(stored, profile, cluster, memory_limit_bytes=plan.memory_limit_bytes)
            assert_same(judged, plan)
            seen.append(plan)
    assert any(unit.num_slices > 1 for plan in seen for unit in plan.units)
    assert any(unit.modules for plan in seen for unit in plan.units)
    assert {bool(plan.given_blocks) for plan in seen if plan.blocks} == {False, True}
    assert {plan.cost_model for plan in seen} == {"simulate", "paper"}
    assert any(plan.needs_nodes for plan in seen)
    assert any(plan.num_micro_batches > 1 for plan in seen)
    assert any(plan.gap > 0 for plan in seen)


def assert_same(judged, plan):
    notes = [note for note in plan.notes if "stopped after" not in note]  # of the search
    one, other = (dataclasses.asdict(dataclasses.replace(each, notes=())) for each in (judged, plan))
    assert [*judged.notes] == notes
    for name, value in other.items():
        if isinstance(value, float):
            assert one.pop(name) == pytest.approx(value, rel=1e-9, abs=1e-9), name
        elif name in {"units", "blocks", "recomputable"}:
            for judged_one, planned_one in zip(one.pop(name), value, strict=True):
                assert judged_one == {
                    key: pytest.approx(each, rel=1e-6, abs=1e-9) if isinstance(each, float) else each
                    for key, each in planned_one.items()
                }
        else:
            assert one.pop(name) == value, name
    assert not one


def test_what_is_predicted_follows_profile_cluster_and_limit(model, cluster):
    profile, ring = model(400, 400, 400), cluster(2, seconds_per_byte=0.01)
    plan = make_plan(profile, ring, memory_limit_bytes=10_000, micro_batch_size=2)
    segments = tuple(dataclasses.replace(each, saved_bytes=Affine(0.0, 1000.0)) for each in profile.segments)
    larger, slower = dataclasses.replace(profile, segments=segments), cluster(2, seconds_per_byte=0.02)
    judged = judge_plan(plan, larger, slower, memory_limit_bytes=3000)
    estimate = simulate(plan, larger, slower)
    assert judged.peak_bytes == estimate.peak.peak_bytes > max(3000, plan.peak_bytes)
    assert judged.step_time_s == pytest.approx(estimate.time_s)
    assert judged.step_time_s > plan.step_time_s
    assert judged.memory_limit_bytes == 3000
    assert [(unit.name, unit.treatments) for unit in judged.units] == [
        (unit.name, unit.treatments) for unit in plan.units
    ]


def test_a_plan_that_was_not_searched_claims_no_gap(model, cluster):
    profile, ring = model(400, 400, 400), cluster(2, seconds_per_byte=0.01)
    plan = make_plan(profile, ring, memory_limit_bytes=10_000, micro_batch_size=2)
    halved = in_micro_batches(plan, dataclasses.replace(BatchPolicy.fixed(1, 2).workload(1)))
    judged = judge_plan(halved, profile, ring, memory_limit_bytes=10_000)
    assert judged.step_time_s > 0
    assert judged.solver == ""
    assert "gap      not predicted" in str(judged)


def test_a_plan_of_another_model_is_not_judged(model, cluster):
    profile, ring = model(400, 400, 400), cluster(2, seconds_per_byte=0.01)
    plan = make_plan(profile, ring, memory_limit_bytes=10_000, micro_batch_size=2)
    with pytest.raises(PlanMismatchError, match="the plan is for 2 ranks, this run has 4"):
        judge_plan(plan, profile, cluster(4), memory_limit_bytes=10_000)
    with pytest.raises(ConfigurationError, match="Expected operators of the profiled model in unit 'm2'"):
        judge_plan(plan, model(400, 400), ring, memory_limit_bytes=10_000)
