"""Units that move activations in place of weights: events, bytes sent and held, and seconds, counted by hand."""

import dataclasses
import re

import pytest

from lightning_osdp.core.affine import Affine
from lightning_osdp.core.axes import DP, HSDP, NODE_STATIONARY, STATIONARY, ZDP
from lightning_osdp.core.cluster import Cluster, Link, Links
from lightning_osdp.core.exchange import BY_HEADS, KINDS, Exchange, numbers_of_operators
from lightning_osdp.core.profile import Rerun
from lightning_osdp.core.step import Step, Workload
from lightning_osdp.core.units import grouped, partition
from lightning_osdp.errors import ConfigurationError
from lightning_osdp.planner.assign import Setting, pair_units
from lightning_osdp.planner.cost import evaluation_peak, exact_peak, step_memory, unit_s
from lightning_osdp.planner.cost.terms import collectives_s
from lightning_osdp.planner.engine import EXCHANGES, FSDP2, effects_of, in_modes, messages, saved_beyond
from lightning_osdp.planner.engine.events import EXCHANGES_OVER
from lightning_osdp.planner.simulation import StepClock, simulate_step

RANKS, INPUTS, HIDDEN, OUTPUTS, ROWS = 4, 8, 24, 12, 3
"""Features of a pair, and rows of a sample."""
SENT_S = 0.5
"""Seconds per byte."""
FLOAT = 4


def exchange(kind, operators=("first",), inputs=INPUTS, outputs=OUTPUTS, **fields):
    size = {"input": inputs, "input_gradient": inputs, "output": outputs}
    bytes_of = {f"{name}_bytes": Affine(0.0, FLOAT * ROWS * features) for name, features in size.items()}
    num_columns = len(operators) - 1 if kind in BY_HEADS else len(operators) * (kind == "column" and len(operators) > 1)
    others = {"saved_bytes": bytes_of["input_bytes"], "outputs": (bytes_of["output_bytes"],) * num_columns}
    if kind in BY_HEADS:
        others |= {"num_heads": 4, "saved_again": (Affine(),) * num_columns}
    return Exchange(kind, operators, **bytes_of | others | fields)


def sent(kind, samples, num_ranks=RANKS, operators=(), **fields):
    """Bytes that a rank sends in a micro-batch, from the sizes of whole tensors."""
    names = operators or ("a", "b", "c", "d")[: numbers_of_operators(kind)[0]]
    found = messages(exchange(kind, names, **fields), num_ranks)
    every = (each for of_kind in found.values() for each in of_kind)
    return sum(each.num_bytes.at(samples) * (num_ranks - 1) / num_ranks for each in every)


@pytest.mark.parametrize("num_ranks", [1, 2, 4, 7])
@pytest.mark.parametrize("samples", [1, 5])
def test_a_rank_sends_what_the_closed_forms_of_each_kind_say(num_ranks, samples):
    rows, i, o = samples * ROWS, INPUTS, OUTPUTS
    others = 2 * (num_ranks - 1) * rows * FLOAT
    assert sent("column", samples, num_ranks) == pytest.approx(others * (i + o / num_ranks))
    assert sent("row", samples, num_ranks) == pytest.approx(others * (o + i / num_ranks))
    of_three = sent("column", samples, num_ranks, ("q", "k", "v"))
    assert of_three == pytest.approx(others * (i + 3 * o / num_ranks))
    assert sent("pair", samples, num_ranks) == pytest.approx(others * (i + o))
    for kind in BY_HEADS:
        for names in (("a", "b", "c", "d")[:number] for number in numbers_of_operators(kind)):
            assert sent(kind, samples, num_ranks, names) == pytest.approx(others * (i + o))
    indices = {"input_bytes": Affine(0.0, 8.0 * ROWS), "input_gradient_bytes": Affine()}
    of_indices = (num_ranks - 1) * rows * 8
    assert sent("embedding", samples, num_ranks, **indices) == pytest.approx(others * o / num_ranks + of_indices)


