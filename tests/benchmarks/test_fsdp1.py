"""FSDP1 as benchmarks describe it: its events, its bytes and its seconds, worked out by hand.

Most cases take three units of P = 40, 80, 120 bytes under Adam on two ranks, and two samples that save 10, 20, 30
bytes each in them and 5 in the loss. So, whatever the modes:

    base = 120 (shards) + 240 (Adam) = 360        s = 20, 40, 60 reduced        A_i = 20, 60, 120, and 130 with the loss
"""

from dataclasses import replace
from itertools import product

import pytest
from steps import step_of

from benchmarks.fsdp1 import FSDP1
from lightning_osdp.core.affine import Affine
from lightning_osdp.core.modes import DP, HDP, HSDP, ZDP
from lightning_osdp.core.profile import ParameterProfile, Rerun
from lightning_osdp.core.units import partition
from lightning_osdp.cost import step_memory
from lightning_osdp.simulation import simulate_step

LETTERS = {"D": DP, "Z": ZDP, "d": replace(DP, sync="last"), "z": replace(ZDP, sync="last")}


@pytest.fixture
def three(model, operator):
    """The model of most cases; fields by position of the operator."""

    def build(fields=None):
        operators = [
            operator(f"m{i}", size, **{"activation_bytes_per_sample": saved, **(fields or {}).get(i, {})})
            for i, (size, saved) in enumerate([(40, 10), (80, 20), (120, 30)])
        ]
        return model(*operators, loss_activation_bytes_per_sample=5)

    return build


def modes_of(letters):
    """Of units after the root; capitals reduce in every micro-batch."""
    return [DP, *(LETTERS[letter] for letter in letters)]


def step(profile, letters, *, world_size=2, samples=2, num_micro_batches=1, **settings):
    """The simulated step, and the closed form of its peak."""
    modes, engine = modes_of(letters), FSDP1(**settings)
    judged = step_of(profile, world_size=world_size, micro_batch_size=samples, num_micro_batches=num_micro_batches)
    return simulate_step(judged, modes, engine=engine), step_memory(judged, engine=engine).peak(modes)


def peak(profile, letters, **options):
    """Bytes, phase and operator of the peak; with one micro-batch, the closed form has the same."""
    found, bound = step(profile, letters, **options)
    assert found.peak.peak_bytes == bound.peak_bytes
    return bound.peak_bytes, bound.phase, bound.operator


# ---- events


def events(profile, letters, **settings):
    (found,) = FSDP1(**settings).events_of(step_of(profile), modes_of(letters))
    return " ".join(f"{kind}{of}" for kind, of in found if kind in {"gather", "free", "backward", "reduce"})


# units 1, 2, 3 are segments 0, 1, 2; unit 0 is the root, segment 3 the loss
@pytest.mark.parametrize(
    ("prefetch", "backward"),
    [
        (
            "none",
            "backward3 gather3 backward2 free3 reduce3 gather2 backward1 free2 reduce2 gather1 backward0 free1 reduce1",
        ),
        # before the unit's backward; a root without parameters prefetches nothing
        (
            "pre",
            "backward3 gather3 gather2 backward2 free3 reduce3 gather1 backward1 free2 reduce2 backward0 free1 reduce1",
        ),
        # after it, before gradients are reduced
        (
            "post",
            "backward3 gather3 backward2 free3 gather2 reduce3 backward1 free2 gather1 reduce2 backward0 free1 reduce1",
        ),
    ],
)
def test_backward_gathers_the_next_unit_before_after_or_when_it_comes(three, prefetch, backward):
    forward = "gather0 gather1 free1 gather2 free2 gather3 free3"
    assert events(three(), "ZZZ", backward_prefetch=prefetch) == f"{forward} {backward} free0 reduce0"


def test_forward_prefetch_gathers_the_next_unit_and_has_backward_through_with_it_one_later(three):
    found = events(three(), "DDD", forward_prefetch=True)
    assert found.startswith("gather0 gather1 gather2 gather3 backward3 backward2 backward1 free3 reduce3 backward0")


