"""Four ranks as two nodes of two: training is training in all modes, takes what is predicted, and may change modes."""

import node_cases as cases
import pytest
from tiers import slow

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize(
    "options",
    [
        slow({"name": "gpt", "optimizer": "adamw", "dtype": "float64"}),
        slow({"name": "odd_mlp", "optimizer": "sgd", "dtype": "float64", "clip": 0.05}),
        slow({"name": "tied_gpt", "optimizer": "adamw", "dtype": "float64", "num_micro_batches": 2, "sync": "last"}),
        slow({"name": "gpt", "optimizer": "adamw", "dtype": "float64", "num_micro_batches": 2, "dry_run": True}),
        slow({"name": "half_frozen", "optimizer": "sgd", "dtype": "float64", "num_micro_batches": 2, "sync": "last"}),
        {"name": "tied_gpt", "optimizer": "adamw", "dtype": "float64", "num_micro_batches": 2, "sync": "node"},
        slow({"name": "gpt", "optimizer": "adamw", "dtype": "float64", "clip": 0.05, "sliced": ("fc", "out", "head")}),
    ],
    ids=["adamw", "clipped sgd", "tied, last", "dry run", "frozen, last", "tied, node", "sliced"],
)
def test_five_steps_equal_ddp_and_one_process(ranks, options):
    found = ranks(4).run(cases.equivalence, **options)[0]
    assert set(found) == set(cases.MODES)
    for from_ddp, from_one, nodes_apart in found.values():
        assert from_ddp < 1e-7
        assert from_one < 1e-7
        assert nodes_apart == 0.0


@pytest.mark.slow
def test_in_low_precision_units_in_nodes_train_like_those_over_all_ranks(ranks):
    found = ranks(4).run(cases.low_precision, name="gpt", optimizer="adamw")[0]
    expected = found.pop("zdp")
    assert set(found) == set(cases.MODES)
    assert expected[-1] < expected[0]
    for losses in found.values():
        assert losses == pytest.approx(expected, rel=2e-2)


@pytest.mark.parametrize("is_synchronized", [False, True])
def test_nodes_begin_with_the_same_values_though_ranks_have_made_others(ranks, is_synchronized):
    for found in ranks(4).run(cases.begins_unlike, is_synchronized=is_synchronized):
        assert set(found) == set(cases.MODES)
        assert all(apart == (0.0, 0.0) for apart in found.values()), found


@pytest.mark.parametrize(
    ("model", "modes", "name", "after"),
    [
        ("noisy", "hsdp", "tokens.weight", 1),
        ("noisy later", "hsdp", "tokens.weight", 3),
        slow("noisy", "all", "positions", 1),
    ],
)
def test_nodes_that_drift_apart_are_told_which_weights_do(ranks, model, modes, name, after):
    found = ranks(4).run(cases.draws, name=model, modes=modes, is_alike=False)
    for told, num_steps, _ in found:
        assert told is not None, found
        kind, text = told
        assert kind == "RanksApartError"
        assert f"Expected every node to have the same values of each parameter, but those of {name!r} differ" in text
        assert num_steps == after


@pytest.mark.parametrize(("modes", "is_alike"), [("hdp", True), ("hpz", False)])
def test_ranks_may_draw_numbers_that_are_alike_and_any_where_no_node_has_all_of_a_unit(ranks, modes, is_alike):
    assert ranks(4).run(cases.draws, name="noisy", modes=modes, is_alike=is_alike) == [(None, 5, 0.0)] * 4


@pytest.mark.parametrize("modes", ["hdp", slow("all")])
def test_nodes_begin_to_train_alike_though_ranks_have_drawn_other_weights(ranks, modes):
    assert ranks(4).run(cases.draws, name="reinitialized", modes=modes, is_alike=False) == [(None, 5, 0.0)] * 4


@pytest.mark.parametrize("modes", ["hpz", slow("all")])
def test_evaluation_in_inference_mode_is_evaluation(ranks, modes):
    for found, expected in ranks(4).run(cases.evaluates_in_inference_mode, modes=modes):
        assert found == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("modes", [slow("mixed"), slow("hdp"), "all"])
