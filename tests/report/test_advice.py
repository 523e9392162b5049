"""Advice with its numbers, worked out by hand.

Two operators of 100 bytes each on two ranks, at 0.01 s a byte: a ring takes (N-1)/N * 100 * 0.01 = 0.5 s. Sharded, each
takes three rings in a step, kept two. A sample takes 1 s, so that a step of one sample takes

    both sharded    1 + 6 * 0.5 = 4 s
    one kept        1 + 5 * 0.5 = 3.5 s
    both kept       1 + 4 * 0.5 = 3 s
"""

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_osdp.core.affine import Affine
from lightning_osdp.core.axes import ZDP, Treatment
from lightning_osdp.core.exchange import Exchange
from lightning_osdp.core.plans.parts import Block, Unit
from lightning_osdp.core.plans.search_space import SearchSpace
from lightning_osdp.core.profile import CHUNKS, BlockProfile, Segment, in_chunks
from lightning_osdp.planner.scheduler import make_plan
from lightning_osdp.planner.simulation import simulate
from lightning_osdp.profiler import LiveBytes, TrainingStep, profile_model
from lightning_osdp.report.advice import advise
from lightning_osdp.report.tables import render_plan

MUCH = 2**40
SPACE = SearchSpace(share_units=False, slices=(1,), min_unit_bytes=0, sync=("every",))


@pytest.fixture
def ranks(cluster):
    return cluster(2, seconds_per_byte=0.01)


@pytest.fixture
def build(model, operator):
    """A model of `a` and `b`; what else it takes by name, per sample."""

    def made(**fields):
        times = {"forward_s_per_sample": 0.25, "backward_s_per_sample": 0.25, "activation_bytes_per_sample": 50}
        return model(operator("a", 100, **times), operator("b", 100, **times), **fields)

    return made


def planned(profile, ranks, *kept, limit_bytes=None, space=SPACE, **fields):
    """A plan that keeps some operators, in one micro-batch of one sample, by default under the limit that it needs."""
    plan = make_plan(profile, ranks, memory_limit_bytes=MUCH, micro_batch_size=1, search_space=space)
    units = [unit.in_modes("DP" if unit.name in kept else "ZDP") for unit in plan.units]
    plan = dataclasses.replace(plan, units=tuple(units), **fields)
    needed_bytes = simulate(plan, profile, ranks).peak.peak_bytes
    return dataclasses.replace(plan, memory_limit_bytes=limit_bytes or needed_bytes)


def by_change(plan, profile, ranks):
    found = {each.change: each for each in advise(plan, profile, ranks)}
    assert len(found) == len(advise(plan, profile, ranks))
    return found


def having(ranks, memory_bytes):
    return dataclasses.replace(ranks, memory_bytes=memory_bytes)


def test_where_nothing_is_to_be_saved_nothing_is_said(build, cluster):
    free = cluster(2, seconds_per_byte=0.0)
    profile = build(loss_activation_bytes_per_sample=10_000)
    assert advise(planned(profile, free), profile, free) == []
    assert advise(planned(profile, free, limit_bytes=MUCH), profile, free) == []


def test_a_larger_limit_is_worth_what_it_keeps(build, ranks):
    profile = build()
    plan = planned(profile, ranks)
    found = by_change(plan, profile, having(ranks, MUCH))["memory_limit"]
    needed_bytes = planned(profile, ranks, "a", "b").memory_limit_bytes
    assert found.saves == pytest.approx(1 / 4)
    assert f'memory_limit="{needed_bytes} B" saves 25.0% of a step (4.00 s to 3.00 s)' in found.sentence
    assert "2 more units stay gathered; 1.00 TiB were free" in found.sentence
    assert "free" not in by_change(plan, profile, ranks)["memory_limit"].sentence  # not known


