"""Plans in which blocks recompute or offload what they save."""

import contextlib
import dataclasses
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_osdp.core.affine import Affine
from lightning_osdp.core.axes import LEVELS, Treatment
from lightning_osdp.core.batch_policy import BatchPolicy
from lightning_osdp.core.plans.plan import Plan
from lightning_osdp.core.plans.search_space import SearchSpace
from lightning_osdp.core.profile import BlockProfile, Level
from lightning_osdp.core.units import partition
from lightning_osdp.errors import ConfigurationError, InfeasibleError, PlanFormatError
from lightning_osdp.planner.assign import LeastSeconds, Setting, ever_more_slices
from lightning_osdp.planner.cost import Workload
from lightning_osdp.planner.engine import FSDP2
from lightning_osdp.planner.scheduler import PlanMethod, competition, judge_plan, make_plan
from lightning_osdp.planner.scheduler.fallback import with_less_memory
from lightning_osdp.planner.scheduler.structures import Attempt
from lightning_osdp.planner.scheduler.sweep import TOLERANCE
from lightning_osdp.planner.simulation import simulate
from lightning_osdp.report.sentences import tell_blocks
from tests.support.tiers import examples, slow

KEEP = SearchSpace(activations=("keep",))
RECOMPUTE = SearchSpace(activations=("keep", "recompute"))
SELECTIVE = SearchSpace(activations=("keep", "recompute", "selective"))
NO_PREFETCH = FSDP2(backward_prefetch="none")
BLOCKS = [f"h.{block}" for block in range(6)]


@pytest.fixture
def deep(model, operator):
    """Six blocks of two operators of 100 bytes, each of which saves 300 bytes a sample and takes 0.1 s."""
    return recomputable(model(*in_blocks(operator)), BLOCKS)


def in_blocks(operator, **costs):
    """The operators of `deep`."""
    costs = {"activation_bytes_per_sample": 300, "forward_s_per_sample": 0.1, **costs}
    return [operator(f"{block}.{index}", 100, **costs) for block in BLOCKS for index in range(2)]


def recomputable(profile, names):
    """The profile with these blocks, each of two operators like those of `deep`.

    Results of 140 bytes save half of the seconds of running a block again, further ones of 200 bytes nearly all.
    """
    blocks = []
    for name in names:
        ((first, last),) = profile.spans[name]
        ways = {
            choice: tuple(
                dataclasses.replace(
                    segment,
                    saved_bytes=Affine(0.0, 0.0 if index else inputs),
                    backward_workspace_bytes=Affine(0.0, 600.0 - inputs),
                )
                for index, segment in enumerate(profile.segments[first : last + 1])
            )
            for choice, inputs in (("recompute", 40.0), ("offload", 0.0), (LEVELS[0], 180.0), (LEVELS[1], 380.0))
        }
        blocks.append(
            BlockProfile(
                name=name,
                span=(first, last),
                segments=ways,
                rerun_s=Affine(0.0, 0.2),
                levels={
                    LEVELS[0]: Level(kept=(1,), rerun_s=Affine(0.0, 0.1)),
                    LEVELS[1]: Level(kept=(0, 1, 2), rerun_s=Affine(0.0, 0.01)),
                },
                copied_bytes={"offload": Affine(0.0, 600.0)},
            )
        )
    return dataclasses.replace(profile, blocks=tuple(blocks))


def plan(profile, cluster, limit_bytes, **options):
    options = {"micro_batch_size": 1, "search_space": RECOMPUTE, **options}
    return make_plan(profile, cluster(2, seconds_per_byte=0.01), memory_limit_bytes=limit_bytes, **options)


