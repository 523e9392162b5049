"""Models whose tensors are on the meta device, on all ranks or on all but rank 0, wrapped unit by unit."""

import pytest
from meta_cases import (
    evaluates_without_a_plan,
    initialises_other_units,
    loads_a_checkpoint,
    memory_while_wrapping,
    starts,
    torch_modules,
    trains,
)
from tiers import slow

pytestmark = pytest.mark.distributed

MIXED, IN_NODES = ("ZDP", "DP"), ("HSDP", "ZDP", "HDP")
KINDS = [(2, MIXED), (4, IN_NODES), slow(4, MIXED)]


@pytest.mark.parametrize("world_size", [2, slow(4)])
@pytest.mark.parametrize("start", ["meta", "rank 0"])
def test_wrapping_takes_the_shards_and_two_copies_of_one_unit(ranks, start, world_size):
    found = ranks(world_size).run(memory_while_wrapping, start=start)
    for each in found[1:] if start == "rank 0" else found:
        assert each["end"] < each["whole"] / world_size + 0.2 * each["unit"]
        # one copy less the parameter that is freed first: fully_shard frees one of a unit after the other
        assert 0.9 * each["unit"] < each["peak"] - each["end"] < 2.2 * each["unit"]
        assert each["peak"] < 0.8 * each["whole"]


def test_rank_zero_gives_its_values_away_as_it_goes(ranks):
    found = ranks(2).run(memory_while_wrapping, start="rank 0")[0]
    assert found["peak"] < found["whole"] + 2.2 * found["unit"]
    assert found["end"] < 0.6 * found["whole"]


@pytest.mark.parametrize(("world_size", "modes"), KINDS)
@pytest.mark.parametrize("start", ["meta", "rank 0"])
def test_all_ranks_start_with_the_values_of_rank_zero_whatever_the_units(ranks, start, world_size, modes):
    for found in ranks(world_size).run(starts, start=start, modes=modes):
        assert found["equal"]
        assert found["rank 0's"]
        assert found["any units"]
        assert found["tied"]
        assert found["shared"] == 1
        assert found["no_decay"]
        assert found["ramp"]
        assert found["std"] == pytest.approx((1.0, 1.0), abs=0.3)


def test_random_numbers_of_every_rank_advance_by_one_draw(ranks):
    assert all(found["one draw"] for found in ranks(2).run(starts, start="meta"))


@pytest.mark.parametrize(("world_size", "modes"), KINDS)
@pytest.mark.parametrize("start", ["meta", "rank 0"])
def test_training_equals_the_unwrapped_model_from_the_same_weights(ranks, start, world_size, modes):
    for difference, moved in ranks(world_size).run(trains, start=start, modes=modes):
        assert difference < 1e-10
        assert moved > 1e-2


def test_a_whole_checkpoint_loads(ranks):
    assert ranks(2).run(loads_a_checkpoint) == [(True, True)] * 2


def test_a_module_that_initialises_another_unit_is_refused_on_every_rank(ranks):
    for kind, text in ranks(2).run(initialises_other_units):
        assert kind == "ProfileError"
        assert text == (
            "Expected reset_parameters() of a module on the meta device to initialise what the module itself owns, but"
            " one asked for 'modules' of blocks.0, which is a unit of its own and sharded already. Let blocks.0"
            " initialise itself, or create the model with its values on rank 0."
        )


def test_recurrent_layers_and_attention(ranks):
    assert ranks(2).run(torch_modules) == [(True, True)] * 2


def test_evaluation_without_a_plan(ranks):
    for found, expected, is_tied in ranks(2).run(evaluates_without_a_plan):
        assert found == pytest.approx(expected, rel=1e-5)
        assert is_tied