def test_no_more_memory_is_proposed_than_is_free(build, ranks):
    profile = build(loss_activation_bytes_per_sample=400)  # most is alive in the loss, with all that is kept
    plan = planned(profile, ranks)
    one_bytes = planned(profile, ranks, "a").memory_limit_bytes
    assert one_bytes >= 1.1 * plan.memory_limit_bytes
    found = by_change(plan, profile, having(ranks, one_bytes))["memory_limit"]
    assert found.saves == pytest.approx(1 / 8)
    assert "1 more unit stays gathered" in found.sentence
    for free_bytes in (plan.memory_limit_bytes, plan.memory_limit_bytes * 21 // 20):
        assert "memory_limit" not in by_change(plan, profile, having(ranks, free_bytes))


def test_what_may_not_be_chosen_is_not_proposed(build, ranks):
    profile = build()
    plan = planned(profile, ranks, search_space=dataclasses.replace(SPACE, modes=("ZDP",)))
    assert "memory_limit" not in by_change(plan, profile, ranks)


def test_a_loss_in_chunks_takes_the_others_off_the_peak(build, ranks):
    profile = build(loss_activation_bytes_per_sample=8000)
    plan = planned(profile, ranks)
    found = by_change(plan, profile, ranks)["loss"]
    share = 7000 / plan.memory_limit_bytes  # its peak
    assert (
        f"in {CHUNKS} chunks, as by chunked_cross_entropy, take 6.84 KiB ({share:.1%}) off the peak" in found.sentence
    )
    assert "2 more units stay gathered: that saves 25.0% of a step" in found.sentence
    assert found.saves == pytest.approx(1 / 4)


def test_logits_that_are_handed_to_the_loss_go_with_it(build, ranks):
    profile = build(loss_forward_workspace_bytes_per_sample=8000)
    *before, last, loss = profile.segments
    handing = dataclasses.replace(
        last,
        forward_workspace_bytes=Affine(0.0, 8400.0),
        handed_bytes=Affine(0.0, 8000.0),
        backward_workspace_bytes=Affine(0.0, 8000.0),
    )
    loss = dataclasses.replace(loss, passed_bytes=Affine(0.0, 8000.0 + 100.0))  # with what `a` and `b` save
    profile = dataclasses.replace(profile, segments=(*before, handing, loss))
    plan = planned(profile, ranks)
    # workspace of the operator that makes the logits, 8400 less 7000
    assert "6.84 KiB" in by_change(plan, profile, ranks)["loss"].sentence


class Words(nn.Module):
    """A language model with many words, whose loss may be computed in chunks."""

    def __init__(self):
        super().__init__()
        self.embedding, self.body, self.head = nn.Embedding(4000, 16), nn.Linear(16, 16), nn.Linear(16, 4000)

    def loss(self, tokens, num_chunks):
        hidden, labels = self.body(self.embedding(tokens)).flatten(0, 1), tokens.flatten()
        parts = zip(hidden.chunk(num_chunks), labels.chunk(num_chunks), strict=True)
        if num_chunks == 1:
            return F.cross_entropy(self.head(hidden), labels)
        return sum(checkpoint(self.part, *part, use_reentrant=False) for part in parts) / len(labels)

    def part(self, hidden, labels):
        return F.cross_entropy(self.head(hidden), labels, reduction="sum")


def counted_peak(num_chunks):
    torch.manual_seed(0)
    words, tokens = Words(), torch.arange(512).view(8, 64)
    live = LiveBytes("cpu")
    live.track([*words.parameters(), tokens])
    with live:
        words.loss(tokens, num_chunks).backward()
    return live.peak_bytes


def test_chunks_take_off_what_they_are_predicted_to(cluster):
    words, tokens = Words(), torch.arange(512).view(8, 64)
    training = TrainingStep(
        run=lambda batch: words.loss(batch, 1), optimizers=lambda module: [torch.optim.SGD(module.parameters())]
    )
    profile = profile_model(words, tokens, training)
    plan = make_plan(profile, cluster(1), memory_limit_bytes=MUCH, micro_batch_size=8)
    peaks = [simulate(plan, each, cluster(1)).peak.peak_bytes for each in (profile, in_chunks(profile))]
    assert peaks[0] - peaks[1] == pytest.approx(counted_peak(1) - counted_peak(CHUNKS), rel=0.1)
    assert plan.loss_bytes == peaks[0] - peaks[1]
    assert peaks[1] < peaks[0] / 2


def test_a_loss_that_would_only_free_what_no_one_needs_stays_whole(build, ranks):
    profile = build(loss_activation_bytes_per_sample=8000)
    assert "loss" not in by_change(planned(profile, ranks, "a", "b"), profile, ranks)
    assert "loss" not in by_change(planned(profile, ranks, limit_bytes=MUCH), profile, ranks)


NOT_RUN_AGAIN = "blocks are not planned to recompute, for the step fails then: "


@pytest.mark.parametrize(
    ("space", "notes", "remedy"),
    [
        ({}, (), "activation_checkpointing_policy={Block}"),
        ({}, (f"{NOT_RUN_AGAIN}x (set model.config.use_cache = False)",), "model.config.use_cache = False"),
        ({}, (f"{NOT_RUN_AGAIN}it reads a file",), None),
        ({"activations": ("keep",)}, (), "SearchSpace(activations=('keep', 'recompute'))"),
    ],
)
def test_activations_that_cannot_be_recomputed_are_told_where_they_are_most(build, ranks, space, notes, remedy):
    profile = build(loss_activation_bytes_per_sample=2000, notes=notes)
    plan = planned(profile, ranks, space=dataclasses.replace(SPACE, **space))
    share = simulate(plan, profile, ranks).peak.parts["activations"] / plan.memory_limit_bytes
    assert share == pytest.approx(2100 / plan.memory_limit_bytes)
    found = by_change(plan, profile, ranks).get("activations")
    if remedy is None:
        assert found is None
        return
    assert f"activations are {share:.1%} of the peak, and memory would save up to 25.0% of a step" in found.sentence
    assert remedy in found.sentence
    assert found.saves == pytest.approx(1 / 4)


def test_activations_that_are_little_are_not_told(build, ranks):
    profile = build()
    assert "activations" not in by_change(planned(profile, ranks), profile, ranks)
    profile = build(loss_activation_bytes_per_sample=2000)
    assert "activations" not in by_change(planned(profile, ranks, "a", "b"), profile, ranks)  # nothing to gain


def recomputing(profile):
    """Makes `a` a block that saves nothing and takes a second more where it recomputes."""
    again = (dataclasses.replace(profile.segments[0], saved_bytes=Affine()),)
    block = BlockProfile(name="a", span=(0, 0), segments={"recompute": again}, rerun_s=Affine(0.0, 1.0))
    return dataclasses.replace(profile, blocks=(block,))


@pytest.mark.parametrize(("more_bytes", "is_told"), [(MUCH, True), (0, False)])
def test_blocks_that_need_not_have_been_told_to_recompute(build, ranks, more_bytes, is_told):
    profile = recomputing(build())
    asked = Block(name="a", treatment=Treatment(saves="recompute"), frees_bytes=50, costs_s=1.0)
    given = dataclasses.replace(SPACE, activations=("keep",))
    plan = planned(profile, ranks, "a", "b", blocks=(asked,), search_space=given)
    plan = dataclasses.replace(plan, memory_limit_bytes=plan.memory_limit_bytes + more_bytes)
    assert plan.given_blocks
    found = by_change(plan, profile, ranks)
    assert ("activations" in found) == is_told
    if is_told:
        sentence = "without activation_checkpointing_policy, 1 more block keeps activations under the same limit"
        assert sentence in found["activations"].sentence
        assert found["activations"].saves == pytest.approx(1 / 4)  # 4 s to 3 s


def test_blocks_that_were_chosen_to_recompute_keep_with_a_larger_limit(build, ranks):
    profile = recomputing(build())
    chosen = Block(name="a", treatment=Treatment(saves="recompute"), frees_bytes=50, costs_s=1.0)
    found = by_change(planned(profile, ranks, "a", "b", blocks=(chosen,)), profile, ranks)
    assert found["memory_limit"].saves == pytest.approx(1 / 4)
    assert "1 more block keeps activations" in found["memory_limit"].sentence


def exchanging(profile, *names, num_bytes=4.0):
    """Lets operators move activations of so many bytes for a sample.

    With 4 bytes, exchanges are of 8 bytes of inputs, 4 of outputs, 4 and 8 of gradients, and two of 16 bytes of numbers
    of rows: 0.04 + 0.02 + 0.02 + 0.04 + 2 * 0.08 = 0.28 s.
    """
    given = Affine(0.0, num_bytes)
    found = (
        Exchange("column", (name,), input_bytes=given, input_gradient_bytes=given, output_bytes=given) for name in names
    )
    return dataclasses.replace(profile, exchanges=tuple(found))


def test_operators_whose_activations_are_few_are_told_to_move_them(build, ranks):
    for names, step_s, operators in (("a", 4 - 1.5 + 0.28, "1 operator"), ("ab", 4 - 3 + 0.56, "2 operators")):
        profile = exchanging(build(), *names)
        found = by_change(planned(profile, ranks, limit_bytes=MUCH), profile, ranks)["modes"]
        assert found.saves == pytest.approx(1 - step_s / 4)
        assert found.sentence == (
            f"SearchSpace(modes={(*SPACE.offered_modes, 'stationary')}) saves {1 - step_s / 4:.1%} of a step (4.00 s to"
            f" {step_s:.2f} s): activations of {operators} would move in place of weights"
        )


@pytest.mark.parametrize("name", ["a", "b"])
def test_operators_that_share_a_unit_move_activations_without_the_others(build, ranks, name):
    profile = exchanging(build(), name)
    plan = planned(profile, ranks, limit_bytes=MUCH)
    unit = Unit(name="a", operators=("a", "b"), kind="Linear", treatments=(ZDP,), modules=("a", "b"))
    plan = dataclasses.replace(plan, units=(plan.units[0], unit))
    assert simulate(plan, profile, ranks).time_s == pytest.approx(4)
    assert by_change(plan, profile, ranks)["modes"].saves == pytest.approx(1 - 2.78 / 4)


def test_activations_are_not_told_to_move_where_that_is_offered_saves_little_or_does_not_fit(build, ranks):
    plan = planned(exchanging(build(), "a"), ranks, limit_bytes=MUCH)
    offered = dataclasses.replace(SPACE, modes=(*SPACE.offered_modes, "stationary"))
    for num_bytes, fields, is_told in (
        (17.0, {}, True),  # 0.67 s in place of 1.5 s: 21%
        (20.0, {}, False),  # 0.76 s: 18.5%
        (50.0, {}, False),  # 1.66 s
        (4.0, {"search_space": offered}, False),
        (4.0, {"memory_limit_bytes": 1}, False),
    ):
        found = by_change(dataclasses.replace(plan, **fields), exchanging(build(), "a", num_bytes=num_bytes), ranks)
        assert ("modes" in found) == is_told, (num_bytes, fields)


def test_other_micro_batches_are_told_for_the_same_samples(build, ranks):
    profile = build()
    # 4 * (1 + 2) = 12 s in four micro-batches, 2 * (2 + 2) = 8 s in two, 4 + 2 = 6 s in one
    plan = planned(profile, ranks, "a", "b", num_micro_batches=4, limit_bytes=MUCH)
    found = by_change(plan, profile, ranks)["micro-batches"]
    assert "micro-batches of 4 x 1 in place of 1 x 4 saves 50.0% of a step (12.0 s to 6.00 s)" in found.sentence
    in_two = dataclasses.replace(plan, micro_batch_size=2, num_micro_batches=2)
    fits_two = dataclasses.replace(plan, memory_limit_bytes=simulate(in_two, profile, ranks).peak.peak_bytes)
    assert "2 x 2 in place of 1 x 4 saves 33.3%" in by_change(fits_two, profile, ranks)["micro-batches"].sentence


def test_a_larger_micro_batch_is_told_as_far_as_it_fits(build, ranks):
    profile = build()
    plan = planned(profile, ranks, "a", "b")
    assert "batch_size" not in by_change(plan, profile, ranks)
    four = dataclasses.replace(plan, micro_batch_size=4)
    roomy = dataclasses.replace(plan, memory_limit_bytes=simulate(four, profile, ranks).peak.peak_bytes)
    found = by_change(roomy, profile, ranks)["batch_size"]
    # 3 s for one sample; 4 + 2 = 6 s for four
    assert "batch_size=4 in place of 1 takes 50.0% less time for a sample" in found.sentence
    assert "changes the global batch" in found.sentence


def test_the_table_ends_with_the_advice(build, ranks):
    profile = build()
    plan = planned(profile, ranks)
    advice = advise(plan, profile, ranks)
    lines = render_plan(plan, advice=advice, width=200).splitlines()
    assert lines[-len(advice) :] == [f"advice       {each.sentence}" for each in advice]
    assert "advice" not in render_plan(plan)


def test_a_model_of_one_segment_has_no_logits(model, ranks):
    profile = dataclasses.replace(model(), segments=(Segment(saved_bytes=Affine(0.0, 100.0)),))
    plan = make_plan(profile, ranks, memory_limit_bytes=MUCH, micro_batch_size=1)
    assert advise(plan, profile, ranks) == []
