"""The counter against bytes added up by hand, in units of one layer W; s = W/2 is a shard on two ranks.

base            3 * 1.5 = 4.5: shards and the two moments of AdamW; and 1.5 reduced gradients during forward
forward         6 + what is gathered: 1, or 3 where all layers are DP
backward        at the second of three layers: 4.5 + gathered + 2 of its gradient + 0.5 reduced before
reduce-scatter  the same without its own parameter, with one of its gradients and 0.5 reduced: and a copy on gloo
optimizer       6 + three temporaries of one shard
"""

import dataclasses

import pytest
from linears import LAYER_BYTES, Linears, plan_for_linears

from benchmarks.families import build
from benchmarks.testbed.groups import fake_group, simulated_group
from benchmarks.testbed.memory import PHASES, WARM_UP_STEPS, count_step
from benchmarks.testbed.plans import plan_of
from benchmarks.testbed.simulated import SimulatedLinks


def like_gloo(world_size):
    return simulated_group(world_size, SimulatedLinks(copies_reduced=True))


def layers(step):
    """Phases in units of a layer, activations rounded away."""
    return [round(step.phases[phase] / LAYER_BYTES, 1) for phase in PHASES]


@pytest.mark.parametrize(
    ("modes", "group", "expected"),
    [
        ("ZZZ", fake_group, [7.0, 9.0, 7.5, 7.5]),
        ("ZZZ", like_gloo, [7.0, 9.0, 8.5, 7.5]),
        ("DDD", fake_group, [9.0, 9.5, 8.0, 7.5]),
        ("DDD", like_gloo, [9.0, 9.5, 9.0, 7.5]),
    ],
)
def test_phases_equal_the_sums_by_hand(modes, group, expected):
    with group(2):
        found = count_step(Linears(), plan_for_linears(modes, world_size=2))
    assert layers(found) == expected
    assert found.peak_bytes == max(found.phases.values())


def test_micro_batches_add_to_the_gradients_of_those_before():
    # forward carries 1.5 gradients in the second micro-batch too; backward has them from the start: 4.5 + 1.5 + 4
    with fake_group(2):
        found = count_step(Linears(), plan_for_linears("ZZZ", world_size=2, num_micro_batches=2))
    assert layers(found) == [7.0, 10.0, 8.5, 7.5]


def test_forward_prefetch_frees_and_reduces_one_unit_later():
    # forward has the next layer too; at the second of three layers all are whole, with the third one's gradient:
    # 4.5 + 3 + 1 + 2; when that is reduced: 4.5 + 2 + 1 + 1 + 0.5
    plan = dataclasses.replace(plan_for_linears("ZZZ", world_size=2), forward_prefetch=True)
    with fake_group(2):
        found = count_step(Linears(), plan)
    assert layers(found) == [8.0, 10.5, 9.0, 7.5]


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
    assert round(found.phases["forward"] / LAYER_BYTES, 1) == 12.0  # nothing is sharded, nothing gathered
