"""A step that each rank takes alone before the first one: it leaves nothing, and where memory runs out, all act."""

import dry_run_cases as cases
import pytest
from tiers import slow

pytestmark = pytest.mark.distributed

KINDS = ("DP", "every"), ("DP", "last"), ("ZDP", "every")


@pytest.mark.parametrize(
    ("world_size", "modes", "options"),
    [
        slow(1, "dp", {}),
        (2, "mixed", {"precision": "bf16-mixed"}),
        slow(2, "dp", {"limit_val_batches": 1}),
        slow(4, "mixed", {}),
    ],
)
def test_a_dry_run_changes_nothing(ranks, world_size, modes, options):
    # evaluation leaves units gathered
    for found, notes in ranks(world_size).run(cases.differences, modes=modes, **options):
        assert found == {"from the start": ([], 2), "resumed": ([], 2)}
        assert notes == ()


@pytest.mark.parametrize(
    ("phase", "place"), [slow("forward", "forward of the root unit"), ("backward", "backward of 'last'")]
)
def test_what_one_rank_lacks_all_save_and_train_as_if_planned_so(ranks, phase, place):
    for found in ranks(2).run(cases.runs_short, phase=phase, most_bytes=22000):
        assert found["notes"] == (
            f"dry run: rank 1 ran out of memory in {place}, so 1 unit keeps less, 16.2 KiB together",
        )
        assert found["kept"] == [KINDS[index] for index in (0, 0, 1, 2, 1, 0)]
        assert found["differs"] == []
        assert found["another Trainer's"]
        assert found["monitored"]
        assert found["saved"]
        assert found["in checkpoint"]


def test_on_cpu_tensors_are_counted_against_the_limit(ranks):
    # Alone, a rank does not see gloo's copy of what it reduces, which lives at the peak of a step.
    for fits, saves, (kind, text) in ranks(2).run(cases.counted, shares=(1.01, 0.98, 0.5)):
        assert fits == ()
        assert 1 <= len(saves) <= 3
        assert "ran out of memory in forward of 'layers.2', so 1 unit keeps less, 16.2 KiB together" in saves[0]
        assert kind == "InfeasibleError"
        assert "in the dry run rank 0 ran out of memory in the optimizer step: MemoryError: live tensors take" in text
        assert "Use a smaller batch, more ranks or, where tensors are counted, a higher memory_limit" in text


def test_micro_batches_get_smaller_where_nothing_is_left_to_shard(ranks):
    for sizes, num_calls, number, planned, notes in ranks(2).run(cases.shrinks):
        assert sizes == {2}
        assert num_calls == 3 * 4  # optimizer steps of 8 samples
        assert number == planned == 4
        assert [note.partition(", so ")[2] for note in notes] == [
            "micro-batches have 4 samples instead of 8",
            "micro-batches have 2 samples instead of 4",
        ]


@pytest.mark.slow
def test_what_says_nothing_of_memory_does_not_keep_from_training(ranks):
    assert ranks(2).run(cases.cannot_tell) == [[(4, True), (3, True), (4, True)]] * 2


@pytest.mark.slow
def test_blocks_recompute_where_units_keep_nothing_and_training_is_the_same(ranks):
    for found in ranks(2).run(cases.recomputes):
        assert found["could"] == [f"layers.{index}" for index in range(4)]
        assert 0 < len(found["blocks"]) < 4
        assert {activations for _, activations in found["blocks"]} == {"recompute"}
        assert f"so {len(found['blocks'])} blocks recompute, " in found["notes"][0]
        assert found["fits"]
        assert found["differs"] == []


@pytest.mark.parametrize(("world_size", "node_size"), [(2, None), slow(4, 2)])
@pytest.mark.parametrize("columns", [slow(7), 64])  # of the first weight, and of one after it
def test_an_optimizer_that_takes_norms_over_all_ranks_waits_for_none_that_lacks_memory(
    ranks, world_size, node_size, columns
):
    pool = ranks(world_size)
    pool.timeout_s = 60
    for notes, differs in pool.run(cases.short_in_the_optimizer, columns=columns, times=1, node_size=node_size):
        assert len(notes) == 1
        assert notes[0].startswith("dry run: rank 1 ran out of memory in the optimizer step, so ")
        assert differs == []


def test_all_ranks_fail_together_where_an_optimizer_never_has_the_memory(ranks):
    pool = ranks(2)
    pool.timeout_s = 60
    for kind, text in pool.run(cases.short_in_the_optimizer, columns=7, times=100):
        assert kind == "InfeasibleError"
        assert "in the dry run rank 1 ran out of memory in the optimizer step" in text