def test_a_block_that_recomputes_gathers_its_units_again_and_frees_them_but_for_the_last(model, operator):
    profile = model(operator("b.x", 40), operator("b.y", 80), operator("z", 20))
    profile = replace(profile, rerun={"b": Rerun((0, 1), is_early=False)})
    found = events(profile, "ZZZ", backward_prefetch="none")
    assert "reduce3 gather2 gather1 free1 backward1 free2 reduce2 gather1 backward0" in found


def test_a_unit_is_gathered_once_in_backward_however_often_forward_calls_it(model, operator):
    units = [
        partition(model(operator("first", 100), operator("m", 100, num_calls=number)), min_unit_bytes=0)[2]
        for number in (1, 2, 3)
    ]
    assert [FSDP1().num_all_gathers(ZDP, unit) for unit in units] == [2, 3, 4]
    assert [FSDP1().num_all_gathers(DP, unit) for unit in units] == [1, 1, 1]
    assert FSDP1().num_all_gathers(LETTERS["d"], units[2], num_micro_batches=4) == 1


def test_a_partly_frozen_unit_reduces_the_gradient_of_its_whole_flat_parameter(model, operator):
    partly = operator("m", 400, trainable_bytes=100, gradient_bytes=100)
    (_, unit, frozen) = partition(model(partly, operator("f", 400, frozen=True)), min_unit_bytes=0)
    assert [FSDP1().reduce_scatter_bytes(each, 4) for each in (unit, frozen)] == [400, 0]


HYBRID = {"H": HSDP, "h": replace(HSDP, sync="last"), "K": HDP, "k": replace(HDP, sync="last")}


def on_nodes(profile, letters, **options):
    """On two nodes of two ranks, with all units sharded in the node."""
    judged = step_of(profile, world_size=4, micro_batch_size=2, **options)
    root = replace(HDP, sync="last" if letters.islower() else "every")
    return replace(judged, cluster=replace(judged.cluster, node_size=2)), [root, *(HYBRID[each] for each in letters)]


def test_hybrid_strategies_reduce_in_the_node_and_then_between_nodes(three):
    (found,) = FSDP1(backward_prefetch="none").events_of(*on_nodes(three(), "HHH"))
    collectives = [f"{kind}{of}" for kind, of in found if "gather" in kind or "reduce" in kind]
    forward = [f"gather_in_node{unit}" for unit in (0, 1, 2, 3)]
    backward = [f"{kind}{unit}" for unit in (3, 2, 1) for kind in ("gather_in_node", "reduce_in_node", "all_reduce")]
    assert collectives == [*forward, *backward, "reduce_in_node0", "all_reduce0"]
    first, _, last = FSDP1().events_of(*on_nodes(three(), "kkk", num_micro_batches=3))
    assert not [kind for kind, _ in first if "reduce" in kind]
    assert [kind for kind, _ in last if "gather" in kind] == []  # kept since the first


# ---- bytes


# base 360, and no activations; S_u lives twice for a moment, as backward makes it and flat
def test_moments_come_in_order(model):
    found, _ = step(model(40, 80, 120), "ZDZ", backward_prefetch="none")
    assert [(m.phase, m.operator, m.num_bytes) for _, m in found.moments] == [
        ("forward", "m0", 480 + 40),
        ("forward", "m1", 480 + 80),
        ("forward", "m2", 480 + 80 + 120),
        ("forward", "", 480 + 80),
        ("backward", "", 360 + 80),
        ("backward", "m2", 360 + 80 + 120 + 120),
        ("backward", "m2", 360 + 80 + 120 + 120 + 120),
        ("reduce-scatter", "m2", 360 + 80 + 120 + 120 + 60),
        ("backward", "m1", 360 + 60 + 80 + 80),
        ("backward", "m1", 360 + 60 + 80 + 80 + 80),
        ("reduce-scatter", "m1", 360 + 60 + 80 + 80 + 40),
        ("backward", "m0", 360 + 100 + 40 + 40),
        ("backward", "m0", 360 + 100 + 40 + 40 + 40),
        ("reduce-scatter", "m0", 360 + 100 + 40 + 40 + 20),
        # the root holds nothing
        ("backward", "m0", 480),
        ("reduce-scatter", "m0", 480),
        ("optimizer step", "", 480),
    ]
    assert all(sum(m.parts.values()) == pytest.approx(m.num_bytes) for _, m in found.moments)