@pytest.mark.parametrize(
    ("kind", "operators"),
    [("diagonal", ("a",)), ("pair", ("a",)), ("row", ("a", "b")), ("column", ("a", "b", "c", "d"))],
)
def test_kinds_are_known_and_have_their_number_of_operators(kind, operators):
    with pytest.raises(ConfigurationError) as caught:
        Exchange(kind, operators)
    assert str(caught.value) == (
        f"Expected an exchange of one of {KINDS} with one operator, up to three columns of one input, two or three"
        f" operators for a pair, two or four for attention, or two for heads and gated, got {kind!r} with {operators}."
    )


@pytest.mark.parametrize(("operators", "outputs"), [(("a",), 1), (("a", "b"), 0), (("a", "b"), 3)])
def test_outputs_are_those_of_each_of_several_columns(operators, outputs):
    with pytest.raises(ConfigurationError, match=f"Expected the output of each of several columns.*got {outputs} for"):
        Exchange("column", operators, outputs=(Affine(),) * outputs)


@pytest.mark.parametrize(("kind", "num_heads"), [*((kind, 0) for kind in sorted(BY_HEADS)), ("pair", 4), ("column", 1)])
def test_heads_are_those_of_attention(kind, num_heads):
    of_kinds = f"Expected a number of heads of one of {sorted(BY_HEADS)}, and of nothing else,"
    with pytest.raises(ConfigurationError, match=re.escape(f"{of_kinds} got {num_heads} for a '{kind}' with")):
        exchange(kind, ("a", "b", "c", "d")[: numbers_of_operators(kind)[0]], num_heads=num_heads)


def test_an_input_without_gradient_sends_none_back():
    without = exchange("column", input_gradient_bytes=Affine())
    assert [each.num_bytes for each in messages(without, RANKS)["exchange_input_gradients"]] == [Affine()]


def test_inputs_of_all_ranks_stay_for_backward_but_where_each_takes_its_features():
    x = Affine(0.0, FLOAT * ROWS * INPUTS)
    names = {kind: ("a", "b", "c", "d")[: numbers_of_operators(kind)[0]] for kind in KINDS}
    found = [saved_beyond(exchange(kind, names[kind]), RANKS) for kind in KINDS]
    assert found == [Affine() if kind == "row" else x * 3 for kind in KINDS]
    # another operator saves the same input
    assert saved_beyond(exchange("row", saved_bytes=Affine()), RANKS) == x
    assert saved_beyond(exchange("column", saved_bytes=Affine()), RANKS) == x * 4


def cluster(**fields):
    link = Link(latency_s=0.25, seconds_per_byte=SENT_S)
    return Cluster(world_size=RANKS, all_gather=link, reduce_scatter=link, **fields)


@pytest.fixture
def step(model, operator):
    """Three operators of 4000, 8000 and 800 bytes, of which the middle one moves activations; x is saved there."""

    def build(kind="column", num_micro_batches=1, samples=2, **fields):
        of_first = exchange(kind, ("m1",), input_gradient_bytes=Affine(0.0, 96.0))
        profile = model(
            operator("m0", 4000, activation_bytes_per_sample=50, forward_s_per_sample=1.0),
            operator(
                "m1",
                8000,
                activation_bytes_per_sample=96,
                forward_workspace_bytes_per_sample=144,
                backward_workspace_bytes_per_sample=240,
                forward_s_per_sample=2.0,
                backward_s_per_sample=4.0,
            ),
            operator("m2", 800, activation_bytes_per_sample=144, forward_s_per_sample=3.0),
            exchanges=(of_first,),
        )
        workload = Workload(micro_batch_size=samples, num_micro_batches=num_micro_batches)
        units = partition(profile, min_unit_bytes=0)
        return Step(profile=profile, units=units, cluster=cluster(**fields), workload=workload)

    return build


MODES = (DP, ZDP, STATIONARY, ZDP)


