"""Sentences that tell of a plan."""

import dataclasses

import pytest

from lightning_osdp.core.axes import Treatment, named
from lightning_osdp.core.correction import Correction
from lightning_osdp.core.plans.parts import Block, Option, Unit
from lightning_osdp.core.plans.plan import Plan
from lightning_osdp.core.text.byte_size import format_bytes
from lightning_osdp.core.text.duration import format_seconds
from lightning_osdp.report.sentences import (
    explain,
    format_span,
    group_equal,
    name_operators,
    name_treatment,
    summarise,
    tell_blocks,
    tell_kept,
)
from tests.support.plans import menu

MIB = 2**20
ROOT = Unit(name="", operators=("norm",), kind="LayerNorm", treatments=named("ZDP"))
LINEAR = Unit(
    name="fc",
    operators=("fc",),
    kind="Linear",
    treatments=named("ZDP"),
    parameter_bytes=8 * MIB,
    time_s=5e-3,
    menu=menu(1.2e-3, 4 * MIB),
)
KEPT = LINEAR.in_modes("DP")
HALF = LINEAR.in_modes("ZDP", "DP", "DP", "ZDP")
WAITS = dataclasses.replace(KEPT.treated(sync="last"), menu=menu(1.2e-3, 4 * MIB, 2.4e-3, 8 * MIB))
PLAN = Plan(
    fingerprint={},
    world_size=2,
    units=(ROOT, LINEAR, dataclasses.replace(KEPT, name="head", operators=("head",))),
    memory_limit_bytes=64 * MIB,
    peak_bytes=60 * MIB,
    micro_batch_size=8,
    num_micro_batches=1,
    step_time_s=0.2,
    samples_per_s=80.0,
    gap=0.003,
    solver="depth_first",
    all_zdp_step_time_s=0.25,
    all_zdp_peak_bytes=48 * MIB,
)
NOT_PREDICTED = dataclasses.replace(
    PLAN, step_time_s=0.0, samples_per_s=0.0, peak_bytes=0, gap=0.0, solver="", all_zdp_step_time_s=0.0
)

ONE_RANK = dataclasses.replace(PLAN, world_size=1)


def renamed(unit: Unit, name: str, **changes: object) -> Unit:
    return dataclasses.replace(unit, name=name, operators=(name,), **changes)


def with_left(left_bytes: int, **changes: object) -> Plan:
    return dataclasses.replace(PLAN, peak_bytes=PLAN.memory_limit_bytes - left_bytes, **changes)


def summary(plan: Plan) -> dict[str, str]:
    return dict(summarise(plan))


# ---- grouping


def test_equal_units_come_together_and_other_modes_of_the_same_operators_next():
    units = [
        ROOT,
        renamed(LINEAR, "h.0"),
        renamed(KEPT, "k"),
        renamed(LINEAR, "small", parameter_bytes=1),
        renamed(LINEAR, "h.1"),
    ]
    names = [[unit.name for unit in group] for group in group_equal(units)]
    assert names == [[""], ["h.0", "h.1"], ["k"], ["small"]]


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "Conv1d"},
        {"treatments": named("DP")},
        {"treatments": named("ZDP", "ZDP")},
        {"treatments": named("ZDP", sync="last")},
        {"treatments": (Treatment(states="host"),)},
        {"parameter_bytes": 1},
        {"name": ""},
    ],
)
def test_units_that_differ_in_what_a_reader_sees_stay_apart(change):
    assert len(group_equal([LINEAR, dataclasses.replace(renamed(LINEAR, "other"), **change)])) == 2


@pytest.mark.parametrize("change", [{"time_s": 1.0}, {"menu": menu(1.0, 1)}, {"operators": ()}])
def test_units_that_differ_in_measured_numbers_alone_share_a_row(change):
    assert len(group_equal([LINEAR, dataclasses.replace(renamed(LINEAR, "other"), **change)])) == 1


def test_the_order_of_slices_does_not_matter():
    assert len(group_equal([HALF, renamed(HALF, "other", treatments=named("DP", "ZDP", "ZDP", "DP"))])) == 1


# ---- names and treatment


def test_operators_of_a_group_are_folded():
    units = [
        Unit(name=f"h.{i}", operators=(f"h.{i}.ln_1", f"h.{i}.ln_2"), kind="", treatments=named("DP")) for i in range(6)
    ]
    assert name_operators(units) == "h.{0-5}.{ln_1,ln_2}"


