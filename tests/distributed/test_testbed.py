"""Counts with one process for rank 0 of N, against counts in real ranks."""

import pytest
from testbed_cases import counted, reduced

from benchmarks.testbed.groups import fake_group, simulated_group
from benchmarks.testbed.simulated import SimulatedLinks

pytestmark = pytest.mark.distributed

MLP = {"layers.0": "ZDP", "layers.1": "DP", "layers.2": "ZDP", "layers.5": "ZDP"}
GPT = {f"model.blocks.{i}": mode for i, mode in enumerate(("DP", "ZDP", "DP"))}


@pytest.mark.engine("fsdp1")  # the simulated group has no name, and FSDP2's mesh needs one
@pytest.mark.parametrize(
    "case",
    [
        {"name": "odd_mlp", "optimizer": "adamw", "precision": "32-true", "modes": MLP, "world_size": 3},
        {"name": "odd_mlp", "optimizer": "sgd_momentum", "modes": MLP, "prefetch": "none", "num_micro_batches": 3},
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


@pytest.mark.parametrize("world_size", [2, 3])
def test_the_ring_adds_up_what_all_ranks_have(ranks, world_size):
    for ours, expected, is_left_alone in ranks(world_size).run(reduced, num_elements=5):
        assert ours == expected
        assert is_left_alone