@pytest.mark.parametrize("num_micro_batches", [1, 3])
def test_every_micro_batch_exchanges_four_times_and_neither_gathers_nor_reduces(step, num_micro_batches):
    found, engine = step(num_micro_batches=num_micro_batches), FSDP2()
    counts = effects_of(STATIONARY).counts(found.units[2], num_micro_batches=num_micro_batches)
    assert counts == dict.fromkeys(EXCHANGES, num_micro_batches)
    assert set(effects_of(STATIONARY).overheads(found.units[2]).values()) == {0}
    for events in engine.events_of(found, MODES):
        kinds = [event.kind for event in events if event.of == 2 and event.kind not in {"forward", "backward"}]
        assert [kind for kind in kinds if kind != "release"] == [*EXCHANGES]
        # right before and after its segment, which is the second one
        around = [(event.kind, event.of) for event in events if event.kind != "release"]
        for kind, of, before, after in (
            ("forward", 1, "exchange_inputs", "exchange_outputs"),
            ("backward", 1, "exchange_output_gradients", "exchange_input_gradients"),
        ):
            place = around.index((kind, of))
            # what is gathered ahead may be issued meanwhile
            assert ("gather", 1) in around[place - 2 : place] or around[place - 1] == (before, 2)
            assert (before, 2) in around[place - 2 : place]
            assert around[place + 1] == (after, 2)


def in_nodes(**fields):
    """Fields of a cluster of two nodes, with links inside of them that are four times as fast."""
    within = Link(latency_s=0.25, seconds_per_byte=SENT_S / 4)
    return {
        "node_size": RANKS // 2,
        "within_node": Links(all_gather=within, reduce_scatter=within, all_reduce=within),
        **fields,
    }


NODE_MODES = (DP, HSDP, NODE_STATIONARY, ZDP)


@pytest.mark.parametrize("num_micro_batches", [1, 3])
def test_in_nodes_each_exchanges_and_gradients_of_shards_are_summed_between_them(step, num_micro_batches):
    found = step(num_micro_batches=num_micro_batches, **in_nodes())
    kinds = (*EXCHANGES_OVER["node"], "sum_between")
    counts = effects_of(NODE_STATIONARY).counts(found.units[2], num_micro_batches=num_micro_batches)
    assert counts == dict.fromkeys(kinds, num_micro_batches)
    for events in FSDP2().events_of(found, NODE_MODES):
        others = {"forward", "backward", "release"}
        assert [event.kind for event in events if event.of == 2 and event.kind not in others] == [*kinds]
    seconds = collectives_s(
        found.units[2], NODE_STATIONARY, cluster=found.cluster, workload=found.workload, engine=FSDP2()
    )
    # over two ranks, in a quarter of the time for a byte: an input, its gradient, and half of an output and of its own
    sent = 2 * ROWS * FLOAT * (2 * INPUTS + OUTPUTS)
    agreed_s = 2 * found.cluster.all_gather_s(4 * (RANKS + 2))
    between_s = found.cluster.all_reduce_between_s(8000 / 2)
    of_one_s = 4 * 0.25 + sent * SENT_S / 4 + agreed_s + between_s
    assert sum(seconds.values()) == pytest.approx(num_micro_batches * of_one_s)
    assert StepClock(found, FSDP2()).step(NODE_MODES).time_s == pytest.approx(simulate_step(found, NODE_MODES).time_s)
    assert exact_peak(found, NODE_MODES) == simulate_step(found, NODE_MODES).peak


def test_in_nodes_inputs_of_a_node_stay_and_shards_are_larger(step):
    found = step(**in_nodes())
    segments = [in_modes(found, modes).profile.segments[1] for modes in (MODES, NODE_MODES)]
    over_all, in_node = (segment.saved_bytes.at(2) for segment in segments)
    assert over_all - in_node == (RANKS - 2) * 2 * FLOAT * ROWS * INPUTS
    memory = step_memory(found, moving={2: NODE_STATIONARY})
    assert memory.peak(NODE_MODES).peak_bytes >= exact_peak(found, NODE_MODES).peak_bytes


