"""User code that looks at weights and changes them wherever it may: trained as under DDP."""

import pytest
import user_code_cases as cases
from tiers import slow

pytestmark = pytest.mark.distributed

TOLERANCE = 1e-10


def check(found, tolerance=TOLERANCE):
    """Each equals DDP, and moved weights."""
    assert found
    for name, each in found.items():
        assert each.pop("moved") > 1e-3, name
        assert each, name
        assert max(each.values()) < tolerance, (name, each)


@pytest.mark.slow
def test_weights_that_hooks_change_are_those_that_train(ranks):
    check(ranks(2).run(cases.changed_in_hooks)[0])
    check(ranks(2).run(cases.changed_in_all_hooks)[0])


@pytest.mark.slow
def test_weights_that_hooks_change_are_those_that_train_on_four_ranks(ranks):
    check(ranks(4).run(cases.changed_in_hooks, sets=cases.HOOKS[-3:])[0])


@pytest.mark.slow
def test_a_unit_that_is_left_out_after_it_was_gathered_ahead_is_gathered_anew(ranks):
    check(ranks(2).run(cases.left_out_after_it_was_gathered_ahead)[0])


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, slow(4)])
def test_mean_teachers_shapes_and_attributes_of_parameters(ranks, world_size):
    check(ranks(world_size).run(cases.looks_and_averages)[0])


@pytest.mark.slow
def test_optimizers_are_made_of_shards_whatever_ran_before(ranks):
    found = ranks(2).run(cases.stages)[0]
    assert len(found) == 3
    assert max(found.values()) < TOLERANCE, found


@pytest.mark.slow
def test_teachers_may_be_sharded_over_other_ranks_than_their_students(ranks):
    for found, refused in ranks(4).run(cases.averages_in_nodes):
        check({"mean teacher": found})
        assert len(refused) == 2
        for told in refused:
            assert 'OSDPStrategy(search_space=SearchSpace(modes=("ZDP", "hpZ", "DP")))' in told
