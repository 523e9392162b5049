"""A plan that changes while its module trains: the same training, the same names, and the new plan is what is run."""

from collections import Counter

import change_cases as cases
import pytest
from tiers import slow

pytestmark = pytest.mark.distributed

SAME_SUMS = [kind for kind in cases.KINDS if kind != "sync"]


@pytest.mark.parametrize(
    ("kinds", "options"),
    [
        *(slow([kind], {"units": "both", "sync": "last"}) for kind in SAME_SUMS),
        (SAME_SUMS, {"units": "block"}),
        slow(SAME_SUMS, {"units": "both", "slices": True}),
        slow(SAME_SUMS, {"units": "two blocks", "sync": "last"}),
        slow(SAME_SUMS, {"units": "operators"}),
    ],
)
def test_training_is_bit_equal_to_that_under_one_plan(ranks, kinds, options):
    for seed in range(2):
        found = ranks(2).run(cases.differences, kinds=kinds, seed=seed, **options)
        for from_one_plan, from_ddp, are_names_kept in found:
            assert from_one_plan == 0.0
            assert from_ddp < 1e-12
            assert are_names_kept


@pytest.mark.slow
@pytest.mark.parametrize("units", ["block", "operators"])
def test_where_gradients_are_reduced_at_other_times_training_is_equal_within_rounding(ranks, units):
    given = {"seed": 0, "units": units}
    for kinds in (["sync"], list(cases.KINDS)):
        for from_one_plan, from_ddp, are_names_kept in ranks(2).run(cases.differences, kinds=kinds, **given):
            assert from_one_plan < 1e-12
            assert from_ddp < 1e-12
            assert are_names_kept


@pytest.mark.slow
@pytest.mark.parametrize("units", [slow("block"), slow("both"), "operators"])
def test_a_module_that_came_to_a_plan_runs_and_holds_what_one_does_that_was_made_with_it(ranks, units):
    for found in ranks(2).run(cases.runs_as_made_so, units=units, seeds=range(4)):
        for (came, made, predicted), (came_bytes, made_bytes) in found:
            assert came == made
            assert Counter(came) == Counter(predicted)
            assert came_bytes == made_bytes
        assert len({tuple(came) for (came, _, _), _ in found}) > 1


BETWEEN = "Expected a plan to change between two optimizer steps, but rank 0 "
REFUSED = {
    "another model": ("PlanMismatchError", "but parameter 'gate' is '"),
    "micro-batches": ("PlanMismatchError", "but num_micro_batches is 2 in use and 1 in the plan"),
    "no block": ("PlanMismatchError", "but 'nowhere' is not there"),
    "no mode": (
        "PlanFormatError",
        "Expected mode of unit 'first' of the plan to be one of ('ZDP', 'hpZ', 'DP', 'HSDP', 'HDP'), got 'X'",
    ),
    "another on one rank": ("PlanMismatchError", "Expected all ranks to change to the same plan, but that of rank 1"),
    "nonsense on one rank": ("PlanMismatchError", "but world_size is 2 in use and 9 in the plan"),
    "a part": ("ConfigurationError", "Expected a module that apply_plan, or a Trainer"),
    "a plain module": ("ConfigurationError", "Expected a module that apply_plan, or a Trainer"),
    "no plan": ("ConfigurationError", "Expected a module that was sharded by a plan, got one that was sharded without"),
    "before backward": ("ConfigurationError", f"{BETWEEN}has outputs of a forward that backward has not come to"),
    "gradients that are not reduced": ("ConfigurationError", f"{BETWEEN}holds gradients of 'first' that are not"),
    "in forward": ("ConfigurationError", f"{BETWEEN}is in forward of 'last'"),
    "in backward": ("ConfigurationError", f"{BETWEEN}is in backward of"),
}


def test_what_cannot_change_is_refused_on_all_ranks_and_training_goes_on(ranks):
    for told, difference in ranks(2).run(cases.refusals):
        assert {name: kind for name, (kind, _) in told.items()} == {name: kind for name, (kind, _) in REFUSED.items()}
        assert {name: text for name, (_, text) in told.items() if REFUSED[name][1] not in text} == {}
        assert difference == 0.0


def test_a_plan_changes_whatever_was_run_before_if_no_backward_is_to_come(ranks):
    assert ranks(2).run(cases.forgets) == [(True, 2, True)] * 2


@pytest.mark.slow
@pytest.mark.parametrize("state_dict_type", ["full", "sharded"])
def test_a_fit_trains_on_saves_and_resumes_as_if_its_plan_had_not_changed(ranks, state_dict_type):
    for found in ranks(2).run(cases.fits, state_dict_type=state_dict_type):
        assert found == {"weights": 0.0, "losses": True, "followed": True, "resumed under": True}


def test_other_options_of_the_strategy_hold_under_every_plan(ranks):
    for (kind, text), blocks in ranks(2).run(cases.with_options):
        assert kind == "ConfigurationError"
        assert text.startswith("Expected a plan with sync='every' for accumulate_in_fp32=True in bf16-mixed")
        assert blocks == {"pair": "recompute", "alone": "offload"}
