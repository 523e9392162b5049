"""Plans for several nodes: searched, simulated as planned, and on one node what they were before."""

import dataclasses

import pytest

from lightning_osdp import FSDP2, Plan, SearchSpace, make_plan, simulate
from lightning_osdp.core.batch_policy import BatchPolicy
from tests.support.plans import waiting
from tests.support.steps import TWO_NODES


@pytest.fixture(scope="module")
def profile(model, operator):
    sizes = (800, 800, 1600, 400)
    return model(*(operator(f"{i}", size, activation_bytes_per_sample=100) for i, size in enumerate(sizes)))


def plans(profile, cluster, **space):
    """Returns plans under limits from that of plain FSDP to that of the fastest plan."""

    def made(limit_bytes):
        return make_plan(
            profile,
            cluster,
            memory_limit_bytes=limit_bytes,
            micro_batch_size=1,
            search_space=SearchSpace(min_unit_bytes=0, share_units=False, **space),
            engine=FSDP2(backward_prefetch="none"),
        )

    fastest = made(2**40)
    least_bytes, most_bytes = fastest.all_zdp_peak_bytes, fastest.peak_bytes
    assert least_bytes < most_bytes
    return [made(least_bytes + eighths * (most_bytes - least_bytes) // 8) for eighths in range(9)]


def test_plans_for_several_nodes_are_simulated_as_they_were_planned(profile):
    found = plans(profile, TWO_NODES)
    assert any(plan.needs_nodes for plan in found)
    for plan in found:
        assert plan.node_size == 4
        assert Plan.from_json(plan.to_json()) == plan
        estimate = simulate(plan, profile, TWO_NODES)
        assert estimate.time_s == pytest.approx(plan.step_time_s)
        assert estimate.peak.peak_bytes == plan.peak_bytes <= plan.memory_limit_bytes
    times_s = [plan.step_time_s for plan in found]
    assert times_s == sorted(times_s, reverse=True)


def test_nodes_make_plans_faster_and_no_plan_slower(profile):
    with_nodes, without = plans(profile, TWO_NODES), plans(profile, TWO_NODES, modes=("ZDP", "DP"))
    pairs = [(one.step_time_s, other.step_time_s) for one, other in zip(with_nodes, without, strict=True)]
    assert all(one <= other * (1 + 1e-9) for one, other in pairs)
    assert any(one < 0.9 * other for one, other in pairs)


@pytest.mark.parametrize("node_size", [None, 8])
def test_on_one_node_plans_are_what_they_are_without_such_modes(profile, node_size):
    cluster = dataclasses.replace(TWO_NODES, node_size=node_size)
    found = plans(profile, cluster)
    without = plans(profile, cluster, modes=("ZDP", "DP"))
    every = SearchSpace(min_unit_bytes=0, share_units=False)
    assert [dataclasses.replace(plan, search_space=every) for plan in without] == found
    assert {plan.node_size for plan in found} == {None}


@pytest.mark.parametrize("node_size", [None, 4])
@pytest.mark.parametrize("num_micro_batches", [1, 3])
def test_gradients_may_be_reduced_inside_of_nodes_alone(profile, node_size, num_micro_batches):
    plan = make_plan(
        profile,
        dataclasses.replace(TWO_NODES, node_size=node_size),
        memory_limit_bytes=2**40,
        micro_batch_size=BatchPolicy.fixed(1, num_micro_batches),
        search_space=SearchSpace(sync=("node",)),
    )
    syncs = {unit.sync for unit in plan.units if unit.name}
    assert syncs == ({"node"} if node_size and num_micro_batches > 1 else {"every"})


@pytest.mark.parametrize("mode", ["HSDP", "HDP"])
def test_to_leave_gradients_for_the_last_micro_batch_takes_no_state_that_each_node_has_anyway(profile, mode):
    space = SearchSpace(modes=(mode,), sync=("last",), min_unit_bytes=0, share_units=False)
    found = make_plan(
        profile,
        TWO_NODES,
        memory_limit_bytes=2**40,
        micro_batch_size=BatchPolicy.fixed(1, 3),
        search_space=space,
    )
    for unit in found.units[1:]:
        # whole gradients in place of those of one of eight ranks
        assert waiting(unit)[1] == unit.parameter_bytes * 7 // 8