def test_what_is_gathered_ahead_is_the_next_unit_that_gathers(step):
    found = step()
    (events,) = FSDP2(forward_prefetch=True).events_of(found, MODES)
    gathers = [event.of for event in events if event.kind == "gather"]
    assert gathers == [0, 1, 3, 3, 1]
    order = [(event.kind, event.of) for event in events]
    # the unit behind goes ahead of it, while the first one runs, and in backward that before
    assert order.index(("gather", 3)) < order.index(("forward", 0))
    assert max(index for index, each in enumerate(order) if each == ("gather", 1)) < order.index(
        ("exchange_output_gradients", 2)
    )


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("num_micro_batches", [1, 2, 5])
@pytest.mark.parametrize("kind", ["column", "row"])
def test_seconds_are_those_of_latencies_and_bytes_that_are_sent_and_grow_with_the_micro_batch(
    step, kind, num_micro_batches, overlaps
):
    for samples in (1, 4):
        found = step(kind, num_micro_batches, samples, overlaps=overlaps)
        around = {"cluster": found.cluster, "workload": found.workload}
        seconds = collectives_s(found.units[2], STATIONARY, **around)
        rows = 2 * (RANKS - 1) * (0.25 + 4 * (RANKS + 2) / RANKS * SENT_S)  # an all-reduce of numbers of rows
        expected = rows + 4 * (RANKS - 1) * 0.25 + sent(kind, samples) * SENT_S
        assert sum(seconds.values()) == pytest.approx(num_micro_batches * expected)
        assert unit_s(found.units[2], STATIONARY, **around) == pytest.approx(
            num_micro_batches * (expected + 6 * samples)
        )
        # computing waits for exchanges whatever overlaps
        with_it, without = (
            simulate_step(each, MODES, engine=FSDP2(backward_prefetch="none")).time_s
            for each in (found, dataclasses.replace(found, units=silent(found.units)))
        )
        assert with_it - without == pytest.approx(num_micro_batches * (expected - rows))


def silent(units):
    """Units whose exchanges have nothing to send."""
    nothing = {f"{name}_bytes": Affine() for name in ("input", "input_gradient", "output", "saved")}
    return tuple(
        dataclasses.replace(unit, exchange=unit.exchange and dataclasses.replace(unit.exchange, **nothing))
        for unit in units
    )


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("prefetch", ["none", "pre"])
@pytest.mark.parametrize("num_micro_batches", [1, 2, 5])
def test_the_clock_says_what_is_simulated(step, num_micro_batches, prefetch, overlaps):
    found, engine = step("row", num_micro_batches, overlaps=overlaps), FSDP2(backward_prefetch=prefetch)
    clock = StepClock(found, engine)
    for modes in ((DP, ZDP, STATIONARY, DP), (DP, DP.but(sync="last"), STATIONARY, ZDP), (DP, DP, ZDP, DP)):
        assert clock.step(modes).time_s == pytest.approx(simulate_step(found, modes, engine=engine).time_s)


@pytest.mark.parametrize("num_micro_batches", [1, 2])
def test_neither_weights_nor_gradients_are_ever_whole(step, num_micro_batches):
    found = step(num_micro_batches=num_micro_batches, samples=1, reduce_scatter_copies=False)
    estimate = simulate_step(found, (DP, ZDP, STATIONARY, ZDP), engine=FSDP2(backward_prefetch="none"))
    # the largest others: 4000 bytes gathered, with a buffer of as many beside the copy
    assert max(moment.parts["gathered parameters"] for _, moment in estimate.moments) == 8000
    running = [moment for _, moment in estimate.moments if moment.operator == "m1" and moment.phase == "backward"]
    # m2's reduce-scatter has 800, and the shard of the gradient is 8000 / 4
    assert [moment.parts["unsharded gradients"] for moment in running] == [800 + 2000] * len(running)
    reduced = {moment.parts["reduced gradients"] for _, moment in estimate.moments}
    assert reduced <= {12800 / 4, 0.0, 200.0, 2200.0, 3200.0}