def test_blocks_recompute_where_nothing_else_fits_and_no_more_of_them_than_that_takes(deep, cluster):
    everything = plan(deep, cluster, 10**6)
    assert everything.blocks == ()
    least = plan(deep, cluster, 10**6, search_space=SearchSpace(modes=("ZDP",), activations=("keep",))).peak_bytes
    with pytest.raises(InfeasibleError):
        plan(deep, cluster, least - 100, search_space=KEEP)
    numbers = []
    for limit_bytes in range(least, 1000, -200):
        try:
            found = plan(deep, cluster, limit_bytes)
        except InfeasibleError:
            break
        numbers.append(len(found.blocks))
        assert found.peak_bytes <= limit_bytes
        estimate = simulate(found, deep, cluster(2, seconds_per_byte=0.01))
        assert estimate.peak.peak_bytes <= found.peak_bytes
        assert estimate.time_s == pytest.approx(found.step_time_s)
        # blocks that are kept longest recompute, and each frees what it would have saved but for its inputs
        assert [block.name for block in found.blocks] == [f"h.{index}" for index in range(len(found.blocks))]
        assert {(block.activations, block.frees_bytes) for block in found.blocks} <= {("recompute", 560)}
    assert numbers == sorted(numbers)
    assert numbers[-1] >= 5


def test_recomputing_a_cheap_block_buys_a_gathered_one(deep, cluster):
    cheap = dataclasses.replace(
        deep, blocks=tuple(dataclasses.replace(block, rerun_s=Affine(0.0, 0.01)) for block in deep.blocks)
    )
    everything = plan(cheap, cluster, 10**6).peak_bytes
    limit_bytes = everything - 500
    without = plan(cheap, cluster, limit_bytes, search_space=KEEP)
    found = plan(cheap, cluster, limit_bytes)
    assert found.step_time_s < without.step_time_s * 0.9
    assert [block.name for block in found.blocks] == ["h.0"]
    assert {mode for unit in found.units for mode in unit.modes} == {"DP"}


def test_what_is_copied_takes_its_time(deep, cluster):
    space = SearchSpace(activations=("keep", "recompute", "offload"))
    slow, fast = (dataclasses.replace(cluster(2, seconds_per_byte=0.01), host_copy_s_per_byte=s) for s in (1.0, 1e-6))
    limit_bytes = (
        plan(deep, cluster, 10**6, search_space=SearchSpace(modes=("ZDP",), activations=("keep",))).peak_bytes - 700
    )
    options = {"memory_limit_bytes": limit_bytes, "micro_batch_size": 1, "search_space": space}
    assert {block.activations for block in make_plan(deep, slow, **options).blocks} == {"recompute"}
    found = make_plan(deep, fast, **options)
    assert {block.activations for block in found.blocks} == {"offload"}
    assert found.blocks[0].costs_s == pytest.approx(2 * 600 * 1e-6)
    assert found.host_bytes == 600 * len(found.blocks)
    # others recompute, or more units are sharded; pinned memory may take twice the bytes
    for pins in (False, True):
        ranks = dataclasses.replace(fast, host_memory_bytes=found.host_bytes - 1, host_copies_overlap=pins)
        short = make_plan(deep, ranks, **options)
        offloading = [block for block in short.blocks if block.activations == "offload"]
        assert short.host_bytes == 600 * (1 + pins) * len(offloading) < found.host_bytes
        assert short.peak_bytes <= limit_bytes
        assert short.step_time_s > found.step_time_s
        assert pins or short.samples_per_s * (1 + short.gap) >= found.samples_per_s


def test_blocks_may_be_given(deep, cluster):
    found = plan(deep, cluster, 10**6, method=PlanMethod(blocks={"h.3": "recompute"}))
    assert [(block.name, block.activations) for block in found.blocks] == [("h.3", "recompute")]
    free = plan(deep, cluster, 10**6)
    assert found.step_time_s == pytest.approx(free.step_time_s + 0.2)
    with pytest.raises(ConfigurationError, match=r"block 'h.9' to be one that was profiled"):
        plan(deep, cluster, 10**6, method=PlanMethod(blocks={"h.9": "recompute"}))


