"""Live bytes of equal units under FSDP2 against the closed forms that were counted in torch."""

from dataclasses import replace
from itertools import product

import pytest

from lightning_osdp.core.affine import Affine
from lightning_osdp.core.axes import DP, HDP, HPZ, HSDP, ZDP
from lightning_osdp.core.cluster import Link
from lightning_osdp.core.plans.plan import PREFETCH_CHOICES
from lightning_osdp.core.profile import ModelProfile, OperatorProfile, ParameterProfile, Segment
from lightning_osdp.planner.cost import evaluation_peak, step_memory
from lightning_osdp.planner.engine import FSDP2
from lightning_osdp.planner.simulation import simulate_step
from tests.support.steps import step_of

ROWS, COLUMNS, NUM_UNITS = 24, 10, 6
PRECISIONS = {"fp32": (4, 4), "bf16-mixed": (4, 2), "bf16": (2, 2)}
FREE = Link(latency_s=0.0, seconds_per_byte=0.0)


def linears(itemsize, gathered_itemsize, rows=ROWS, saved=0.0, reduced_itemsize=None):
    """Equal Linear operators with bias, under AdamW."""

    def part(position, elements):
        return ParameterProfile(
            position=position,
            num_elements=elements,
            itemsize=itemsize,
            gathered_itemsize=gathered_itemsize,
            reduced_itemsize=reduced_itemsize,
            num_rows=rows,
            state_bytes_per_element=2 * itemsize,
        )

    elements = rows * (COLUMNS + 1)
    operators = [
        OperatorProfile(
            name=f"m{index}",
            kind="Linear",
            enclosing=(f"m{index}", ""),
            parameter_bytes=elements * itemsize,
            num_trainable=elements,
            gathered_bytes=elements * gathered_itemsize,
            trainable_bytes=elements * itemsize,
            gradient_bytes=elements * gathered_itemsize,
            optimizer_bytes=2 * elements * itemsize,
            parameters=(part(2 * index, rows * COLUMNS), part(2 * index + 1, rows)),
        )
        for index in range(NUM_UNITS)
    ]
    segments = {one.name: Segment(operator=one.name, saved_bytes=Affine(saved)) for one in operators}
    return ModelProfile.in_turn(operators, segments)


def moments(profile, mode, engine, *, world_size, copies=True, num_micro_batches=1, node_size=None):
    step = step_of(profile, world_size=world_size, num_micro_batches=num_micro_batches, reduce_scatter_copies=copies)
    step = replace(step, cluster=replace(step.cluster, node_size=node_size))
    modes = [DP if unit.is_root else mode for unit in step.units]
    estimate = simulate_step(step, modes, engine=engine)
    bound = step_memory(step, engine=engine).peak(modes)
    assert estimate.peak.peak_bytes <= bound.peak_bytes or mode.needs_nodes
    return [moment for _, moment in estimate.moments], bound


def closed_form(itemsize, gathered_itemsize, mode, engine, *, world_size, copies, node_size=1, goes_on=True):
    """The largest moment, its bytes by what they are; gradients of the step before live to the end of forward.

    Where the backend copies, reduce-scatters go on while backward computes, or are waited for.
    """
    n, num, at_rest = world_size, NUM_UNITS, ROWS * (COLUMNS + 1) * itemsize
    s, w = at_rest / n, ROWS * (COLUMNS + 1) * gathered_itemsize
    g, r, last = w, w, ROWS * gathered_itemsize
    k = {"ZDP": 0, "hpZ": w / node_size, "DP": w}[mode.name]
    cast_shard, cast = (w / n, s) if itemsize != gathered_itemsize else (0, 0)
    base = num * (s + 2 * s)
    found = [base + num * s + (num - 1) * k + (2 if engine.asynchronous_unshard else 3) * w]
    if engine.forward_prefetch:
        # the next unit is gathered beside this one, and beside its buffer where that is still there
        beside = 2 * w + (0 if engine.asynchronous_unshard else w)
        found.append(base + num * s + (num - 2) * k + beside + cast_shard)
    for i in range(num):
        held = base + (num - 1 - i) * s + i * k
        p = w if engine.backward_prefetch == "pre" and i > 0 and mode is not DP else 0
        going = copies and goes_on
        q = (r + (r + (r / n if cast else 0)) * going) if i < num - 1 else 0
        cast_again = k if mode is HPZ and cast_shard else cast_shard
        found.append(held + q + w + p + (cast_again if p else 0))  # the next unit is gathered
        found.append(held + q + w + p + g)  # compute
        found.append(held + p + r + last + r / n + (r + cast if going else max(cast, r * copies)))  # reduce
        if mode is not DP:
            found.append(held + q + w + cast_again)  # it is gathered itself
            found.append(held + q + 2 * w + (k if mode is HPZ else 0))  # copy-out
    return max(found)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("mode", [ZDP, DP], ids=["ZDP", "DP"])