@pytest.mark.parametrize(
    ("kind", "saved", "forward", "backward"),
    [
        # x = d = 96 and y = 144 bytes a sample, and g = 8000 / 4
        ("column", 3 * 96, 96 + 2 * 144, max(2 * 144 - 96, 3 * 96, 4 * (2 * 96 - 96) - 144)),
        ("row", 0, 96 + 2 * 4 * 144, max(4 * 144 - 96, 2 * 96 - 96 - 144)),
    ],
)
@pytest.mark.parametrize("samples", [1, 40])
def test_activations_of_all_ranks_live_as_long_as_they_are_needed(step, kind, saved, forward, backward, samples):
    found = step(kind, samples=samples)
    there, here = (in_modes(found, modes).profile.segments for modes in (MODES, (DP, ZDP, ZDP, ZDP)))
    assert here == found.profile.segments
    assert there[1].saved_bytes.at(samples) == (96 + saved) * samples
    assert there[1].forward_workspace_bytes.at(samples) == (144 + forward) * samples
    assert there[1].backward_workspace_bytes.at(samples) == 240 * samples + max(backward * samples, 2000)
    assert there[0] == here[0]
    assert there[2] == here[2]
    evaluation = {"column": max(4 * 96, 2 * 144), "row": 96 + 2 * 4 * 144}[kind] * samples
    # beside shards and state: m0 gathered, with its buffer, or what moves
    assert evaluation_peak(found, MODES) == pytest.approx(12800 / 4 * 3 + max(8000, evaluation))
    closed = step_memory(found)
    assert closed.held(closed.places[2], STATIONARY) == (saved * samples, 0.0)


def test_totals_behind_it_count_what_it_saves(step):
    found = step()
    segments = [
        dataclasses.replace(each, settled_bytes=Affine(500.0), ending_bytes=Affine(700.0), passed_bytes=Affine(600.0))
        for each in found.profile.segments
    ]
    found = dataclasses.replace(found, profile=dataclasses.replace(found.profile, segments=tuple(segments)))
    changed = in_modes(found, MODES).profile.segments
    more = 3 * 96 * 2
    assert [each.settled_bytes.at(2) for each in changed] == [500, 500, 500 + more, 500 + more]
    assert [each.ending_bytes.at(2) for each in changed] == [700, 700, 700 + more, 700 + more]
    assert [each.passed_bytes.at(2) for each in changed] == [600, 600, 600 + more, 600 + more]


def test_the_peak_is_that_of_the_simulated_step(step):
    for kind in ("column", "row"):
        for num_micro_batches in (1, 3):
            found = step(kind, num_micro_batches)
            assert exact_peak(found, MODES) == simulate_step(found, MODES).peak


def test_a_pair_holds_what_each_of_its_operators_needs(model, operator):
    profile = model(
        operator("fc", 4000, activation_bytes_per_sample=96),
        operator("proj", 4000, activation_bytes_per_sample=288),
        exchanges=(exchange("pair", ("fc", "proj")),),
    )
    units = grouped(profile, {"": [], "fc": ["fc", "proj"]}, {"fc": ["fc", "proj"]})
    assert [unit.exchange is not None for unit in units] == [False, True]
    found = Step(profile=profile, units=units, cluster=cluster(), workload=Workload(micro_batch_size=100))
    segments = in_modes(found, (DP, STATIONARY)).profile.segments
    x, y = 96 * 100, 144 * 100
    assert [each.saved_bytes.at(100) for each in segments] == [4 * x, 288 * 100, 0]
    assert [each.forward_workspace_bytes.at(100) for each in segments] == [x, 2 * 4 * y, 0]
    assert [each.backward_workspace_bytes.at(100) for each in segments] == [4 * x, 4 * y, 0]
    kinds = [(event.kind, event.of) for event in FSDP2().events_of(found, (DP, STATIONARY))[0]]
    parts = [each for each in kinds if each[0] in {*EXCHANGES, "forward", "backward"} and each[1] != 2]
    assert parts == [
        ("exchange_inputs", 1),
        ("forward", 0),
        ("forward", 1),
        ("exchange_outputs", 1),
        ("exchange_output_gradients", 1),
        ("backward", 1),
        ("backward", 0),
        ("exchange_input_gradients", 1),
    ]


