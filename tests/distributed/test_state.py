"""State of modules under ``fully_shard``: whole, in shards, from and to plain ones, within memory."""

import fixture_cases
import pytest
import state_cases as cases
from tiers import slow

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize(
    ("world_size", "dtype", "slices", "then"),
    [
        (2, "float32", 2, (4, 3)),
        slow(4, "float32", 3, (2, 0)),
        (1, "float32", 2, (2, 2)),
        slow(2, "bfloat16", 0, (1, 3)),
        slow(4, "float32", "nodes", (2, 3)),
        (4, "float32", "nodes", (4, 0)),
        slow(4, "float32", "nodes", (1, 2)),
        slow(2, "float32", 3, (4, "nodes")),
        slow(1, "float32", 0, (4, "nodes")),
        (4, "bfloat16", 2, (4, "nodes")),
    ],
)
def test_state_goes_into_shards_and_out_again(ranks, tmp_path, world_size, dtype, slices, then):
    names = list(cases.OPTIMIZERS) if (world_size, slices) == (2, 2) else ["adamw", "momentum"]
    found = ranks(world_size).run(cases.round_trips, names=names, dtype=dtype, slices=slices, folder=str(tmp_path))
    assert found == [{name: [] for name in names}] * world_size
    other_size, others = then
    found = ranks(other_size).run(
        cases.read_again, names=names, dtype=dtype, slices=others, folder=str(tmp_path), saved=slices
    )
    assert found == [{name: [] for name in names}] * other_size


def test_trained_state_is_bit_for_bit_that_of_one_process_and_resumes(ranks, tmp_path):
    names = list(fixture_cases.OPTIMIZERS)
    assert ranks(2).run(cases.trained, folder=str(tmp_path), names=names) == [{name: [] for name in names}] * 2
    assert ranks(1).run(cases.consolidated, folder=str(tmp_path), names=names) == [{name: [] for name in names}]
    for world_size in (2, 4):
        found, _ = ranks(world_size).run(fixture_cases.goes_on, checkpoints=names, folder=str(tmp_path))[0]
        for wrong, _, off in found.values():
            assert wrong == [fixture_cases.NUM_STEPS]
            assert off < 1e-5


def test_misfits_are_told(ranks, tmp_path):
    remedy = "Configure the groups that were saved, or load the weights alone."
    for said in ranks(2).run(cases.misfits, folder=str(tmp_path)):
        for key in ("missing", "unexpected", "shape"):
            (kind, text), plain = said[key]
            assert (kind, text.replace("FSDPEverything", "Everything")) == plain
        assert "size mismatch for mix.weight: copying a param with shape (1,) from checkpoint" in said["cut shape"][1]
        assert "Missing key in checkpoint state_dict: model.up.bias." in said["missing shards"][1]
        kind, text = said["groups"]
        assert kind == "PlanMismatchError"
        assert text == (
            "Expected a checkpoint whose optimizer has in group 0 the parameters that are configured, but"
            f" ['down.bias', 'down.weight', 'frozen.bias'] are in one of both only. {remedy}"
        )
        kind, text = said["before"]
        assert kind == "ConfigurationError"
        assert text == (
            "Expected an optimizer of the parameters that FSDPEverything has now that it is sharded, got one with 12"
            " others, the first of shape (1,). Configure the optimizer after the module is sharded, and not while"
            " parameters are gathered, as after an evaluation."
        )
        assert said["apart"][1].startswith("Expected the slices of 'down.weight' in one parameter group")


def test_some_weights_load_and_own_hooks_see_whole_ones(ranks):
    assert ranks(2).run(cases.partly) == [[]] * 2


def test_hooks_of_state_dict_change_what_is_whole(ranks):
    assert ranks(2).run(cases.hooked) == [[]] * 2


def test_weights_of_split_operators_are_read_on_all_ranks(ranks):
    for found in ranks(2).run(cases.reads_weights):
        assert {name: (shape, same) for name, (shape, same, _) in found.items()} == {
            "down": ((14, 23), True),
            "mix": ((14, 14), True),
        }
        for _, _, used in found.values():
            assert used[0] == "ShardedParameterError"
            assert "Call its full_tensor() on all ranks, or read trainer.strategy.whole_state_dict();" in used[1]


def test_odd_fields_of_optimizer_states_survive(ranks, tmp_path):
    for found, expected in ranks(2).run(cases.odd_fields, folder=str(tmp_path)):
        assert found == [expected] * 3


def test_names_that_an_optimizer_holds_are_those_of_whole_operators(ranks):
    names = [name for name, _ in cases.Everything().named_parameters()]
    assert ranks(2).run(cases.names_in_groups) == [([names, names], True)] * 2


@pytest.mark.parametrize(("world_size", "num_slices"), [(2, 1), (2, 3), (4, 1)])
def test_no_rank_holds_more_than_it_keeps_and_two_parameters(ranks, world_size, num_slices):
    for rank, (found, sizes) in enumerate(ranks(world_size).run(cases.taken, num_slices=num_slices)):
        few = 2.1  # what is gathered, with padding; a thread of gloo may still hold the one before
        for name in ("model", "moments"):
            assert found[name] < few + (sizes[name] if rank == 0 else 0)
        assert found["model on all ranks"] < few + sizes["model"]
        assert max(found["shards"], found["load model"]) < 0.01
        assert found["load moments"] < 0.01
