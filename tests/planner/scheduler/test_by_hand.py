"""Plans that people make by hand, beside those that are searched."""

import dataclasses
from itertools import product

import pytest

from lightning_osdp.core.affine import Affine
from lightning_osdp.core.batch_policy import BatchPolicy
from lightning_osdp.core.cluster import Links
from lightning_osdp.core.plans.plan import Plan
from lightning_osdp.core.profile import BlockProfile
from lightning_osdp.errors import ConfigurationError
from lightning_osdp.planner.scheduler import made_by_hand, make_plan
from lightning_osdp.planner.simulation import simulate
from tests.support.tiers import slow

MIB = 2**20


@pytest.fixture(scope="module")
def blocks(model, operator):
    """Three blocks of two operators and a head; blocks may recompute."""
    costs = {"activation_bytes_per_sample": MIB, "forward_s_per_sample": 2e-3, "backward_s_per_sample": 4e-3}
    names = [f"h.{block}.{name}" for block in range(3) for name in ("attn", "mlp")]
    stated = model(*(operator(name, 4 * MIB, **costs) for name in names), operator("head", 2 * MIB, **costs))
    made = []
    for number in range(3):
        ((first, last),) = stated.spans[f"h.{number}"]
        less = tuple(
            dataclasses.replace(each, saved_bytes=Affine(0.0, 0.25 * MIB)) for each in stated.segments[first : last + 1]
        )
        made.append(
            BlockProfile(
                name=f"h.{number}", span=(first, last), segments={"recompute": less}, rerun_s=Affine(0.0, 4e-3)
            )
        )
    return dataclasses.replace(stated, blocks=tuple(made))


def found_in(blocks, ranks, memory_limit_bytes, policy):
    found = made_by_hand(blocks, ranks, memory_limit_bytes=memory_limit_bytes, policy=policy)
    return {each.name: each for each in found}


def test_four_ways_of_which_resharding_and_checkpointing_take_less_memory_and_more_time(blocks, cluster):
    ranks = cluster(4, seconds_per_byte=1e-9)
    found = found_in(blocks, ranks, 2**40, BatchPolicy.fixed(4))
    assert [*found] == [
        "SHARD_GRAD_OP", "FULL_SHARD", "SHARD_GRAD_OP, checkpointing", "FULL_SHARD, checkpointing"
    ]  # fmt: skip
    times = [each.step_time_s for each in found.values()]
    assert times == sorted(times)
    # a ZDP block gathers 8 MiB again in backward: (N-1)/N S beta, for each of three blocks
    again_s = 3 * 3 / 4 * 8 * MIB * 1e-9
    assert found["FULL_SHARD"].step_time_s - found["SHARD_GRAD_OP"].step_time_s == pytest.approx(again_s)
    assert found["FULL_SHARD"].peak_bytes < found["SHARD_GRAD_OP"].peak_bytes
    rerun_s = 3 * 4 * 4e-3
    assert found["FULL_SHARD, checkpointing"].step_time_s - found["FULL_SHARD"].step_time_s == pytest.approx(rerun_s)


def test_gradients_are_reduced_once_where_that_fits(blocks, cluster):
    ranks, policy = cluster(4, seconds_per_byte=1e-9), BatchPolicy.fixed(1, 4)
    ample = found_in(blocks, ranks, 2**40, policy)["FULL_SHARD"]
    tight = found_in(blocks, ranks, ample.peak_bytes - 1, policy)["FULL_SHARD"]
    assert tight.fits
    assert tight.peak_bytes < ample.peak_bytes
    # reduce-scatters of three blocks of 8 MiB in three micro-batches more
    assert tight.step_time_s - ample.step_time_s == pytest.approx(3 * 3 * 3 / 4 * 8 * MIB * 1e-9)


def test_any_micro_batch_is_the_largest_that_fits(blocks, cluster):
    ranks, limit_bytes = cluster(4, seconds_per_byte=1e-9), 100 * MIB
    for name, each in found_in(blocks, ranks, limit_bytes, BatchPolicy.scale()).items():
        assert each.fits
        one_more = BatchPolicy.fixed(each.micro_batch_size + 1)
        assert not found_in(blocks, ranks, limit_bytes, one_more)[name].fits
    assert all(
        each.micro_batch_size == 2 for each in found_in(blocks, ranks, limit_bytes, BatchPolicy.scale(2)).values()
    )