def test_two_operators_that_feed_a_third_hold_one_gathered_input_and_add_up_its_gradients(model, operator):
    names = ("gate", "up", "proj")
    profile = model(
        operator("gate", 4000, activation_bytes_per_sample=96),
        operator("up", 4000),
        operator("proj", 4000, activation_bytes_per_sample=288),
        exchanges=(exchange("pair", names),),
    )
    units = grouped(profile, {"": [], "gate": names}, {"gate": names})
    assert [unit.exchange is not None for unit in units] == [False, True]
    found = Step(profile=profile, units=units, cluster=cluster(), workload=Workload(micro_batch_size=100))
    segments = in_modes(found, (DP, STATIONARY)).profile.segments
    x, y = 96 * 100, 144 * 100
    assert [each.saved_bytes.at(100) for each in segments] == [4 * x, 0, 288 * 100, 0]
    assert [each.forward_workspace_bytes.at(100) for each in segments] == [x, x, 2 * 4 * y, 0]
    assert [each.backward_workspace_bytes.at(100) for each in segments] == [2 * 4 * x, 4 * x, 4 * y, 0]
    kinds = [(event.kind, event.of) for event in FSDP2().events_of(found, (DP, STATIONARY))[0]]
    parts = [each[0] for each in kinds if each[0] in {*EXCHANGES, "forward", "backward"} and each[1] != 3]
    runs = ["exchange_inputs", *["forward"] * 3, "exchange_outputs"]
    assert parts == [*runs, "exchange_output_gradients", *["backward"] * 3, "exchange_input_gradients"]


def test_attention_holds_one_gathered_input_and_copies_in_the_order_of_heads(model, operator):
    names, i = ("q", "k", "v", "o"), Affine(0.0, 104.0)
    operators = [operator(name, 4000, activation_bytes_per_sample=96) for name in names]
    of_all = exchange("attention", names, fed_bytes=i, num_heads=8)
    profile = model(*operators, exchanges=(of_all,))
    units = grouped(profile, {"": [], "q": names}, {"q": names})
    found = Step(profile=profile, units=units, cluster=cluster(), workload=Workload(micro_batch_size=100))
    segments, before = (in_modes(found, (DP, mode)).profile.segments for mode in (STATIONARY, ZDP))
    x, y, fed = 96 * 100, 144 * 100, 104 * 100

    def beside(name):
        pairs = zip(segments, before, strict=True)
        return [getattr(each, name).at(100) - getattr(other, name).at(100) for each, other in pairs]

    assert beside("saved_bytes") == [3 * x, 0, 0, fed, 0]
    assert beside("forward_workspace_bytes") == [x + y, x + y, x + y, x + 2 * 4 * y, 0]
    assert beside("backward_workspace_bytes") == [2 * 4 * x, 2 * 4 * x, 4 * x, 4 * y, 0]
    kinds = [event.kind for event in FSDP2().events_of(found, (DP, STATIONARY))[0] if event.of == 1]
    assert [kind for kind in kinds if kind in EXCHANGES] == [*EXCHANGES]
    seconds = collectives_s(units[1], STATIONARY, cluster=found.cluster, workload=found.workload)
    assert all(each_s > 0 for each_s in seconds.values())


@pytest.mark.parametrize("is_copied", [False, True])
def test_attention_of_one_operator_copies_parts_of_its_gradient(model, operator, is_copied):
    """Where only the last operator saves what it takes, it is given a copy, and saves another one."""
    names, i = ("qkv", "o"), Affine(0.0, 104.0)
    operators = [operator(name, 4000, activation_bytes_per_sample=200) for name in names]
    of_all = exchange("attention", names, fed_bytes=i, saved_again=(i if is_copied else Affine(),))
    profile = model(*operators, exchanges=(of_all,))
    units = grouped(profile, {"": [], "qkv": names}, {"qkv": names})
    found = Step(profile=profile, units=units, cluster=cluster(), workload=Workload(micro_batch_size=100))
    segments, before = (in_modes(found, (DP, mode)).profile.segments for mode in (STATIONARY, ZDP))
    x, y, fed, g = 96 * 100, 144 * 100, 104 * 100, 4000 / 4

    def beside(name):
        pairs = zip(segments, before, strict=True)
        return [getattr(each, name).at(100) - getattr(other, name).at(100) for each, other in pairs]

    assert beside("saved_bytes") == [3 * x, 0 if is_copied else fed, 0]
    assert beside("forward_workspace_bytes") == [x + y, x + is_copied * fed + 2 * 4 * y, 0]
    assert beside("backward_workspace_bytes") == [max(y - x, 7 * x - y / 3 + g), 4 * y, 0]