def test_given_blocks_are_given_under_any_limit(deep, cluster):
    given = PlanMethod(blocks=dict.fromkeys(BLOCKS[:3], "recompute"))
    fastest = plan(deep, cluster, 10**6, method=given)
    short = plan(deep, cluster, fastest.all_zdp_peak_bytes, method=given)
    assert short.step_time_s > fastest.step_time_s
    assert [block.name for block in short.blocks] == [block.name for block in fastest.blocks] == BLOCKS[:3]


@pytest.mark.parametrize(
    ("offered", "how"), [(("keep",), "recompute or offload them"), (("keep", "recompute"), "offload them")]
)
def test_where_activations_dominate_the_error_says_what_would_help_and_how_much(deep, cluster, offered, how):
    every = ("keep", "recompute", "offload")
    options = {"micro_batch_size": 8, "search_space": SearchSpace(activations=offered)}
    with pytest.raises(InfeasibleError) as caught:
        plan(deep, cluster, 1000, **options)
    told = (
        r"needs at least 7\.37 KiB .* Activations dominate\. With optimizer states and shards on the host 5\.13 KiB are"
        r" needed: "
    )
    with pytest.raises(InfeasibleError, match=told):
        plan(deep, cluster, 1000, **{**options, "search_space": SearchSpace(activations=every)})
    told = (
        f" Activations dominate; have blocks {how}: SearchSpace(activations={every}), with which 7.37 KiB are needed."
    )
    assert told in str(caught.value)


def test_where_no_blocks_were_found_the_error_says_how_to_name_them(deep, cluster):
    with pytest.raises(InfeasibleError, match="name modules that may recompute them: activation_checkpointing_policy"):
        plan(dataclasses.replace(deep, blocks=()), cluster, 1000, micro_batch_size=8)


@pytest.mark.parametrize("overlaps", [False, slow(True)])
def test_a_stack_of_blocks_is_never_one_unit(model, operator, cluster, overlaps):
    """Stacks of an encoder that holds a third of the model, and of a decoder."""
    names = ["enc.0", "enc.1", *(f"dec.{block}" for block in range(4))]
    operators = (
        operator(f"{name}.{index}", 100, activation_bytes_per_sample=300, forward_s_per_sample=0.1)
        for name in names
        for index in range(2)
    )
    profile = recomputable(model(*operators), names)
    ranks = dataclasses.replace(cluster(2, latency_s=0.5, seconds_per_byte=0.01), overlaps=overlaps)
    options = {"micro_batch_size": 1, "search_space": RECOMPUTE}
    numbers = set()
    for limit_bytes in range(6000, 1000, -500):
        try:
            found = make_plan(profile, ranks, memory_limit_bytes=limit_bytes, **options)
        except InfeasibleError:
            break
        assert {unit.name for unit in found.units}.isdisjoint({"enc", "dec"})
        assert simulate(found, profile, ranks).peak.peak_bytes <= limit_bytes
        numbers.add(len(found.blocks))
    assert len(numbers) > 2


@pytest.mark.slow
def test_gradients_that_only_the_last_micro_batch_may_reduce_are_planned_with_blocks_that_recompute(deep, cluster):
    space = SearchSpace(sync=("last",), activations=("keep", "recompute"))
    options = {"micro_batch_size": BatchPolicy.fixed(1, 2), "search_space": space}
    ranks = dataclasses.replace(cluster(2, latency_s=1.0, seconds_per_byte=0.01))
    most = make_plan(deep, ranks, memory_limit_bytes=10**6, **options).peak_bytes
    numbers = set()
    for limit_bytes in range(most, 0, -200):
        try:
            found = make_plan(deep, ranks, memory_limit_bytes=limit_bytes, **options)
        except InfeasibleError:
            break
        assert {unit.sync for unit in found.units if unit.name} == {"last"}
        numbers.add(len(found.blocks))
    assert len(numbers) > 1