def test_a_global_batch_is_divided_into_the_fastest_micro_batches_that_fit(blocks, cluster):
    ranks = cluster(4, seconds_per_byte=1e-9)
    found = found_in(blocks, ranks, 100 * MIB, BatchPolicy.divide(12))
    for name, each in found.items():
        others = [
            found_in(blocks, ranks, 100 * MIB, BatchPolicy.fixed(size, 12 // size))[name]
            for size in (1, 2, 3, 4, 6, 12)
        ]
        assert each.step_time_s == min(other.step_time_s for other in others if other.fits)
        assert each.micro_batch_size * each.num_micro_batches == 12


def test_what_does_not_fit_comes_last_at_its_smallest(blocks, cluster):
    ranks = cluster(4, seconds_per_byte=1e-9)
    found = made_by_hand(blocks, ranks, memory_limit_bytes=30 * MIB, policy=BatchPolicy.scale())
    assert [each.fits for each in found] == sorted((each.fits for each in found), reverse=True)
    assert not found[-1].fits
    assert found[-1].micro_batch_size == 1


def in_nodes(ranks):
    """The ranks in nodes of two, inside of which links are ten times as fast."""
    inside = Links(**{name: ranks.all_gather.at_rate(10) for name in ("all_gather", "reduce_scatter", "all_reduce")})
    return dataclasses.replace(ranks, node_size=2, within_node=inside)


def test_on_several_nodes_all_may_be_sharded_in_each(blocks, cluster):
    ranks = cluster(4, seconds_per_byte=1e-9)
    one, several = (found_in(blocks, each, 2**40, BatchPolicy.fixed(4)) for each in (ranks, in_nodes(ranks)))
    assert {*several} - {*one} == {
        "HYBRID_SHARD", "HYBRID_SHARD, checkpointing", "HYBRID_SHARD_ZERO2", "HYBRID_SHARD_ZERO2, checkpointing"
    }  # fmt: skip
    assert {name: several[name] for name in one} == one
    # the root's 2 MiB and three blocks' 8 take an all-gather and a reduce-scatter in the node, where (m-1)/m passes a
    # link, and half of each all-reduced between two nodes, there and back
    moved = 2 * 1 / 2 * 1e-10 + 1 / 2 * 2 * 1 / 2 * 1e-9
    over_all = 2 * 3 / 4 * 1e-9
    saved_s = several["SHARD_GRAD_OP"].step_time_s - several["HYBRID_SHARD_ZERO2"].step_time_s
    assert saved_s == pytest.approx((over_all - moved) * 26 * MIB)
    assert several["HYBRID_SHARD"].peak_bytes > several["FULL_SHARD"].peak_bytes


FEW = [(True, 3, False), (False, 1, True)]


@pytest.mark.parametrize(
    ("overlaps", "number", "has_nodes"),
    [*FEW, *(slow(*case) for case in product((False, True), (1, 3), (False, True)) if case not in FEW)],
)
def test_no_plan_is_slower_than_what_is_made_by_hand(blocks, cluster, has_nodes, number, overlaps):
    ranks = dataclasses.replace(cluster(4, seconds_per_byte=1e-9), overlaps=overlaps)
    ranks, policy = in_nodes(ranks) if has_nodes else ranks, BatchPolicy.fixed(2, number)
    ample = made_by_hand(blocks, ranks, memory_limit_bytes=2**40, policy=policy)
    for limit_bytes in (each.peak_bytes for each in ample):
        by_hand = made_by_hand(blocks, ranks, memory_limit_bytes=limit_bytes, policy=policy)
        plan = make_plan(blocks, ranks, memory_limit_bytes=limit_bytes, micro_batch_size=policy)
        assert plan.step_time_s <= min(each.step_time_s for each in by_hand if each.fits) * (1 + 1e-9)


@pytest.mark.parametrize("has_nodes", [False, True])
def test_each_is_a_plan_that_is_simulated_alike(blocks, cluster, has_nodes):
    ranks = cluster(4, seconds_per_byte=1e-9)
    ranks = in_nodes(ranks) if has_nodes else ranks
    for each in found_in(blocks, ranks, 2**40, BatchPolicy.fixed(2, 2)).values():
        plan = each.plan
        step = simulate(Plan.from_json(plan.to_json()), blocks, ranks)
        assert step.time_s == pytest.approx(each.step_time_s) == pytest.approx(plan.step_time_s)
        assert step.peak.peak_bytes == each.peak_bytes == plan.peak_bytes
        assert plan.samples_per_s == each.samples_per_s
        assert {block.name for block in plan.blocks} == (
            {"h.0", "h.1", "h.2"} if "checkpointing" in each.name else set()
        )
        assert (plan.solver, plan.gap) == ("", 0.0)


def test_strategies_and_what_blocks_do_may_be_given(blocks, cluster):
    ranks, options = cluster(4), {"memory_limit_bytes": 2**40, "policy": BatchPolicy.fixed(2)}
    (only,) = made_by_hand(blocks, ranks, names=["FULL_SHARD"], activations=["recompute"], **options)
    assert only.numbers == found_in(blocks, ranks, 2**40, BatchPolicy.fixed(2))["FULL_SHARD, checkpointing"].numbers
    assert made_by_hand(blocks, ranks, names=["FULL_SHARD"], activations=["offload"], **options) == []  # not profiled
    for name, told in (("HYBRID_SHARD", "one node"), ("DDP", "FULL_SHARD, SHARD_GRAD_OP")):
        with pytest.raises(ConfigurationError, match=told):
            made_by_hand(blocks, ranks, names=[name], **options)
