"""What people see of a training while it runs."""

import pytest
import watch_cases as cases
from tiers import slow

pytestmark = pytest.mark.distributed

STEP, SAMPLES, PEAK = "osdp/step_time_s", "osdp/samples_per_s", "osdp/peak_bytes"
RATIOS = {"osdp/step_time_ratio", "osdp/peak_ratio"}


WATCHED = {"2": (2, 1), "4, two micro-batches": (4, 2)}
both_sizes = pytest.mark.parametrize("world_size", [2, slow(4)])


@pytest.fixture(scope="module", params=WATCHED.values(), ids=WATCHED)
def watched(request, ranks):
    """What rank 0 found, and the batches of an optimizer step."""
    world_size, num_micro_batches = request.param
    return ranks(world_size).run(cases.watched, num_micro_batches=num_micro_batches)[0], num_micro_batches


def test_the_monitor_the_logger_and_the_progress_bar_tell_the_same(watched):
    found, num_micro_batches = watched
    assert found["first"] == "PlanMonitor"
    told = found["told"][num_micro_batches - 1 :: num_micro_batches]
    assert [*map(set, told[: cases.WARM_UP_STEPS])] == [set()] * cases.WARM_UP_STEPS
    assert set(told[-1]) == {STEP, SAMPLES, PEAK} | RATIOS
    # every second step is logged, in the row that has the user's own metrics
    rows = {int(row["step"]): row for row in found["rows"] if row["train_loss"]}
    assert sorted(rows) == [1, 3, 5, 7]
    assert rows[1][STEP] == ""
    for step in (5, 7):
        for name, value in told[step].items():
            assert float(rows[step][name]) == pytest.approx(value, rel=1e-6)
    shown = {name: value for name, value in told[-1].items() if name != PEAK}
    assert found["in_bar"][-1] == pytest.approx(shown, rel=1e-6)


def test_numbers_agree_with_each_other_and_with_the_plan(watched):
    found, _ = watched
    last, plan, measured = found["told"][-1], found["plan"], found["measured"]
    assert last[STEP] * last[SAMPLES] == pytest.approx(found["batch_samples"], rel=1e-5)
    assert last["osdp/step_time_ratio"] == pytest.approx(last[STEP] / plan.step_time_s)
    assert last["osdp/peak_ratio"] == pytest.approx(last[PEAK] / plan.peak_bytes)
    assert last[PEAK] == measured.peak_bytes
    assert measured.step_time_s * measured.samples_per_s == pytest.approx(found["batch_samples"])


def test_nothing_of_it_is_in_checkpoints(watched):
    found, _ = watched
    assert found["in_checkpoint"] == []
    assert not found["checkpoint_text"]


@both_sizes
def test_watching_changes_neither_weights_nor_losses_nor_random_numbers(ranks, world_size):
    for found in ranks(world_size).run(cases.watching_changes_nothing):
        assert found == {"difference": 0.0, "losses": True, "drawn": True, "is_used": True}


@pytest.mark.slow
def test_the_progress_bar_and_the_logger_can_be_left_out(ranks):
    found = ranks(2).run(cases.configured)[0]
    in_bar, logged = found["progress_bar"]
    assert not any(name.startswith("osdp/") for name in in_bar)
    assert {STEP, SAMPLES, PEAK} | RATIOS <= {*logged}
    in_bar, logged = found["logger"]
    assert {STEP, SAMPLES} | RATIOS <= {*in_bar}
    assert not any(name.startswith("osdp/") for name in logged)


@both_sizes
def test_a_monitor_needs_a_plan(ranks, world_size):
    expected = (
        "Expected a strategy with a plan, whose predictions PlanMonitor checks, got DDPStrategy."
        " Train with strategy='osdp', or without PlanMonitor."
    )
    assert ranks(world_size).run(cases.without_a_plan) == [expected] * world_size