def test_where_units_may_not_be_shared_blocks_recompute_with_units_inside(deep, cluster):
    space = SearchSpace(activations=("keep", "recompute"), share_units=False, min_unit_bytes=0)
    ranks = cluster(2, latency_s=1.0, seconds_per_byte=0.01)
    numbers = []
    for limit_bytes in range(10_000, 0, -200):
        try:
            found = make_plan(deep, ranks, memory_limit_bytes=limit_bytes, micro_batch_size=1, search_space=space)
        except InfeasibleError:
            break
        assert all(len(unit.operators) <= 1 for unit in found.units)
        numbers.append(len(found.blocks))
    assert (numbers[0], numbers[-1]) == (0, 6)


# ---- at levels


def test_levels_are_chosen_block_by_block_where_they_are_offered_and_never_otherwise(deep, cluster):
    ranks = cluster(2, seconds_per_byte=0.01)
    most = plan(deep, cluster, 10**6).peak_bytes
    used, gains = set(), []
    for limit_bytes in range(most, 1000, -400):
        try:
            whole = plan(deep, cluster, limit_bytes)
        except InfeasibleError:
            break
        assert not any(block.kept for block in whole.blocks)
        found = plan(deep, cluster, limit_bytes, search_space=SELECTIVE)
        assert found.step_time_s <= whole.step_time_s * (1 + 1e-9)
        assert found.gap <= 0.1
        estimate = simulate(found, deep, ranks)
        assert estimate.time_s == pytest.approx(found.step_time_s)
        assert estimate.peak.peak_bytes <= found.peak_bytes <= limit_bytes
        for block in found.blocks:
            used.add((block.activations, block.kept))
            if block.kept:
                assert block.costs_s == pytest.approx({1: 0.1, 3: 0.01}[len(block.kept)])
                assert block.frees_bytes == {1: 600 - 180, 3: 600 - 380}[len(block.kept)]
        gains.append(whole.step_time_s / found.step_time_s)
    assert used >= {("recompute", ()), (LEVELS[1], (0, 1, 2))}
    assert max(gains) > 1.03


def test_levels_change_nothing_where_there_is_memory_for_everything(deep, cluster):
    whole, found = (plan(deep, cluster, 10**6, search_space=space) for space in (RECOMPUTE, SELECTIVE))
    assert found == dataclasses.replace(whole, search_space=SELECTIVE)


@pytest.mark.slow
def test_levels_are_said_to_gain_nothing_where_computing_hides_behind_links(deep, cluster):
    ranks = dataclasses.replace(cluster(2, seconds_per_byte=0.05), overlaps=True)
    most = plan(deep, cluster, 10**6).peak_bytes
    num_recomputing = 0
    for limit_bytes in range(most - 100, 1000, -1200):
        options = {"memory_limit_bytes": limit_bytes, "micro_batch_size": 1}
        try:
            whole, found = (make_plan(deep, ranks, search_space=space, **options) for space in (RECOMPUTE, SELECTIVE))
        except InfeasibleError:
            break
        num_recomputing += len(whole.blocks)
        assert found.step_time_s == pytest.approx(whole.step_time_s, rel=1e-3)
    assert num_recomputing > 0


@pytest.fixture
def at_levels(deep, cluster):
    found = plan(deep, cluster, plan(deep, cluster, 10**6).peak_bytes - 1000, search_space=SELECTIVE)
    assert {block.kept for block in found.blocks} == {(0, 1, 2)}
    return found


def test_a_plan_with_levels_is_stored_judged_and_told(deep, cluster, at_levels):
    assert Plan.from_json(at_levels.to_json()) == at_levels
    judged = judge_plan(at_levels, deep, cluster(2, seconds_per_byte=0.01), memory_limit_bytes=10**6)
    assert (judged.step_time_s, judged.peak_bytes) == (pytest.approx(at_levels.step_time_s), at_levels.peak_bytes)
    assert judged.blocks == at_levels.blocks
    told = " ".join(tell_blocks(at_levels))
    assert "recomputed in backward, all but 3 results of heavy operations: " in told