def test_the_root_is_named_as_such_with_what_it_holds():
    root = Unit(name="", operators=("wpe", "h.0.ln", "h.1.ln", ""), kind="", treatments=named("DP"))
    assert name_operators([root]) == "(root) wpe\nh.{0-1}.ln\n(itself)"
    assert name_operators([dataclasses.replace(root, operators=())]) == "(root)"


def test_a_long_list_of_names_is_cut_and_counted():
    root = Unit(name="block", operators=tuple("abcdefghijk"), kind="", treatments=named("DP"))
    assert name_operators([root]) == "a\nb\nc\nd\ne\nf\ng\nh\nand 3 more"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({}, "ZDP"),
        ({"treatments": named("DP")}, "DP"),
        ({"treatments": named("DP", "ZDP", "DP", "DP")}, "1 ZDP + 3 DP"),
        ({"treatments": named("ZDP", "ZDP")}, "2 ZDP"),
        ({"treatments": named("DP", "DP")}, "2 DP"),
        ({"treatments": named("ZDP", sync="last")}, "ZDP\nsync last"),
        ({"treatments": named("DP", sync="last")}, "DP\nsync last"),
    ],
)
def test_the_mode_is_given_per_slice_with_what_departs_from_plain_fsdp(change, text):
    assert name_treatment(dataclasses.replace(LINEAR, **change)) == text


@pytest.mark.parametrize(
    ("values", "form", "text"),
    [
        ([1e-3], format_seconds, "1.00 ms"),
        ([1e-3, 1.0001e-3], format_seconds, "1.00 ms"),
        ([1.3e-3, 1.2e-3], format_seconds, "1.20 to 1.30 ms"),
        ([8e-4, 1.1e-3], format_seconds, "800 us to 1.10 ms"),
        ([MIB, 1536], format_bytes, "1.50 KiB to 1.00 MiB"),
        ([5, 7], format_bytes, "5 to 7 B"),
        ([2**30, 3 * 2**30], format_bytes, "1.00 to 3.00 GiB"),
    ],
)
def test_values_that_read_differently_are_given_as_a_range(values, form, text):
    assert format_span(values, form) == text


# ---- why


@pytest.mark.parametrize(
    ("unit", "plan", "sentence"),
    [
        (KEPT, PLAN, "keeping 4.00 MiB saves 1.20 ms"),
        (dataclasses.replace(KEPT, menu=menu(0.0, 4 * MIB)), PLAN, "keeping 4.00 MiB saves no time"),
        (KEPT.in_modes("DP", "DP"), PLAN, "keeping 4.00 MiB saves 1.20 ms"),
        (LINEAR, with_left(2 * MIB), "keeping it would save 1.20 ms but take 4.00 MiB; 2.00 MiB are left"),
        (
            LINEAR,
            with_left(4 * MIB),
            (
                "keeping it would save 1.20 ms and take 4.00 MiB;"
                " 4.00 MiB are left, but no better plan was found that keeps it"
            ),
        ),
        (LINEAR, with_left(4 * MIB, solver=""), "keeping it would save 1.20 ms and take 4.00 MiB; 4.00 MiB are left"),
        (LINEAR, with_left(0), "keeping it would save 1.20 ms but take 4.00 MiB; nothing is left"),
        (LINEAR, with_left(-MIB), "keeping it would save 1.20 ms but take 4.00 MiB; nothing is left"),
        (
            dataclasses.replace(LINEAR, menu=menu(0.0, 4 * MIB)),
            with_left(8 * MIB),
            "keeping it would save no time and take 4.00 MiB; 8.00 MiB are left",
        ),
        (
            HALF,
            with_left(MIB),
            (
                "keeping 2 of 4 slices, 2.00 MiB, saves 600 us;"
                " keeping the rest would save 600 us but take 2.00 MiB; 1.00 MiB are left"
            ),
        ),
        (WAITS, PLAN, "keeping 4.00 MiB saves 1.20 ms; 8.00 MiB held between micro-batches save 2.40 ms"),
        (
            dataclasses.replace(WAITS, menu=menu(1.2e-3, 4 * MIB, 0.0, 8 * MIB)),
            PLAN,
            "keeping 4.00 MiB saves 1.20 ms; 8.00 MiB held between micro-batches save no time",
        ),
        (ROOT, PLAN, "always kept: the root unit is never freed"),
        (ROOT, NOT_PREDICTED, "always kept: the root unit is never freed"),
        (dataclasses.replace(ROOT, operators=()), PLAN, "holds no parameters"),
        (LINEAR, NOT_PREDICTED, "not predicted"),
        (dataclasses.replace(LINEAR, menu=()), PLAN, "not predicted"),
        (KEPT, NOT_PREDICTED, "not predicted"),
        (LINEAR, ONE_RANK, "modes make no difference with one rank"),
        (ROOT, ONE_RANK, "modes make no difference with one rank"),
    ],
)
def test_the_reason_is_what_keeping_saves_and_takes(unit, plan, sentence):
    assert explain([unit], plan) == sentence