def test_one_operator_of_features_by_head_copies_its_gradient(model, operator):
    names, i = ("qkv", "o"), Affine(0.0, 104.0)
    operators = [operator(name, 4000, activation_bytes_per_sample=200) for name in names]
    of_all = exchange("heads", names, fed_bytes=i)
    profile = model(*operators, exchanges=(of_all,))
    units = grouped(profile, {"": [], "qkv": names}, {"qkv": names})
    found = Step(profile=profile, units=units, cluster=cluster(), workload=Workload(micro_batch_size=100))
    segments, before = (in_modes(found, (DP, mode)).profile.segments for mode in (STATIONARY, ZDP))
    x, y = 96 * 100, 144 * 100
    pairs = zip(segments, before, strict=True)
    beside = [each.backward_workspace_bytes.at(100) - other.backward_workspace_bytes.at(100) for each, other in pairs]
    assert beside == [max(y - x, 4 * x), 4 * y, 0]


@pytest.mark.parametrize(("num_heads", "may_move"), [(8, True), (4, True), (6, False), (2, False)])
@pytest.mark.parametrize("kind", ["attention", "heads", "gated"])
def test_heads_are_not_cut(model, operator, kind, num_heads, may_move):
    names = ("q", "k", "v", "o")
    columns = exchange("column", names[:3])
    if kind != "attention":
        names, columns = ("qkv", "o"), exchange("column", ("qkv",))
    of_all = exchange(kind, names, num_heads=num_heads)
    profile = model(*(operator(name, 4000) for name in names), exchanges=(columns, of_all))
    setting = Setting(
        profile=profile,
        units=partition(profile, min_unit_bytes=0),
        cluster=cluster(),
        workload=Workload(micro_batch_size=1),
        modes=(ZDP, DP, STATIONARY),
        engine=FSDP2(),
    )
    if not may_move and kind != "attention":
        assert [*pair_units(setting)] == []
        return
    (joined,) = pair_units(setting)
    assert [len(unit.operators) for unit in joined.units] == ([0, len(names)] if may_move else [0, len(names) - 1, 1])
    assert [STATIONARY in options for options in joined.costs.options] == [False, True, *[False] * (not may_move)]


def test_units_of_other_operators_and_what_runs_again_have_no_exchange(model, operator, step):
    found = step()
    assert [unit.exchange is not None for unit in found.units] == [False, False, True, False]
    again = dataclasses.replace(found.profile, rerun={"block": Rerun((1, 2), False, ("m2",))})
    assert not any(unit.exchange for unit in partition(again, min_unit_bytes=0))
    operators = [operator(name, 4000) for name in ("q", "k")]
    profile = model(*operators, exchanges=(exchange("column", ("q", "k")),))
    members = {"": [], "q": ["q", "k"]}, {"q": ["q", "k"]}
    assert grouped(profile, *members)[1].exchange is not None
    for span, modules in (((1, 1), ()), ((0, 0), ()), ((2, 2), ("k",))):  # one of them alone
        again_in_part = dataclasses.replace(profile, rerun={"": Rerun(span, False, modules)})
        assert grouped(again_in_part, *members)[1].exchange is None
    away = dataclasses.replace(found.profile, copied=(((0, 1), Affine(0.0, 10.0)),))
    assert not any(unit.exchange for unit in partition(away, min_unit_bytes=0))
    elsewhere = dataclasses.replace(found, units=partition(again, min_unit_bytes=0))
    with pytest.raises(ConfigurationError) as caught:
        in_modes(elsewhere, MODES)
    assert str(caught.value) == (
        "Expected unit 'm1' to move weights, for no exchange of its activations was profiled, or it is run again in"
        " backward, got one that moves activations. Plan anew."
    )