# pre    bwd(2) 360 +120+80 +120+120 +120 = 920     P_2, P_1 prefetched, S_2 twice, A_2
# none   bwd(2) 360 +120    +120+120 +120 = 840
# post   rs(2)  360 +80 +120+120+60  +120 = 860     P_1 is there already, S_2 is copied for sending, s_2
# ahead  bwd(1) 360 +120+80+40 +120 +120 +80 +60 = 980: through with m2 one unit later, P_0 prefetched, S_1
@pytest.mark.parametrize(
    ("modes", "settings", "expected"),
    [
        ("ZZZ", {}, (920, "backward", "m2")),
        ("DDD", {}, (960, "backward", "m2")),  # and P_0; P_1 is there anyway
        ("ZDZ", {}, (920, "backward", "m2")),  # it would be prefetched
        ("ZZZ", {"backward_prefetch": "none"}, (840, "backward", "m2")),
        ("ZDZ", {"backward_prefetch": "none"}, (920, "backward", "m2")),
        ("ZZZ", {"backward_prefetch": "post"}, (860, "reduce-scatter", "m2")),
        ("DZZ", {"backward_prefetch": "post"}, (900, "reduce-scatter", "m2")),
        ("ZZZ", {"forward_prefetch": True}, (980, "backward", "m2")),
        ("ZZZ", {"forward_prefetch": True, "backward_prefetch": "none"}, (940, "backward", "m2")),
    ],
)
def test_prefetching_holds_one_unit_more(three, modes, settings, expected):
    assert peak(three(), modes, **settings) == expected


def test_one_rank_gathers_nothing(three):
    # base 240 + 480 = 720; the loss in forward 720+240 +130
    for modes in ("ZZZ", "DDD"):
        assert peak(three(), modes, world_size=1) == (1090, "forward", "")


def test_a_partly_frozen_unit_has_a_flat_gradient_of_all_its_parameters(model, operator):
    # base 50 + 20 = 70; bwd = 70 +100 +100 (as produced, zeros for what is frozen) +100 (flat)
    profile = model(operator("m", 100, trainable_bytes=20, gradient_bytes=20, optimizer_bytes=40))
    assert peak(profile, "Z", samples=1) == (370, "backward", "m")


# bwd(2) of a steady micro-batch: s of units that have reduced, S of those that have not
@pytest.mark.parametrize(
    ("modes", "expected"),
    [("ZZZ", 920 + 120), ("ZZz", 920 + 60 + 120), ("zzz", 920 + 240), ("ddd", 960 + 240), ("dZZ", 920 + 80 + 100)],
)
def test_a_unit_that_accumulates_holds_its_gradient_whole(three, modes, expected):
    found, bound = step(three(), modes, num_micro_batches=3)
    assert (found.peak.peak_bytes, found.peak.phase, found.peak.operator) == (expected, "backward", "m2")
    assert expected <= bound.peak_bytes


def test_a_gather_that_casts_its_shard_finds_what_was_handed_on(model, operator):
    halves = [
        operator(
            f"m{i}",
            160,
            gathered_bytes=80,
            gradient_bytes=80,
            parameters=(ParameterProfile(position=i, num_elements=40, itemsize=4, gathered_itemsize=2),),
        )
        for i in range(2)
    ]
    profile = model(*halves)
    first, *others = profile.segments
    profile = replace(profile, segments=(replace(first, handed_bytes=Affine(0.0, 7.0)), *others))
    found, _ = step(profile, "ZZ")
    forward = [(m.operator, m.num_bytes) for _, m in found.moments if m.phase == "forward"]
    base = 160 + 160  # shards and reduced gradients
    assert forward == [
        ("m0", base + 80 + 40),
        ("m0", base + 80),
        ("m1", base + 80 + 40 + 2 * 7),
        ("m1", base + 80),
        ("", base),
    ]