def test_a_level_is_what_it_keeps_whatever_its_number_in_another_profile(deep, cluster, at_levels):
    def with_first(block):
        levels = {LEVELS[0]: block.levels[LEVELS[1]]}
        return dataclasses.replace(
            block, levels=levels, segments={**block.segments, LEVELS[0]: block.segments[LEVELS[1]]}
        )

    renumbered = dataclasses.replace(deep, blocks=tuple(map(with_first, deep.blocks)))
    ranks = cluster(2, seconds_per_byte=0.01)
    assert simulate(at_levels, renumbered, ranks).time_s == pytest.approx(at_levels.step_time_s)
    without = dataclasses.replace(deep, blocks=tuple(dataclasses.replace(each, levels={}) for each in deep.blocks))
    with pytest.raises(ConfigurationError, match=r"to keep results \[\] of heavy operations, as was profiled, got \["):
        simulate(at_levels, without, ranks)


@pytest.mark.parametrize(
    ("saves", "kept"), [("recompute", (0, 1)), (LEVELS[0], ()), (LEVELS[0], (1, 0)), (LEVELS[0], (1, 1))]
)
def test_results_are_kept_in_order_and_at_levels_only(at_levels, saves, kept):
    wrong = dataclasses.replace(at_levels.blocks[0], treatment=Treatment(saves=saves), kept=kept)
    plan_of_it = dataclasses.replace(at_levels, blocks=(wrong, *at_levels.blocks[1:]))
    with pytest.raises(PlanFormatError, match=r"to name results in ascending order in 'kept'"):
        Plan.from_json(plan_of_it.to_json())


def test_blocks_at_levels_have_no_slices_inside(at_levels):
    name = next(block.name for block in at_levels.blocks if block.kept)
    inside = next(unit for unit in at_levels.units if unit.name.startswith(f"{name}."))
    slices = dataclasses.replace(inside, treatments=inside.treatments * 2)
    units = tuple(slices if unit is inside else unit for unit in at_levels.units)
    with pytest.raises(
        PlanFormatError, match=f"'{name}' .* to recompute everything, or no operator inside to be in slices"
    ):
        Plan.from_json(dataclasses.replace(at_levels, units=units).to_json())


def test_where_memory_is_short_blocks_at_levels_recompute_everything(deep, cluster, at_levels):
    ranks = cluster(2, seconds_per_byte=0.01)
    level = next(block for block in at_levels.blocks if block.kept)
    again = next(block for block in at_levels.recomputable if block.name == level.name)
    assert (again.frees_bytes, again.costs_s) == (380 - 40, pytest.approx(0.2 - 0.01))
    lower = at_levels
    while (lower := with_less_memory(lower, 1)) is not None:
        last = lower
        assert len(lower.blocks) == len({block.name for block in lower.blocks})
        assert Plan.from_json(lower.to_json()) == lower
        assert simulate(lower, deep, ranks).peak.peak_bytes <= at_levels.peak_bytes
    assert {(block.activations, block.frees_bytes) for block in last.blocks} == {("recompute", 560)}
    assert [block.costs_s for block in last.blocks] == pytest.approx([0.2] * len(last.blocks))


# ---- what is not searched


@pytest.fixture
def tried(monkeypatch):
    """Settings that modes were searched for, in order, and whether any fit."""
    found = []
    assign = competition.assign_ahead

    def record(setting, **options):
        assigned = assign(setting, **options)
        found.append((setting, assigned is not None))
        return assigned

    monkeypatch.setattr(competition, "assign_ahead", record)
    return found


def test_what_does_not_fit_at_one_size_is_not_searched_at_larger_ones(deep, cluster, tried):
    limit_bytes = plan(deep, cluster, 10**6, micro_batch_size=3).peak_bytes
    tried.clear()
    space = dataclasses.replace(SELECTIVE, share_units=False)
    found = plan(deep, cluster, limit_bytes, micro_batch_size=BatchPolicy.scale(), search_space=space)
    assert found.micro_batch_size > 3
    failed = {}
    for setting, fits in tried:
        size = setting.workload.micro_batch_size
        assert failed.get(setting.key, size) >= size
        if not fits:
            failed[setting.key] = min(size, failed.get(setting.key, size))
    assert len(failed) > 1


