"""Units that reduce gradients in the last micro-batch only: trained as under DDP, with the collectives of the table."""

import accumulation_cases as cases
import pytest
from tiers import slow

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize(
    ("world_size", "num_micro_batches", "num_mixes"),
    [(2, 3, 2), slow(2, 2, 2), slow(4, 4, 1)],
)
def test_each_kind_of_unit_and_mixes_equal_ddp(ranks, world_size, num_micro_batches, num_mixes):
    found = ranks(world_size).run(cases.combinations, num_micro_batches=num_micro_batches, num_mixes=num_mixes)[0]
    assert len(found) == 4 + num_mixes
    assert max(found) < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize("num_micro_batches", [slow(2), 3])
def test_each_kind_of_unit_in_nodes_and_mixes_equal_ddp(ranks, num_micro_batches):
    found = ranks(4).run(cases.combinations, num_micro_batches=num_micro_batches, num_mixes=2, in_nodes=True)[0]
    assert len(found) == 6 + 2
    assert max(found) < 1e-9


@pytest.mark.parametrize(("world_size", "numbers"), [(2, (1, 4)), slow(4, (1, 2, 3))])
def test_mixes_equal_ddp_with_any_number_of_micro_batches(ranks, world_size, numbers):
    found = ranks(world_size).run(cases.several_mixes, numbers=numbers)[0]
    assert len(found) == len(numbers)
    assert max(found) < 1e-9


@pytest.mark.parametrize(("world_size", "in_nodes"), [(2, False), slow(4, True)])
def test_what_lightning_does_in_and_between_windows_equals_ddp(ranks, world_size, in_nodes):
    found = ranks(world_size).run(cases.within_lightning, in_nodes=in_nodes)[0]
    tolerances = {
        "validation": 1e-9,
        "norm": 1e-7,
        "value": 1e-9,
        "schedule": 1e-9,
        "skipped": 1e-9,
        "sgd": 1e-6,
        "adamw": 1e-4,
    }
    assert {name: max(differences) < tolerances[name] for name, differences in found.items()} == dict.fromkeys(
        tolerances, True
    ), found


@pytest.mark.slow
def test_collectives_of_a_step_are_those_of_the_table(ranks):
    for steps, expected in ranks(2).run(cases.collectives)[0]:
        assert len(steps) == 5
        assert [dict(step) for step in steps] == [expected] * 5


@pytest.mark.parametrize("state_dict_type", [slow("full"), "sharded"])
def test_checkpoints_inside_and_between_windows(ranks, state_dict_type):
    assert ranks(2).run(cases.saves_and_resumes, state_dict_type=state_dict_type)[0] == [0.0, 0.0, 0.0]


def test_an_error_inside_backward_leaves_no_unit_unsynchronised(ranks):
    text, num_units, all_synchronise = ranks(2).run(cases.interrupted)[0]
    assert text.endswith("inside backward")
    assert num_units == 6
    assert all_synchronise


def test_evaluation_after_fit_sees_the_trained_weights(ranks):
    found, expected = ranks(2).run(cases.after_fit)[0]
    assert found == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("precision", ["bf16-mixed", slow("16-mixed")])
def test_in_mixed_precision_what_is_kept_whole_differs_by_rounding(ranks, precision):
    differences, moved = ranks(2).run(cases.in_mixed_precision, precision=precision)[0]
    assert max(differences) < 0.1 * moved
