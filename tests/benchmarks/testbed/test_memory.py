"""The counter against bytes added up by hand, in units of one layer W; s = W/2 is a shard on two ranks.

base            3 * 1.5 = 4.5: shards and the two moments of AdamW; and 3 s = 1.5 reduced gradients during forward
forward         6 + the layers kept so far, and of the last one the buffer that was gathered and what is copied from it
backward        ZZZ: at the second of three layers 4.5 + s reduced before + 1 that the reduction before took + 1 of the
                layer + 1 gathered ahead + 1 of its gradient. DDD: the same with 2 layers and none gathered ahead. On
                gloo 1 that the reduction before receives
reduce-scatter  ZZZ: at that layer 4.5 + s reduced before + 1 gathered ahead + 1 that is reduced + 1 of the gradient
                that it was made of, which a name holds + s of the result. DDD: at the last one 4.5 + 2 layers + 1 + 1
                + s. On gloo 1 that is received
optimizer       6 + three temporaries of one shard
"""

import dataclasses

import pytest

from benchmarks.families import build
from benchmarks.measures.accuracy.memory import ANY_RATES, FREE
from benchmarks.testbed.groups import counted_group, fake_group, simulated_group
from benchmarks.testbed.memory import PHASES, WARM_UP_STEPS, count_step
from benchmarks.testbed.plans import plan_of
from benchmarks.testbed.simulated import SimulatedLinks
from lightning_osdp import Cluster, SearchSpace, make_plan, profile_model, simulate
from lightning_osdp.core.cluster import Link
from tests.benchmarks.testbed.linears import LAYER_BYTES, WIDTH, Linears, plan_for_linears
from tests.distributed.support.fits import moving


def like_gloo(world_size):
    return simulated_group(world_size, SimulatedLinks(copies_reduced=True))


def layers(step):
    """Phases in units of a layer, activations rounded away."""
    return [round(step.phases[phase] / LAYER_BYTES, 1) for phase in PHASES]


@pytest.mark.parametrize(
    ("modes", "group", "expected"),
    [
        ("ZZZ", fake_group, [8.0, 9.0, 8.5, 7.5]),
        ("ZZZ", like_gloo, [8.0, 10.0, 9.5, 7.5]),
        ("DDD", fake_group, [10.0, 9.0, 9.0, 7.5]),
        ("DDD", like_gloo, [10.0, 10.0, 10.0, 7.5]),
    ],
)
def test_phases_equal_the_sums_by_hand(modes, group, expected):
    with group(2):
        found = count_step(Linears(), plan_for_linears(modes, world_size=2))
    assert layers(found) == expected
    assert found.peak_bytes == max(found.phases.values())


def test_micro_batches_add_to_the_gradients_of_those_before():
    # forward carries 1.5 gradients in the second micro-batch too; backward has all of them instead of s, and what is
    # reduced is added to them
    with fake_group(2):
        found = count_step(Linears(), plan_for_linears("ZZZ", world_size=2, num_micro_batches=2))
    assert layers(found) == [8.0, 10.0, 9.5, 7.5]


@pytest.mark.parametrize("forward_prefetch", [False, True])
@pytest.mark.parametrize(("asynchronous_unshard", "forward"), [(True, 8.0), (False, 9.0)])
def test_buffers_that_are_gathered_synchronously_outlive_the_next_copy(asynchronous_unshard, forward_prefetch, forward):
    # the buffer of the layer before, in forward alone: 6 + 1 + the 2 of a layer that is copied. A layer that is
    # gathered ahead takes its buffer when the layer before has left its own, so that no more than these live
    plan = dataclasses.replace(
        plan_for_linears("ZZZ", world_size=2),
        asynchronous_unshard=asynchronous_unshard,
        forward_prefetch=forward_prefetch,
    )
    with fake_group(2):
        found = count_step(Linears(), plan)
    assert layers(found) == [forward, 9.0, 8.5, 7.5]


@pytest.mark.slow  # tests/distributed/memory/test_moving_peak.py counts them on ranks
def test_units_that_move_activations_are_counted_as_predicted():
    link = Link(latency_s=0.0, seconds_per_byte=1e-6)
    plan = make_plan(
        profile_model(build("tiny"), build("tiny").batch(2), rates=ANY_RATES, exchanges=True),
        Cluster(world_size=4, all_gather=link, reduce_scatter=link),
        memory_limit_bytes=2**40,
        micro_batch_size=1,
        search_space=SearchSpace(modes=("ZDP", "DP", "stationary"), activations=("keep",), min_unit_bytes=0),
    )
    assert "pair" in {unit.exchange for unit in plan.units if "stationary" in unit.modes}
    with counted_group(4):
        counted = count_step(build("tiny"), plan).peak_bytes
    assert plan.peak_bytes == pytest.approx(counted, rel=0.01)