def test_blocks_that_recompute_are_not_searched_where_that_takes_longer_than_what_was_found(deep, cluster, tried):
    dear = tuple(dataclasses.replace(block, rerun_s=Affine(0.0, 10.0)) for block in deep.blocks)
    profile = dataclasses.replace(deep, blocks=dear)
    limit_bytes = plan(profile, cluster, 10**6).peak_bytes - 100
    tried.clear()
    found = plan(profile, cluster, limit_bytes)
    assert found.blocks == ()
    # of settings in which nothing is left to choose of blocks, none in which all of them recompute
    assert not any(setting.decided.blocks for setting, _ in tried)
    assert any(setting.activations == ("keep",) for setting, _ in tried)


def test_sizes_at_which_too_much_must_run_again_are_left_out(deep, cluster, tried, monkeypatch):
    limit_bytes = plan(deep, cluster, 10**6, micro_batch_size=8).peak_bytes
    options = {"micro_batch_size": BatchPolicy.scale(), "search_space": SELECTIVE}

    def sizes():
        tried.clear()
        found = plan(deep, cluster, limit_bytes, **options)
        assert found.blocks
        return {setting.workload.micro_batch_size for setting, _ in tried}, found.samples_per_s

    few, samples_per_s = sizes()
    monkeypatch.setattr(LeastSeconds, "_relaxed_s", lambda *_, **__: 0.0)
    many, in_all_per_s = sizes()
    assert len(few) < len(many)
    assert in_all_per_s <= samples_per_s * (1 + TOLERANCE)


@pytest.mark.parametrize("share_units", [False, slow(True)])
@examples(12)
@given(
    saved=st.sampled_from([40, 300]),
    latency_s=st.sampled_from([0.0, 0.05]),
    share=st.floats(0.3, 0.9),
    overlaps=st.booleans(),
)
def test_what_is_left_out_is_better_by_no_more_than_the_gap(
    model, operator, cluster, share_units, saved, latency_s, share, overlaps
):
    operators = in_blocks(operator, activation_bytes_per_sample=saved)
    profile = recomputable(model(*operators), BLOCKS)
    ranks = dataclasses.replace(cluster(2, latency_s=latency_s, seconds_per_byte=0.01), overlaps=overlaps)
    space = dataclasses.replace(SELECTIVE, share_units=share_units, min_unit_bytes=0)
    options = {"search_space": space, "engine": NO_PREFETCH}
    most = make_plan(profile, ranks, memory_limit_bytes=10**6, micro_batch_size=4, **options).peak_bytes
    options["memory_limit_bytes"] = int(share * most)
    try:
        found = make_plan(profile, ranks, micro_batch_size=BatchPolicy.scale(12), **options)
    except InfeasibleError:
        return
    best = 0.0
    for size in range(1, 13):
        with mock.patch.object(Attempt, "may_win", return_value=True), contextlib.suppress(InfeasibleError):
            best = max(best, make_plan(profile, ranks, micro_batch_size=size, **options).samples_per_s)
    # which units are shared differs from size to size, and is no part of what the gap is about
    assert best <= found.samples_per_s * (1 + max(found.gap, share_units * TOLERANCE)) * (1 + 1e-9)


# ---- with operators in slices


def least_limit_bytes(profile, cluster, **space):
    """The smallest limit under which there is a plan for eight samples, to a hundred bytes."""
    fails, fits = 0, 10**6
    while fits - fails > 100:
        middle = (fails + fits) // 2
        try:
            planned_with_head(profile, cluster, middle, **space)
        except InfeasibleError:
            fails = middle
        else:
            fits = middle
    return fits


def planned_with_head(profile, cluster, limit_bytes, *, micro_batch_size=8, method=None, **space):
    space = SearchSpace(**{"activations": RECOMPUTE.activations, "min_unit_bytes": 0, **space})
    options = {"micro_batch_size": micro_batch_size, "method": method, "search_space": space, "engine": NO_PREFETCH}
    return plan(profile, cluster, limit_bytes, **options)


