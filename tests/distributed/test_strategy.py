"""Whole fits under the strategy on two and four ranks: what users get, and what they are told."""

import pytest
import strategy_cases as cases
from tiers import slow

pytestmark = pytest.mark.distributed

both_sizes = pytest.mark.parametrize("world_size", [2, slow(4)])


@both_sizes
def test_plans_itself_under_a_limit_that_forces_a_mix(ranks, world_size):
    first, *others = ranks(world_size).run(cases.plans_itself)
    assert first["free_modes"] == {"DP"}
    assert first["modes"] == {"DP", "ZDP"}
    assert [other["plan"] for other in others] == [first["plan"]] * (world_size - 1)
    assert first["plan"].peak_bytes <= first["limit"]
    assert first["again"] == first["plan"].peak_bytes  # of the profile and the cluster that the strategy has
    assert first["counted"] <= first["limit"]
    assert first["counted"] == pytest.approx(first["plan"].peak_bytes, rel=2e-3)
    assert first["step_time_s"] > 0
    ours, ddps = first["losses"]
    assert len(ours) == 8
    assert ours == pytest.approx(ddps, rel=1e-5)
    assert first["saved"]["world_size"] == world_size
    assert {d["modes"][0] for d in first["saved"]["decisions"] if d["unit"]} == {"DP", "ZDP"}
    assert {name for name in first["logged"] if not name.startswith("osdp/")} == {"train_loss"}
    assert "Memory of one rank over a step" in first["picture"]
    for said in ("OSDP plan", "keeping it would save", "more samples/s than plain FSDP", "predicted and measured"):
        assert said in first["text"]
    assert {other["text"] for other in others} == {""}


@both_sizes
def test_profiling_leaves_no_trace_in_training(ranks, world_size):
    for found in ranks(world_size).run(cases.leaves_no_trace):
        assert found["difference"] == 0.0
        assert found["num_calls"] == (5, 5)
        assert found["num_losses"] == (5, 5)
        assert found["equal_losses"]


@pytest.mark.parametrize(
    ("batch_size", "world_size", "expected"),
    [
        slow("auto", 2, 4),
        slow("keep", 2, 4),
        (10, 2, 10),
        slow("scale", 2, 80),
        slow(10, 4, 10),
        slow("scale", 4, 40),
    ],
)
def test_batch_size_rebuilds_the_training_loader_only(ranks, batch_size, world_size, expected):
    found = ranks(world_size).run(cases.batch_sizes, batch_size=batch_size)[0]
    assert found["planned"] == expected
    assert found["train"] == {expected}
    assert found["val"] == {5}
    assert found["attribute"] == 4
    assert found["steps"] == found["samples_per_rank"] // expected
    # The first answer is given on the copy that is profiled, the last one is what training is configured with.
    assert found["stepping_batches"] == [found["steps"]]


@both_sizes
def test_no_feasible_plan_is_an_error_on_all_ranks(ranks, world_size):
    first, *others = ranks(world_size).run(cases.too_small)
    assert others == [first] * (world_size - 1)
    name, text = first
    assert name == "InfeasibleError"
    assert "the limit is 1.00 MiB per rank" in text
    assert "Largest contributors: " in text
    assert "Nearest remedy: " in text


@both_sizes
@pytest.mark.parametrize(
    ("num_samples", "kind"),
    [(None, "RanksApartError"), (cases.BATCH_SIZE, "OSDPError")],  # the others are at their first run when it traces
    ids=["tracing", "timing"],
)
def test_a_rank_that_cannot_profile_stops_all_ranks_with_its_text(ranks, world_size, num_samples, kind):
    first, failed, *others = ranks(world_size).run(cases.one_rank_fails, num_samples=num_samples)
    assert failed == ("ValueError", "no loss on rank one")
    assert first == (kind, "Rank 1 failed, so every rank stops: ValueError: no loss on rank one")
    assert others == [first] * (world_size - 2)


@both_sizes
def test_a_rank_that_lacks_memory_for_timing_has_all_ranks_time_operations(ranks, world_size):
    found = ranks(world_size).run(cases.one_rank_lacks_memory)
    assert all(steps > 0 for steps in found[0])
    assert found == [found[0]] * world_size


@pytest.mark.slow
def test_a_micro_batch_that_is_far_from_the_profiled_one_is_profiled_itself(ranks):
    found = ranks(2).run(cases.profiled_sizes)
    assert found[0] == {8: [4], 16: [4, 16], "without memory": [4]}
    assert found[1] == found[0]


def test_a_micro_batch_that_cannot_be_profiled_is_planned_from_the_one_that_was(ranks):
    found = ranks(2).run(cases.a_far_micro_batch_that_cannot_be_profiled)
    assert [steps for steps, _ in found] == [1, 1]
    (text,) = found[0][1]
    assert text.startswith("OSDP: a micro-batch of 16 samples cannot be profiled (")
    assert text.endswith("What is planned of it follows from 4.")