@pytest.mark.parametrize("world_size", [2, 4, 8])
@pytest.mark.parametrize("copies", [True, False])
def test_the_peak_of_equal_units_is_that_of_the_closed_form(precision, mode, world_size, copies):
    sizes = PRECISIONS[precision]
    for prefetch, ahead, asynchronous in product(PREFETCH_CHOICES, (False, True), (False, True)):
        engine = FSDP2(backward_prefetch=prefetch, forward_prefetch=ahead, asynchronous_unshard=asynchronous)
        found, bound = moments(linears(*sizes), mode, engine, world_size=world_size, copies=copies)
        expected = closed_form(*sizes, mode, engine, world_size=world_size, copies=copies)
        assert max(moment.num_bytes for moment in found) == pytest.approx(expected), engine
        assert bound.peak_bytes == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(("world_size", "node_size"), [(4, 2), (8, 4), (8, 2)])
def test_what_is_left_in_each_node_counts_until_it_is_copied_out(precision, world_size, node_size):
    sizes = PRECISIONS[precision]
    for prefetch, ahead, asynchronous in product(PREFETCH_CHOICES, (False, True), (False, True)):
        engine = FSDP2(backward_prefetch=prefetch, forward_prefetch=ahead, asynchronous_unshard=asynchronous)
        nodes = {"world_size": world_size, "node_size": node_size}
        found, bound = moments(linears(*sizes), HPZ, engine, **nodes)
        expected = closed_form(*sizes, HPZ, engine, copies=True, **nodes)
        assert max(moment.num_bytes for moment in found) == pytest.approx(expected), engine
        assert bound.peak_bytes == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize("mode", [HSDP, HDP], ids=["HSDP", "HDP"])
@pytest.mark.parametrize(("world_size", "node_size"), [(4, 2), (8, 4), (8, 2)])
def test_units_that_are_sharded_in_the_node_take_what_they_take_on_its_ranks_alone(mode, world_size, node_size):
    sizes, alone = PRECISIONS["fp32"], {HSDP: ZDP, HDP: DP}[mode]
    for prefetch, ahead, asynchronous in product(PREFETCH_CHOICES, (False, True), (False, True)):
        engine = FSDP2(backward_prefetch=prefetch, forward_prefetch=ahead, asynchronous_unshard=asynchronous)
        found, bound = moments(linears(*sizes), mode, engine, world_size=world_size, node_size=node_size)
        expected = closed_form(*sizes, alone, engine, world_size=node_size, copies=True, goes_on=False)
        assert max(moment.num_bytes for moment in found) == pytest.approx(expected), engine
        # the bound is one on all modes, of which others receive while they compute
        assert expected <= bound.peak_bytes <= 1.1 * expected + ROWS * (COLUMNS + 1) * sizes[0], engine