def test_the_reason_tells_what_the_host_updates():
    more = [Option(treatment=each.treatment.but(states="host"), more_s=each.more_s + 2e-3) for each in LINEAR.menu]
    device = [dataclasses.replace(each, more_bytes=each.more_bytes + 16 * MIB) for each in LINEAR.menu]
    hosted = dataclasses.replace(LINEAR.treated(states="host"), menu=(*device, *more))
    assert name_treatment(hosted) == "ZDP\nstates host"
    told = "; the host updates it: 16.0 MiB less for 2.00 ms"
    assert explain([hosted], PLAN).endswith(told)
    one = [ROOT.treated(states="host"), hosted, LINEAR]
    assert [explain([unit], ONE_RANK).partition("; ")[2] for unit in one] == ["the host updates it", told[2:], ""]


def test_the_reason_of_unequal_measurements_is_a_range():
    other = dataclasses.replace(KEPT, menu=menu(1.4e-3, 4 * MIB))
    assert explain([KEPT, other], PLAN) == "keeping 4.00 MiB saves 1.20 to 1.40 ms"


# ---- the whole plan


def test_the_prediction_stands_against_the_limit_and_plain_fsdp():
    assert summary(PLAN) == {
        "step time": "200 ms predicted for one optimizer step",
        "samples/s": "80.0 predicted, all ranks together",
        "peak memory": "60.0 MiB of 64.0 MiB (93.8%) predicted per rank",
        "gap": "no plan in the search space is predicted to be faster by more than 0.3%",
        "solver": "depth_first",
        "gain": "25.0% more samples/s than plain FSDP: 250 ms a step, peak 48.0 MiB",
        "batch": "8 samples x 1 micro-batch x 2 ranks = 16 samples per optimizer step",
    }


def test_memory_of_the_host_stands_beside_that_of_the_device():
    assert "host memory" not in summary(PLAN)
    hosting = dataclasses.replace(PLAN, host_bytes=3 * MIB)
    assert summary(hosting)["host memory"] == "3.00 MiB predicted per rank"
    limited = dataclasses.replace(hosting, host_limit_bytes=8 * MIB)
    assert summary(limited)["host memory"] == "3.00 MiB of 8.00 MiB predicted per rank"
    assert "predicted per rank, 3.00 MiB on the host\n" in str(limited)


def test_a_plan_without_a_profile_predicts_nothing_rather_than_zeros():
    assert summary(NOT_PREDICTED) == {
        "step time": "not predicted",
        "samples/s": "not predicted",
        "peak memory": "not predicted; the limit is 64.0 MiB",
        "gap": "not predicted",
        "solver": "none: the plan was not searched",
        "gain": "not predicted",
        "batch": "8 samples x 1 micro-batch x 2 ranks = 16 samples per optimizer step",
    }


@pytest.mark.parametrize(
    ("gap", "sentence"),
    [
        (0.0, "none: no plan in the search space is predicted to be faster"),
        (-1e-16, "none: no plan in the search space is predicted to be faster"),
        (1e-9, "no plan in the search space is predicted to be faster by more than 0.01%"),
        (0.003, "no plan in the search space is predicted to be faster by more than 0.3%"),
        (0.00301, "no plan in the search space is predicted to be faster by more than 0.31%"),  # rounded up
        (0.29, "no plan in the search space is predicted to be faster by more than 29%"),
        (2.5, "no plan in the search space is predicted to be faster by more than 250%"),
        (1e305, "no plan in the search space is predicted to be faster by more than 1e+307%"),
    ],
)
def test_the_gap_is_certified_and_so_rounded_up(gap, sentence):
    assert summary(dataclasses.replace(PLAN, gap=gap))["gap"] == sentence


