import pytest

from benchmarks.families import build
from benchmarks.testbed.groups import fake_group, simulated_group
from benchmarks.testbed.memory import count_step
from benchmarks.testbed.plans import plan_of
from benchmarks.testbed.simulated import SimulatedLinks
from benchmarks.testbed.step import Step, time_in_turns
from lightning_osdp.callbacks.peak import living_tensors
from lightning_osdp.profiler import LiveBytes


@pytest.mark.parametrize(("precision", "num_micro_batches"), [("32-true", 1), ("bf16-mixed", 3)])
def test_a_step_without_trainer_takes_what_lightnings_takes(precision, num_micro_batches):
    def model_and_plan():
        module = build("odd_mlp")
        modes = {"layers.0": "DP", "layers.1": "ZDP", "layers.2": "DP"}
        return module, plan_of(module, modes, world_size=3, micro_batch_size=4, num_micro_batches=num_micro_batches)

    with fake_group(3):
        trained = count_step(*model_and_plan(), precision=precision)
        step = Step(*model_and_plan(), precision=precision)
        step()
        live = LiveBytes("cpu")
        live.track([*living_tensors(step.sharded.module, [step.optimizer]), *step.batch])
        with live:
            step()
    assert live.peak_bytes == pytest.approx(trained.peak_bytes, abs=100)  # losses


def test_steps_are_timed_in_turns():
    calls = []
    with fake_group(2):
        seconds = time_in_turns({name: lambda name=name: calls.append(name) for name in "AB"}, num_rounds=2)
    assert calls == ["A", "B"] * 3
    assert {name: len(found) for name, found in seconds.items()} == {"A": 2, "B": 2}


def test_plans_wait_for_the_collectives_that_they_ask_for():
    # four units: FSDP gathers ZDP ones twice a step, DP ones once, and the root once
    module = build("odd_mlp")
    layers = [f"layers.{index}" for index in range(4)]
    plans = {
        mode: plan_of(module, dict.fromkeys(layers, mode), world_size=2, micro_batch_size=1) for mode in ("ZDP", "DP")
    }
    with simulated_group(2, SimulatedLinks(all_gather_s=lambda _: 1e-2)) as group:
        steps = {mode: Step(build("odd_mlp"), plan) for mode, plan in plans.items()}
        seconds = time_in_turns(steps, num_rounds=1)
        assert group.simulated_s == pytest.approx(2 * (9 + 5) * 1e-2)  # with the round to warm up
    assert seconds["ZDP"][0] > 9e-2
    assert seconds["DP"][0] > 5e-2