def test_activations_of_many_samples_that_move_are_counted_as_predicted():
    """Gathered inputs are gone when gradients of them are exchanged; on few samples parameters decide the peak."""
    module, num_samples, world_size = build("mingpt"), 64, 8
    profile = profile_model(module, module.batch(num_samples), rates=ANY_RATES, exchanges=True)
    plan = plan_of(module, {"model.head": "ZDP"}, world_size=world_size, micro_batch_size=num_samples)
    plan = moving(plan, [("column", ("model.head",))])
    cluster = Cluster(world_size=world_size, all_gather=FREE, reduce_scatter=FREE, reduce_scatter_copies=False)
    predicted = simulate(plan, profile, cluster).peak
    with fake_group(world_size):
        counted = count_step(build("mingpt"), plan)
    assert (predicted.phase, predicted.operator) == ("backward", "model.head")
    assert predicted.peak_bytes == pytest.approx(counted.peak_bytes, rel=2e-3)


LOSS_BYTES = 64
"""Most bytes of the loss, and of the numbers of steps that the optimizer keeps."""


class Between(Linears):
    """Layers with most of the activations between the last two."""

    def loss(self, batch):
        first, second, last = self.layers
        wide = second(first(batch[0])).repeat(1, 8).tanh()
        # mse_loss allocates all of its summands for the loss, which live as long in a trace
        return (last(wide.view(-1, 8, WIDTH).mean(1)) - batch[1]).square().mean()


@pytest.mark.parametrize("units", [["layers.0", "layers.1", "layers.2"], []], ids=["reduced", "not reduced"])
def test_backward_of_what_is_before_a_layer_is_counted_as_predicted(units):
    """Runs when the layer's gradients are complete: the layer's unit is reduced by then, or the root's is not."""
    num_samples = 96
    profile = profile_model(Between(), Between().batch(num_samples), rates=ANY_RATES)
    plan = plan_of(Between(), dict.fromkeys(units, "ZDP"), world_size=2, micro_batch_size=num_samples)
    cluster = Cluster(world_size=2, all_gather=FREE, reduce_scatter=FREE, reduce_scatter_copies=True)
    predicted = simulate(plan, profile, cluster).peak
    with counted_group(2):
        counted = count_step(Between(), plan)
    assert counted.peak_bytes == counted.phases["backward"]
    assert (predicted.phase, predicted.operator) == ("backward", "layers.2")
    assert predicted.peak_bytes == pytest.approx(counted.peak_bytes, abs=LOSS_BYTES)


@pytest.mark.slow
def test_all_steps_after_the_first_are_alike():
    found = []
    for num_steps in (1, 3):
        with fake_group(3):
            module = build("odd_mlp", optimizer="adamw_foreach")
            plan = plan_of(module, {"layers.1": "ZDP", "layers.2": "DP"}, world_size=3, micro_batch_size=2)
            found.append(count_step(module, plan, precision="bf16-mixed", num_steps=num_steps))
    assert WARM_UP_STEPS == 1
    assert found[0] == found[1]


def test_the_curve_is_that_of_the_phases():
    with fake_group(2):
        found = count_step(Linears(), plan_for_linears("ZDZ", world_size=2), keeps_curve=True)
    assert list(dict.fromkeys(change.phase for change in found.curve)) == list(PHASES)
    most = {phase: max(change.num_bytes for change in found.curve if change.phase == phase) for phase in PHASES}
    assert most == found.phases
    in_forward = dict.fromkeys(change.operator for change in found.curve if change.phase == "forward")
    assert list(in_forward) == ["", "layers.0", "layers.1", "layers.2"]
    assert {change.operator for change in found.curve if change.phase != "forward"} == {""}


def test_one_rank_reduces_nothing():
    with fake_group(1):
        found = count_step(Linears(), plan_for_linears("ZZZ", world_size=1))
    assert set(found.phases) == {"forward", "backward", "optimizer step"}
    # layers, moments and gradients, 3 + 6 + 3; nothing is gathered, but each layer is copied where it is computed with
    assert round(found.phases["forward"] / LAYER_BYTES, 1) == 13.0