@pytest.mark.parametrize(("precision", "number", "stays"), [("fp32", 1, 0), ("fp32", 2, 1), ("bf16-mixed", 1, 1)])
def test_what_is_all_reduced_stays_until_backward_is_over(precision, number, stays):
    # beside gradients at rest, where they have another dtype or those of a micro-batch before are there already
    sizes, engine = PRECISIONS[precision], FSDP2(asynchronous_unshard=True)
    nodes = {"world_size": 8, "node_size": 4, "num_micro_batches": number}
    found, _ = moments(linears(*sizes), HSDP, engine, copies=False, **nodes)
    elements = NUM_UNITS * ROWS * (COLUMNS + 1) / 4
    at_rest, computed = elements * sizes[0], elements * sizes[1]
    most = max(moment.parts["reduced gradients"] for moment in found)
    # when the last unit reduces, its own are not there yet, or those of the micro-batch before alone
    share = (NUM_UNITS - 1) / NUM_UNITS
    expected = at_rest + stays * computed * share if number > 1 else share * (at_rest + stays * computed)
    assert most == pytest.approx(max(at_rest, expected))
    assert found[-1].parts["reduced gradients"] == pytest.approx(at_rest)
    # a backend that copies is through with it when the next unit is reduced
    found, _ = moments(linears(*sizes), HSDP, engine, copies=True, **nodes)
    assert max(moment.parts["reduced gradients"] for moment in found) == pytest.approx(at_rest)


# in units of w: shards and optimizer state 6 * 3 / 2 = 9, gradient shards 1/2 each, without biases' l
@pytest.mark.parametrize(
    ("mode", "asynchronous", "expected"),
    [
        (ZDP, False, 9 + 3 + 3),
        (ZDP, True, 9 + 3 + 2),
        (DP, False, 9 + 3 + 5 + 3),
        (DP, True, 9 + 3 + 5 + 2),
    ],
)
def test_forward_holds_two_buffers_or_one(mode, asynchronous, expected):
    w = ROWS * (COLUMNS + 1) * 4
    found, _ = moments(linears(4, 4), mode, FSDP2(asynchronous_unshard=asynchronous), world_size=2)
    assert max(moment.num_bytes for moment in found if moment.phase == "forward") == expected * w


def test_saved_tensors_are_gone_one_unit_after_the_other():
    # backward is through with m0 at the end only: its gradients are reduced last, after everything else is gone
    w = ROWS * (COLUMNS + 1) * 4
    found, _ = moments(linears(4, 4, saved=1000.0), ZDP, FSDP2(backward_prefetch="none"), world_size=2, copies=False)
    reduced = [moment for moment in found if moment.phase == "reduce-scatter"]
    assert [moment.operator for moment in reduced] == ["m5", "m4", "m3", "m2", "m1", "m0"]
    assert [moment.parts["activations"] for moment in reduced] == [6000.0, 5000.0, 4000.0, 3000.0, 2000.0, 0.0]
    assert [moment.parts["gathered parameters"] for moment in reduced] == [0.0] * 6
    assert [moment.parts["reduced gradients"] for moment in reduced] == [i * w / 2 for i in range(6)]


def test_backward_gathers_beside_the_gradient_that_is_handed_on():
    handed, engine = 100.0, FSDP2(backward_prefetch="none")
    profile = linears(4, 4)
    segments = tuple(replace(segment, passed_bytes=Affine(handed)) for segment in profile.segments[:-1])
    handing = replace(profile, segments=(*segments, profile.segments[-1]))
    without, _ = moments(profile, ZDP, engine, world_size=2, copies=False)
    found, _ = moments(handing, ZDP, engine, world_size=2, copies=False)
    most, before = (max(each, key=lambda moment: moment.num_bytes) for each in (found, without))
    # copying out takes as much as computing does, and the gradient, which the workspace of computing has
    assert most.num_bytes == before.num_bytes + handed
    assert (most.phase, most.operator, most.parts["workspace"]) == ("backward", "m0", handed)


def test_the_end_of_backward_is_beside_what_the_reduction_has_left():
    w, ending = ROWS * (COLUMNS + 1) * 4, 1e6
    profile = linears(4, 4, saved=1000.0)
    segments = list(profile.segments)
    segments[3] = replace(segments[3], ending_bytes=Affine(ending))
    engine = FSDP2(backward_prefetch="none")
    found, bound = moments(replace(profile, segments=tuple(segments)), ZDP, engine, world_size=2)
    most = max(found, key=lambda moment: moment.num_bytes)
    assert (most.phase, most.operator, most.parts["workspace"]) == ("backward", "m3", ending - 3000)
    # shards and optimizer state 9, of three units reduced gradients, and of m3 what was sent and received
    assert most.num_bytes == bound.peak_bytes == 9 * w + 3 * w / 2 + 2 * w + ending