@pytest.fixture(scope="module")
def with_head(model, operator, linear):
    """The blocks of `deep`, and behind them a larger operator that can be split."""
    return recomputable(model(*in_blocks(operator), linear("head", 64, 64)), BLOCKS)


@pytest.fixture(scope="module")
def both(with_head, cluster):
    """The least limit where blocks may recompute and operators may be split."""
    return least_limit_bytes(with_head, cluster)


def test_blocks_recompute_and_operators_are_split_where_neither_alone_is_enough(with_head, cluster, both):
    recomputing = least_limit_bytes(with_head, cluster, slices=(1,))
    split = least_limit_bytes(with_head, cluster, activations=("keep",))
    assert both < 0.7 * min(recomputing, split)
    for limit_bytes in (both, both + 10_000, min(recomputing, split) - 200):
        found = planned_with_head(with_head, cluster, limit_bytes)
        assert found.blocks
        assert {unit.name: unit.num_slices for unit in found.units}["head"] > 1
        assert simulate(found, with_head, cluster(2, seconds_per_byte=0.01)).peak.peak_bytes <= limit_bytes


def test_operators_inside_of_blocks_that_are_to_be_at_levels_stay_whole(model, linear, cluster):
    inside = in_blocks(lambda name, _, **costs: linear(name, 64, 64, **costs))
    profile = recomputable(model(*inside, linear("head", 64, 256)), BLOCKS)
    method = PlanMethod(blocks=dict.fromkeys(BLOCKS, LEVELS[0]))
    found = planned_with_head(profile, cluster, least_limit_bytes(profile, cluster, method=method), method=method)
    assert {block.activations for block in found.blocks} == {LEVELS[0]}
    assert [unit.name for unit in found.units if unit.num_slices > 1] == ["head"]
    assert Plan.from_json(found.to_json()) == found


def test_the_largest_micro_batch_may_need_both(with_head, cluster, both):
    found = planned_with_head(with_head, cluster, both, micro_batch_size=BatchPolicy.scale())
    assert found.micro_batch_size == 8


def test_where_both_are_not_enough_the_error_says_what_they_need(with_head, cluster, both):
    with pytest.raises(InfeasibleError) as caught:
        planned_with_head(with_head, cluster, both - 200)
    assert f"needs at least {both / 1024:.1f} KiB" in str(caught.value)


@pytest.mark.slow
@settings(deadline=None, max_examples=5)
@given(
    features=st.sampled_from([16, 64]),
    saved=st.sampled_from([40, 300, 1000]),
    samples=st.integers(1, 8),
    with_nodes=st.booleans(),
)
def test_what_fits_with_all_blocks_recomputing_and_operators_split_is_planned(
    model, operator, linear, cluster, features, saved, samples, with_nodes
):
    operators = in_blocks(operator, activation_bytes_per_sample=saved)
    profile = recomputable(model(*operators, linear("head", features, features)), BLOCKS)
    ranks = dataclasses.replace(cluster(4, seconds_per_byte=0.01), node_size=2 if with_nodes else None)
    keeping = Setting(
        profile=profile,
        units=partition(profile, min_unit_bytes=0),
        cluster=ranks,
        workload=Workload(micro_batch_size=samples),
        engine=NO_PREFETCH,
    )
    recomputing = keeping.with_blocks(dict.fromkeys(BLOCKS, "recompute"))
    space = dataclasses.replace(RECOMPUTE, min_unit_bytes=0)
    for setting in (recomputing, *[*ever_more_slices(recomputing, space.slices)][-1:]):
        limit_bytes = setting.costs.least_bytes
        options = {"memory_limit_bytes": limit_bytes, "micro_batch_size": samples, "search_space": space}
        assert make_plan(profile, ranks, engine=NO_PREFETCH, **options).peak_bytes <= limit_bytes
