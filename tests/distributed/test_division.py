"""Other micro-batches for the same optimizer steps: trained as DDP trains with the user's own, and truthfully told."""

import division_cases as cases
import pytest
from tiers import slow

pytestmark = pytest.mark.distributed

CASES = [
    ({"accumulate_grad_batches": 4}, (2, 8, 16)),
    # 80 samples a rank in windows of 32: the last has 16
    ({"accumulate_grad_batches": 8, "max_epochs": 1}, (8, 16)),
    ({"accumulate_grad_batches": 4, "limit_train_batches": 6, "val_check_interval": 2, "limit_val_batches": 1}, (2, 8)),
    (
        {"accumulate_grad_batches": 2, "val_check_interval": 0.5, "limit_val_batches": 1, "gradient_clip_val": 0.05},
        (8,),
    ),
]


def check(found):
    for one in found:
        ours, ddps = one["seen"]
        assert ours["rates"] == pytest.approx(ddps["rates"])
        assert {**ours, "rates": None} == {**ddps, "rates": None}
        assert one["difference"] < 1e-7  # clipping by norm differs by 1e-6 of it


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "chosen"),
    [(2, CASES), slow(4, [({"accumulate_grad_batches": 4}, (2, 8))])],
)
def test_the_same_steps_in_other_micro_batches(ranks, world_size, chosen):
    found = ranks(world_size).run(cases.plans_equal_ddp, cases=chosen)[0]
    check(found)
    for one in found:
        assert one["size"][0] == one["size"][1]
        assert one["number"][0] == one["number"][1]


@pytest.mark.slow
def test_a_resumed_run_counts_as_its_checkpoint_does(ranks):
    found, steps = ranks(2).run(cases.resumes_in_mid_epoch)[0]
    assert [(sizes, number) for _, sizes, number, _ in found] == [({8}, 2), ({8}, 2), ({4}, 4)]
    assert {global_step for *_, global_step in found} == {steps}
    assert max(difference for difference, *_ in found) < 1e-9


@pytest.mark.slow
def test_a_trainer_that_trains_a_second_model_begins_with_the_users_own_micro_batches(ranks):
    found = ranks(2).run(cases.a_second_model_is_divided_from_the_users_own)[0]
    for fits in found.values():
        for planned, number, sizes, accumulated in fits:
            assert sizes == {planned}
            assert accumulated == number
    assert [size * number for size, number, *_ in found["auto"]] == [16, 16]
    assert [size for size, *_ in found["number"]] == [8, 8]


def test_a_given_plan_divides_after_validation_too(ranks):
    for sizes, number, callbacks in ranks(2).run(cases.divides_after_validating):
        assert (sizes, number) == ({8}, 2)
        assert callbacks[0] == "PlanMonitor"


@pytest.mark.parametrize("world_size", [2, slow(4)])
def test_the_strategy_divides_the_users_own_and_a_stated_global_batch(ranks, world_size):
    found = ranks(world_size).run(cases.chooses_for_itself)[0]
    check(found)
    for one in found:
        size, number = one["planned"]
        assert size * number == 16
        assert one["used"] == ({size}, number, 32 // size)
        assert size > 4
        assert len(one["said"]) == 1
        assert one["said"][0].startswith(f"OSDP: b 4 -> {size}, K 4 -> {number}, ")


@pytest.mark.slow
def test_micro_batches_stay_where_others_would_train_differently(ranks):
    found = ranks(2).run(cases.keeps_what_is_there)[0]
    assert {name: (sizes, number) for name, (sizes, number, _) in found.items()} == {
        "norm": ({4}, 2),
        "frequency": ({4}, 2),
        "schedule": ({4}, 2),
        "limit": ({4}, 2),
        "keep": ({4}, 2),
    }
    said = {name: texts[0].removeprefix("OSDP: micro-batches stay ") for name, (_, _, texts) in found.items() if texts}
    assert said == {
        "norm": "4 x 2: norm normalises over the samples of a micro-batch.",
        "frequency": "4 x 2: a learning-rate schedule with frequency 2 counts micro-batches.",
        "schedule": "4 x 1: a GradientAccumulationScheduler changes the number of micro-batches.",
    }


@pytest.mark.parametrize("world_size", [2, slow(4)])
def test_global_batches_that_cannot_be_had_are_refused(ranks, world_size):
    uneven, both, kept, coarse = ranks(world_size).run(cases.refused)[0]
    n = world_size
    assert uneven == (f"Expected a global_batch_size that {n} ranks can share, got {8 * n + 1}. Use a multiple of {n}.")
    assert both.startswith(f"Expected global_batch_size={8 * n}, but batches of 4 with accumulate_grad_batches=3 on")
    assert kept == (
        f"Expected micro-batches that divide global_batch_size={6 * n}, which is 6 samples a rank, got 4. Let the"
        " loader give a divisor of it."
    )
    assert coarse.startswith("Expected a plan with sync='every' for accumulate_in_fp32=True in bf16-mixed, got sync=")