def test_one_rank_copies_its_shards_too():
    w = ROWS * (COLUMNS + 1) * 4
    for mode, kept in ((ZDP, 1), (DP, NUM_UNITS)):
        found, _ = moments(linears(4, 4), mode, FSDP2(), world_size=1)
        forward = [moment for moment in found if moment.phase == "forward"]
        assert max(moment.parts["gathered parameters"] for moment in forward) == kept * w


def test_paddings_are_gathered_and_sent_but_no_gradients():
    # 5 rows on 4 ranks: chunks of 2, so that 8 are gathered
    padded, whole = 8 * (COLUMNS + 1) * 4, 5 * (COLUMNS + 1) * 4
    found, _ = moments(linears(4, 4, rows=5), ZDP, FSDP2(backward_prefetch="none"), world_size=4, copies=False)
    assert found[0].parts["parameter shards"] == NUM_UNITS * padded / 4
    assert found[0].parts["optimizer state"] == NUM_UNITS * 2 * padded / 4  # rank 0's, which owns all of its chunk
    backward = next(moment for moment in found if moment.phase == "backward" and moment.operator == "m5")
    assert backward.parts["gathered parameters"] == 2 * padded  # copied out
    reduced = next(moment for moment in found if moment.phase == "reduce-scatter")
    assert reduced.parts["unsharded gradients"] == padded + padded / 4 + 5 * 4
    assert max(moment.parts["unsharded gradients"] for moment in found) == padded + whole


@pytest.mark.parametrize("mode", [ZDP, DP], ids=["ZDP", "DP"])
def test_gradients_that_wait_are_whole_and_added_to_in_place(mode):
    w = ROWS * (COLUMNS + 1) * 4
    mode = {"ZDP": ZDP, "DP": DP}[mode.name]
    last = mode.but(sync="last")
    found, _ = moments(linears(4, 4), last, FSDP2(), world_size=2, num_micro_batches=3)
    assert max(moment.parts["accumulated gradients"] for moment in found) == NUM_UNITS * w
    forward = [moment for moment in found if moment.phase == "forward"]
    kept = NUM_UNITS if mode is DP else 0
    assert max(moment.parts["gathered parameters"] for moment in forward[-3:]) == max(kept, 2 if kept == 0 else 0) * w


@pytest.mark.parametrize(
    ("engine", "buffers"), [(FSDP2(), 1), (FSDP2(asynchronous_unshard=False), 2), (FSDP2(forward_prefetch=True), 2)]
)
def test_an_evaluation_gathers_into_buffers(engine, buffers):
    profile, w = linears(4, 4), ROWS * (COLUMNS + 1) * 4
    step = step_of(profile)
    states = NUM_UNITS * 3 * w / 2
    for mode, kept in ((ZDP, 1), (DP, NUM_UNITS)):
        modes = [DP if unit.is_root else mode for unit in step.units]
        peak = evaluation_peak(step, modes, engine=engine)
        assert peak == states + (kept + buffers) * w


def test_gradients_are_sent_and_wait_in_the_dtype_of_reducing():
    elements = ROWS * (COLUMNS + 1)
    profile = linears(4, 2, reduced_itemsize=4)
    found, _ = moments(profile, ZDP, FSDP2(backward_prefetch="none"), world_size=2, copies=False)
    (first, *_) = [moment for moment in found if moment.phase == "reduce-scatter"]
    assert first.parts["unsharded gradients"] == 4 * elements + 4 * elements / 2 + 2 * ROWS
    last = ZDP.but(sync="last")
    found, _ = moments(profile, last, FSDP2(backward_prefetch="none"), world_size=2, num_micro_batches=3)
    assert max(moment.parts["accumulated gradients"] for moment in found) == NUM_UNITS * 4 * elements
    (first, *_) = [moment for moment in found if moment.phase == "reduce-scatter"]
    # gradients of this micro-batch have been added, and the last whole one outlives its copy
    assert first.parts["accumulated gradients"] == (NUM_UNITS - 1) * 4 * elements
    assert first.parts["unsharded gradients"] == 2 * 4 * elements + 4 * elements / 2 + 4 * ROWS