@pytest.mark.parametrize(
    ("plan", "sentence"),
    [
        (ONE_RANK, "none: modes make no difference with one rank"),
        (dataclasses.replace(PLAN, units=(ROOT, LINEAR)), "none: this plan is plain FSDP"),
        (
            dataclasses.replace(PLAN, units=(ROOT, LINEAR, LINEAR.treated(sync="last"))),
            "25.0% more samples/s than plain FSDP: 250 ms a step, peak 48.0 MiB",
        ),
        (
            dataclasses.replace(PLAN, all_zdp_step_time_s=0.19),
            "5.0% fewer samples/s than plain FSDP: 190 ms a step, peak 48.0 MiB",
        ),
        (
            dataclasses.replace(PLAN, all_zdp_peak_bytes=65 * MIB, all_zdp_step_time_s=0.0),
            "plain FSDP does not fit: it takes at least 65.0 MiB",
        ),
        (dataclasses.replace(PLAN, all_zdp_step_time_s=0.0), "not predicted"),
        (
            dataclasses.replace(PLAN, num_micro_batches=2, all_zdp_how="recomputing"),
            "25.0% more samples/s than plain FSDP at its best (recomputing): 250 ms for as many samples, peak 48.0 MiB",
        ),
    ],
)
def test_the_gain_is_over_plain_fsdp(plan, sentence):
    assert summary(plan)["gain"] == sentence


def test_the_papers_peak_is_in_no_operator():
    plan = dataclasses.replace(PLAN, peak_phase="all phases", peak_parts={"activations": 3 * MIB})
    assert summary(plan)["peak is in"] == "all phases: activations 3.00 MiB"


def test_a_loss_that_takes_much_of_the_peak_is_told():
    assert "loss" not in summary(dataclasses.replace(PLAN, loss_bytes=PLAN.peak_bytes // 21))
    told = summary(dataclasses.replace(PLAN, peak_bytes=10 * MIB, loss_bytes=4 * MIB))["loss"]
    assert told == "8 chunks of logits and loss, as by chunked_cross_entropy, would take 4.00 MiB (40.0%) off the peak"


def test_shards_that_are_left_in_nodes_are_counted_beside_what_stays_whole():
    in_node = renamed(LINEAR, "h.0", treatments=named("hpZ"))
    units = (ROOT, LINEAR, in_node, renamed(LINEAR, "h.1", treatments=named("hpZ")), renamed(KEPT, "head"))
    assert tell_kept(dataclasses.replace(PLAN, units=units)) == "1 of 4 units unsharded, a shard of 2 in each node"
    assert tell_kept(PLAN) == "1 of 2 units unsharded"
    sliced = dataclasses.replace(PLAN, units=(*units, renamed(HALF, "split")))
    assert tell_kept(sliced) == "3 of 8 slices of 5 units unsharded, a shard of 2 in each node"


def test_the_batch_is_spelled_out():
    plan = dataclasses.replace(PLAN, micro_batch_size=1, num_micro_batches=4, world_size=1)
    assert summary(plan)["batch"] == "1 sample x 4 micro-batches x 1 rank = 4 samples per optimizer step"


def test_what_a_race_has_taught_is_told():
    correction = Correction(
        computing=1.2, links={"all": 0.8, "node": 1.05}, error=0.012, error_before=0.15, num_plans=6
    )
    told = summary(dataclasses.replace(PLAN, correction=correction, corrected_step_time_s=1.5 * PLAN.step_time_s))
    assert told["correction"] == (
        "computing takes 1.20 times as long as was measured apart, collectives 0.80 times, those in nodes 1.05 times;"
        " steps of 6 plans are predicted 1.2% off, and 15.0% without that"
    )
    after = format_seconds(1.5 * PLAN.step_time_s)
    assert told["step time"].endswith(f" predicted for one optimizer step, {after} after a race")
    assert "correction" not in summary(PLAN)
    assert "race" not in summary(PLAN)["step time"]


def test_every_note_of_the_plan_is_shown():
    noted = dataclasses.replace(PLAN, notes=("fell back to greedy", "loader kept"))
    assert summarise(noted)[-2:] == [("note", "fell back to greedy"), ("note", "loader kept")]


def test_blocks_with_equal_choices_are_told_together():
    blocks = (
        Block(name="h.0", treatment=Treatment(saves="recompute"), frees_bytes=3 * MIB, costs_s=0.001),
        Block(name="h.1", treatment=Treatment(saves="recompute"), frees_bytes=2 * MIB, costs_s=0.0005),
        Block(name="h.2", treatment=Treatment(saves="offload"), frees_bytes=MIB, costs_s=0.25),
        Block(name="h.3", treatment=Treatment(saves="recompute_offload")),
    )
    plan = dataclasses.replace(PLAN, blocks=blocks)
    told = [
        "h.{0-1} recomputed in backward: 5.00 MiB fewer at the end of forward, 1.50 ms more a step",
        "h.2 offloaded to host memory: 1.00 MiB fewer at the end of forward, 250 ms more a step",
        "h.3 recomputed in backward, inputs offloaded to host memory",
    ]
    assert list(tell_blocks(plan)) == told
    assert [sentence for label, sentence in summarise(plan) if label == "activations"] == told
    assert "activations" not in summary(PLAN)