@pytest.mark.parametrize("samples", [1, 100])
def test_columns_of_one_input_gather_it_once_and_exchange_its_gradients_when_all_are_there(model, operator, samples):
    names, g = ("q", "k", "v"), 4000 / RANKS
    there = {"backward_workspace_bytes_per_sample": 144 + 2 * 96}
    norm = operator("norm", 40, activation_bytes_per_sample=8)
    profile = model(
        operator("q", 4000, activation_bytes_per_sample=96, **there),
        norm,
        operator("k", 4000, **there),
        operator("v", 4000, **there),
        exchanges=(exchange("column", names),),
    )
    units = grouped(profile, {"": [], "q": names, "norm": ["norm"]}, {"q": names})
    assert [unit.exchange is not None for unit in units] == [False, True, False]
    workload = Workload(micro_batch_size=samples)
    found = Step(profile=profile, units=units, cluster=cluster(), workload=workload)
    modes = (DP, STATIONARY, ZDP)
    segments, before = (in_modes(found, each).profile.segments for each in (modes, (DP, ZDP, ZDP)))
    x, y = 96 * samples, 144 * samples

    def beside(name):
        pairs = zip(segments, before, strict=True)
        return [getattr(each, name).at(samples) - getattr(other, name).at(samples) for each, other in pairs]

    assert beside("saved_bytes") == [3 * x, 0, 0, 0, 0]
    assert beside("forward_workspace_bytes") == [x + 2 * y, 0, x + 2 * y, x + 2 * y, 0]
    # d = x; its gathered gradient stays beside what runs meanwhile
    of_first = max(2 * y - x - g + 3 * x, 6 * x, 4 * x - y - x, g)
    of_second = max(2 * y - x - g + 3 * x, 6 * x, g)
    assert beside("backward_workspace_bytes") == [of_first, 3 * x, of_second, max(2 * y - x - g, 3 * x, g), 0]
    kinds = [(event.kind, event.of) for event in FSDP2().events_of(found, modes)[0]]
    assert [each[0] for each in kinds if each[0] in EXCHANGES and each[1] == 1] == [*EXCHANGES]
    assert exact_peak(found, modes) == simulate_step(found, modes).peak


def test_copies_that_each_column_saves_for_itself_are_saved_no_more(model, operator):
    x = Affine(0.0, 96.0)
    of_two = exchange("column", ("q", "k"), saved_again=(x,))
    operators = [operator(name, 4000, activation_bytes_per_sample=96) for name in ("q", "k")]
    profile = model(*operators, exchanges=(of_two,))
    units = grouped(profile, {"": [], "q": ["q", "k"]}, {"q": ["q", "k"]})
    found = Step(profile=profile, units=units, cluster=cluster(), workload=Workload(micro_batch_size=100))
    segments = in_modes(found, (DP, STATIONARY)).profile.segments
    assert [each.saved_bytes.at(100) for each in segments] == [4 * 9600, 0, 0]


def test_each_of_several_columns_agrees_and_sends_its_output(model, operator):
    names = ("q", "k", "v")
    agreement = Link(latency_s=7.0, seconds_per_byte=0.0)
    profile = model(*(operator(name, 4000) for name in names), exchanges=(exchange("column", names),))
    (_, unit) = grouped(profile, {"": [], "q": names}, {"q": names})
    around = {"cluster": cluster(agreement=agreement), "workload": Workload(micro_batch_size=2)}
    seconds = collectives_s(unit, STATIONARY, **around)
    latency_s = (RANKS - 1) * 0.25
    agreed_s = around["cluster"].agreement_s(4 * (RANKS + 2))
    messages_s = sent("column", 2, RANKS, names) * SENT_S + (1 + 3 + 3 + 1) * latency_s
    assert sum(seconds.values()) == pytest.approx(3 * agreed_s + messages_s)