@both_sizes
def test_given_plans_are_used_or_refused(ranks, world_size):
    found = ranks(world_size).run(cases.given_plans)[0]
    assert found["by_value"]
    assert found["by_path"]
    assert found["made_of"] == [None, None]
    assert found["missing"][0] == "PlanFormatError"
    assert "none.json' but it cannot be read" in found["missing"][1].replace("',", "'")
    assert found["world_size"][0] == found["model"][0] == "PlanMismatchError"
    assert f"the plan is for {world_size + 1} ranks, this run has {world_size}" in found["world_size"][1]
    assert "parameter 'layers.0.weight': planned float32[384, 256], found not there" in found["model"][1]
    assert found["batch_size"][0] == "ConfigurationError"
    assert "got batch_size=3 and a plan for a micro-batch of 4" in found["batch_size"][1]
    assert found["global_batch_size"][0] == found["memory_limit"][0] == "ConfigurationError"
    told = f"a plan for {4 * world_size} samples: 1 micro-batches of 4 on each of {world_size} ranks"
    assert told in found["global_batch_size"][1]
    assert "Expected a plan that fits memory_limit=" in found["memory_limit"][1]
    assert found["accumulated"] == 2


@pytest.mark.parametrize(("state_dict_type", "world_size"), [slow("full", 4), ("sharded", 2)])
def test_training_resumed_under_another_plan_equals_the_uninterrupted_run(ranks, state_dict_type, world_size):
    found = ranks(world_size).run(cases.checkpoints, state_dict_type=state_dict_type)[0]
    assert found["global_steps"] == [6, 6, 6]
    assert found["kept"] == [True, False, True]
    assert found["difference"] < 1e-6
    assert found.get("names", True)


@both_sizes
def test_validation_without_a_plan_and_after_fit(ranks, world_size):
    first, expected, after_fit, last_in_fit = ranks(world_size).run(cases.validates_without_plan_and_after_fit)[0]
    assert first == pytest.approx(expected, rel=1e-5)
    assert after_fit < expected
    assert after_fit == pytest.approx(last_in_fit, rel=1e-5)


@both_sizes
def test_models_that_cannot_be_planned_are_refused_before_training(ranks, world_size):
    found = ranks(world_size).run(cases.bad_models)[0]
    assert found["NoLoss"][0] == found["NotANumber"][0] == found["NoOptimizer"][0] == "ProfileError"
    assert "to return a loss on the profiling batch, got None" in found["NoLoss"][1]
    assert "Expected a finite loss on the profiling batch, got nan" in found["NotANumber"][1]
    assert "Expected configure_optimizers to return an optimizer, got None" in found["NoOptimizer"][1]
    assert "reset_parameters(), which initialises it, but the model itself" in found["OnMetaWithoutReset"][1]
    assert "Expected a GPU for synchronised batch normalisation" in found["sync_batchnorm"][1]
    assert "the dataloader is empty" in found["empty"][1]


@both_sizes
def test_a_loader_that_cannot_be_rebuilt_is_kept_with_the_reason(ranks, world_size):
    micro_batch_size, warnings = ranks(world_size).run(cases.plain_dataset_is_kept)[0]
    assert micro_batch_size == 3
    assert any("batch_size=2 is ignored" in text and "a list, has no batch_size" in text for text in warnings)


@both_sizes
@pytest.mark.parametrize("is_everywhere", [True, False], ids=["on meta", "real on rank 0"])
def test_a_model_on_the_meta_device_starts_equal_on_all_ranks_and_trains(ranks, world_size, is_everywhere):
    found = ranks(world_size).run(cases.models_on_the_meta_device, is_everywhere=is_everywhere)
    assert found[0]["tied"]
    assert all(each["finite"] and each["steps"] == (5, 5) for each in found)
    assert found[0]["losses"][-1] < found[0]["losses"][0]


@pytest.mark.slow
def test_a_model_that_was_evaluated_before_fit_is_planned_and_trains_as_one_that_was_not(ranks):
    found = ranks(2).run(cases.fits_after_evaluating)[0]
    assert found["plan_before"] is None
    assert found["same"]
    assert found["evaluated"] == found["first"]
    assert found["first"][0] == 5
    assert len(found["first"][1]) > 1
    assert len(found["frozen"]) == 2
    assert found["difference"] < 1e-6


def test_whole_weights_come_from_the_strategy_and_shards_from_nowhere(ranks):
    first, second = ranks(2).run(cases.whole_weights)
    for found in (first, second):
        name, text = found["refused"]
        assert name == "ConfigurationError"
        assert "On all ranks, call trainer.strategy.whole_state_dict()" in text
        assert found["plain"] == found["gathered"] == 0.0
        assert found["moved"] > 1e-3
    assert (first["own"], second["own"]) == (0.0, None)
