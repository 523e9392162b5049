"""Counts with one process for rank 0 of N, against counts in real ranks."""

import pytest
from testbed_cases import counted, reduced, reduced_in_a_ring, refused_by_the_ring
from tiers import slow

from benchmarks.testbed.groups import fake_group, simulated_group
from benchmarks.testbed.simulated import SimulatedLinks

pytestmark = pytest.mark.distributed

MLP = {"layers.0": "ZDP", "layers.1": "DP", "layers.2": "ZDP", "layers.5": "ZDP"}
GPT = {f"model.blocks.{i}": mode for i, mode in enumerate(("DP", "ZDP", "DP"))}


@pytest.mark.parametrize(
    "case",
    [
        slow({"name": "odd_mlp", "optimizer": "adamw", "precision": "32-true", "modes": MLP, "world_size": 3}),
        slow(
            {"name": "odd_mlp", "optimizer": "sgd_momentum", "modes": MLP, "prefetch": "none", "num_micro_batches": 3}
        ),
        {"name": "tied", "optimizer": "adamw_foreach", "precision": "bf16-mixed", "modes": GPT},
    ],
)
def test_rank_0_of_n_alone_counts_what_real_ranks_count(ranks, case):
    case = {"world_size": 2, **case}
    real = ranks(case["world_size"]).run(counted, **case)[0]
    with simulated_group(case["world_size"], SimulatedLinks(copies_reduced=True)):
        alone = counted(**case)
    # the least of several steps: a thread of gloo may hold a tensor longer than the step does
    assert alone == pytest.approx(real, rel=1e-3)
    with fake_group(case["world_size"]):
        fake = counted(**case)
    assert fake.pop("reduce-scatter") < alone.pop("reduce-scatter")  # gloo copies what it reduces
    assert fake == alone


@pytest.mark.parametrize("op", ["SUM", "AVG"])
@pytest.mark.parametrize(
    ("world_size", "group"), [slow(2, None), slow(3, None), (3, [2, 1]), slow(3, [0, 2]), slow(3, [1])]
)
def test_the_ring_reduces_as_gloo_does(ranks, world_size, group, op):
    found = ranks(world_size).run(reduced, num_elements=5, op=op, ranks_of_group=group)
    for rank, result in enumerate(found):
        if group is not None and rank not in group:
            assert result is None
            continue
        ours, expected, is_left_alone = result
        assert ours == pytest.approx(expected, rel=1e-6)
        assert is_left_alone


@pytest.mark.parametrize("options", [{"op": "MAX"}, {"async_op": True}])
def test_the_ring_refuses_what_it_cannot_do(ranks, options):
    for told in ranks(2).run(refused_by_the_ring, **options):
        assert told.startswith("Expected SUM or AVG that is waited for")


@pytest.mark.parametrize("how", ["by a plan", "by hand"])
def test_units_reduce_in_the_ring(ranks, how):
    for without, with_ring, num_rings in ranks(3).run(reduced_in_a_ring, how=how):
        assert num_rings == 12  # three blocks and the root, in three steps
        assert with_ring == pytest.approx(without, rel=1e-5)
