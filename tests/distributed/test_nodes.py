"""Four ranks as two nodes of two: training is training in all modes, takes what is predicted, and may change modes."""

import node_cases as cases
import pytest

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize(
    "options",
    [
        {"name": "gpt", "optimizer": "adamw", "dtype": "float64"},
        {"name": "odd_mlp", "optimizer": "sgd", "dtype": "float64", "clip": 0.05},
        {"name": "tied_gpt", "optimizer": "adamw", "dtype": "float64", "num_micro_batches": 2, "sync": "last"},
        {"name": "gpt", "optimizer": "adamw", "dtype": "float64", "num_micro_batches": 2, "rehearse": True},
    ],
    ids=lambda options: options["name"],
)
def test_five_steps_equal_ddp_and_one_process(ranks, options):
    found = ranks(4).run(cases.equivalence, **options)[0]
    assert set(found) == set(cases.MODES)
    for from_ddp, from_one in found.values():
        assert from_ddp < 1e-7
        assert from_one < 1e-7


@pytest.mark.parametrize(("num_micro_batches", "prefetch"), [(1, "pre"), (2, "none")])
@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("modes", cases.MODES)
def test_peak_of_a_step_is_what_was_predicted(ranks, modes, num_micro_batches, prefetch, asynchronous):
    predicted, counted = ranks(4).run(
        cases.peaks,
        name="wide_mlp",
        modes=modes,
        num_micro_batches=num_micro_batches,
        prefetch=prefetch,
        asynchronous=asynchronous,
    )[0]
    assert predicted == pytest.approx(counted, rel=2e-3)


def test_units_change_between_all_ranks_nodes_and_being_kept_while_they_train(ranks):
    for from_one_plan, from_ddp in ranks(4).run(cases.changes, seed=3):
        assert from_one_plan == 0.0
        assert from_ddp < 1e-12


def test_an_evaluation_leaves_a_shard_in_each_node_until_weights_change(ranks):
    for left, whole, gathered, resharded, _ in ranks(4).run(cases.left_after_evaluation):
        assert left == gathered / cases.NODE_SIZE > 0
        assert whole == 0
        assert resharded == (0, 0)


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