@pytest.mark.parametrize("modes", [*map("".join, product("ZD", repeat=3))])
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("settings", [{}, {"backward_prefetch": "post"}, {"forward_prefetch": True}])
def test_the_largest_moment_is_the_peak_of_the_closed_form(three, modes, world_size, settings):
    found, bound = step(three(), modes, world_size=world_size, **settings)
    largest = max(moment.num_bytes for _, moment in found.moments)
    assert largest == pytest.approx(bound.peak_bytes)
    where = [(m.phase, m.operator) for _, m in found.moments if m.num_bytes == largest]
    assert (bound.phase, bound.operator) in where


# sharded over two ranks in either case; what is all-reduced between nodes is the shard that is kept
@pytest.mark.parametrize(("hybrid", "letters"), [("HHH", "ZZZ"), ("KKK", "DDD"), ("hhh", "zzz"), ("kkk", "ddd")])
@pytest.mark.parametrize("num_micro_batches", [1, 3])
def test_hybrid_strategies_take_what_they_take_on_one_node(three, hybrid, letters, num_micro_batches):
    found = simulate_step(*on_nodes(three(), hybrid, num_micro_batches=num_micro_batches), engine=FSDP1())
    alone, _ = step(three(), letters, num_micro_batches=num_micro_batches)
    assert found.peak.peak_bytes == alone.peak.peak_bytes


# ---- seconds


def timed(model, cluster, letters, *, sizes=3, forward_s=3.0, backward_s=6.0, ring_s, **settings):
    """Units of 100 bytes; on two ranks a ring takes 1/2 * 100 bytes * seconds_per_byte."""
    profile = model(*[100] * sizes)
    segments = [
        replace(segment, forward_s=Affine(forward_s), backward_s=Affine(backward_s))
        for segment in profile.segments[:-1]
    ]
    profile = replace(profile, segments=(*segments, profile.segments[-1]))
    ranks = replace(cluster(2, seconds_per_byte=ring_s / 50), overlaps=True)
    return simulate_step(replace(step_of(profile), cluster=ranks), modes_of(letters), engine=FSDP1(**settings))


def test_without_prefetch_gathers_queue_behind_reduce_scatters(model, cluster):
    # the host runs ahead: m2 is gathered again while its forward computes, as soon as m1 is freed
    # AG0 1, F0 4, F1 7, F2 10, AG2 8, B2 16, RS2 17, AG1 18, B1 24, RS1 25, AG0 26, B0 32, RS0 33
    assert timed(model, cluster, "ZZZ", ring_s=1.0, backward_prefetch="none").time_s == pytest.approx(33)
    # all that shows else: the first gather, and the last reduce-scatter
    assert timed(model, cluster, "ZZZ", ring_s=1.0).time_s == pytest.approx(27 + 2)


@pytest.mark.parametrize("forward_s", [0.3, 0.5, 1.0])
def test_a_gather_after_backward_is_as_early_and_holds_one_unit_less(model, cluster, forward_s):
    before, after, late = (
        timed(
            model,
            cluster,
            "Z" * 8,
            sizes=8,
            forward_s=forward_s,
            backward_s=2 * forward_s,
            ring_s=1.0,
            backward_prefetch=each,
        )
        for each in ("pre", "post", "none")
    )
    assert before.time_s == after.time_s < late.time_s
    assert before.peak.peak_bytes > after.peak.peak_bytes >= late.peak.peak_bytes


def test_slow_communication_is_all_that_counts(model, cluster):
    # ZZZ: nine rings, one after the other; DDD: F2 33, B2 39, RS2 49, RS1 59, RS0 69
    assert timed(model, cluster, "ZZZ", ring_s=10.0).time_s == pytest.approx(90)
    assert timed(model, cluster, "DDD", ring_s=10.0).time_s == pytest.approx(69)


def test_no_more_than_two_freed_units_are_in_flight(model, cluster):
    # computing is slow, gathers quick: the fourth gather waits for the second unit to be freed
    found = timed(model, cluster, "ZZZZ", sizes=4, forward_s=10.0, backward_s=0.0, ring_s=1.0)
    gathers = [i.start_s for i in found.intervals if i.event.kind == "gather" and i.start_s < 41]
    assert gathers[:4] == pytest.approx([0.0, 1.0, 11.0, 21.0])