def test_steps_that_ranks_take_alone_reach_no_other_and_leave_nothing(ranks, modes):
    assert ranks(4).run(cases.runs_alone, modes=modes) == [0.0] * 4


@pytest.mark.parametrize("modes", ["hsdp", slow("all")])
def test_what_is_written_to_whole_parameters_stays_in_each_node(ranks, modes):
    assert ranks(4).run(cases.writes_back, modes=modes) == [(0.0, 0.0)] * 4


@pytest.mark.parametrize(
    ("num_micro_batches", "prefetch", "sync"),
    [slow(1, "pre", "every"), slow(2, "none", "every"), (2, "pre", "node")],
)
@pytest.mark.parametrize("asynchronous", [True, slow(False)])
@pytest.mark.parametrize("modes", cases.MODES)
def test_peak_of_a_step_is_what_was_predicted(ranks, modes, num_micro_batches, prefetch, sync, asynchronous):
    predicted, counted = ranks(4).run(
        cases.peaks,
        name="wide_mlp",
        modes=modes,
        num_micro_batches=num_micro_batches,
        prefetch=prefetch,
        asynchronous=asynchronous,
        sync=sync,
    )[0]
    assert predicted == pytest.approx(counted, rel=2e-3)


@pytest.mark.parametrize("modes", [slow("mixed"), "all"])
def test_units_change_between_being_freed_kept_and_left_in_nodes_while_they_train(ranks, modes):
    for from_one_plan, from_ddp in ranks(4).run(cases.changes, seed=3, modes=modes):
        assert from_one_plan == 0.0
        assert from_ddp < 1e-12


@pytest.mark.slow
def test_a_plan_that_shards_a_unit_over_other_ranks_is_refused_while_training_goes_on(ranks):
    for found in ranks(4).run(cases.refused_moves):
        assert [apart for _, apart in found.values()] == [0.0] * 3
        assert {kind for (kind, _), _ in found.values()} == {"PlanMismatchError"}
        texts = [text for (_, text), _ in found.values()]
        assert "the ranks that unit 'first' is sharded over is 'all' in use and 'node' in the plan" in texts[0]
        assert "the ranks that unit '' is sharded over is 'node' in use and 'all' in the plan" in texts[1]


def test_a_change_waits_for_gradients_that_are_reduced_inside_of_nodes_alone(ranks):
    for (kind, text), is_changed in ranks(4).run(cases.refused_inside_a_step):
        assert kind == "ConfigurationError"
        assert "holds gradients of 'first' that are not reduced yet" in text
        assert is_changed


def test_an_evaluation_leaves_a_shard_in_each_node_until_weights_change(ranks):
    for left, whole, gathered, resharded, _ in ranks(4).run(cases.left_after_evaluation):
        assert left == gathered / cases.NODE_SIZE > 0
        assert whole == 0
        assert resharded == (0, 0)


@pytest.mark.slow
def test_links_inside_of_nodes_and_between_them_are_measured(ranks):
    first, *others = ranks(4).run(cases.measured)
    assert others == [first] * 3
    assert (first.world_size, first.node_size, first.has_nodes) == (4, 2, True)
    links = [getattr(each, name) for each in (first.within_node, first.between_nodes) for name in vars(each)]
    for link in (*links, first.all_reduce):
        assert link.ring_s(2**20, 2) > 0


@pytest.mark.parametrize(
    ("node_size", "message"),
    [
        (3, "Expected a node_size that divides the 4 ranks, got 3"),
        (4, "the plan is for nodes of 2 ranks, this run has nodes of 4"),
        (None, "the plan is for nodes of 2 ranks, this run has nodes of 4"),
    ],
)
def test_a_plan_for_other_nodes_is_refused(ranks, node_size, message):
    for kind, text in ranks(4).run(cases.refused, node_size=node_size):
        assert kind in {"ConfigurationError", "PlanMismatchError"}
        assert message in text
