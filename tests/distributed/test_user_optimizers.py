"""Optimizers on shards, and gradients before they step: as under DDP, or refused before training."""

import pytest
import user_optimizer_cases as cases
from test_user_code import check
from tiers import slow

pytestmark = pytest.mark.distributed


@pytest.mark.slow
def test_optimizers_that_can_update_shards_equal_ddp(ranks):
    found = ranks(2).run(cases.optimized)[0]
    assert len(found) == 24
    check(found)


def test_optimizers_equal_ddp_on_four_ranks(ranks):
    check(ranks(4).run(cases.optimized, names=["AdamW, default", "Lamb"])[0])


@pytest.mark.slow
def test_optimizers_equal_ddp_where_units_are_sharded_in_nodes_and_over_all_ranks(ranks):
    names = [name for name in cases.OPTIMIZERS if name.startswith(("AdamW", "SGD", "ByForeach", "Lamb"))]
    check(ranks(4).run(cases.optimized, names=names, kinds=["nodes"])[0])


def test_muon_equals_ddp_within_its_own_rounding(ranks):
    check(ranks(2).run(cases.muon)[0], 5e-3)


@pytest.mark.parametrize(("world_size", "kind"), [(2, "mixed"), slow(4, "nodes")])
def test_optimizers_that_cannot_are_refused_before_training(ranks, world_size, kind):
    for found in ranks(world_size).run(cases.refused, kind=kind):
        for name, (told, has_begun) in found.items():
            assert told is not None, name
            assert told.startswith("ConfigurationError: Expected an optimizer that"), told
            assert name.split(",")[0] in told
            assert not has_begun, name
            assert ('SearchSpace(modes=("ZDP", "hpZ", "DP"))' in told) is (kind == "nodes"), told


def test_the_trial_of_an_optimizer_leaves_no_trace(ranks):
    for before, after, is_same in ranks(2).run(cases.tried):
        assert before == (0, 0, 0, 0)
        assert after[::2] == (3, 3)
        assert after[1] in (6, 12)  # torch may call hooks around the step that is inherited, too
        assert is_same


@pytest.mark.parametrize(
    ("world_size", "kinds"),
    [slow(2, ["mixed", "zdp", "dp"]), (4, ["nodes", "node"]), slow(4, ["mixed"])],
)
def test_norms_of_gradients_and_clipping_equal_ddp(ranks, world_size, kinds):
    check(ranks(world_size).run(cases.gradients, kinds=kinds)[0])


def test_what_reads_values_of_shards_together_is_told_how_to_read_them(ranks):
    for told in ranks(2).run(cases.lightnings_norms):
        assert told is not None
        assert "Take each value itself, on all ranks" in told
