"""Training under every kind of plan is training: equal to DDP and to one process, to rounding."""

import pytest
from cases import equivalence

pytestmark = pytest.mark.distributed

both_sizes = pytest.mark.parametrize("world_size", [2, 4])

MODES = {"zdp": ["ZDP"], "dp": ["DP"], "mixed": ["DP", "ZDP"]}
# A parameter whose true gradient is zero, such as attention's key bias, drifts by rounding under AdamW in float32.
TOLERANCES = [("adamw", "float64", 1e-9), ("sgd", "float32", 1e-6), ("adamw", "float32", 1e-4)]


@pytest.mark.parametrize(("optimizer", "dtype", "tolerance"), TOLERANCES)
@pytest.mark.parametrize("modes", MODES)
@pytest.mark.parametrize("name", ["gpt", "odd_mlp", "tied_gpt"])
def test_five_steps_equal_ddp_and_one_process(ranks, name, modes, optimizer, dtype, tolerance):
    found = ranks(2).run(equivalence, name=name, optimizer=optimizer, dtype=dtype, modes=modes)[0]
    assert found["modes"] == MODES[modes]
    assert len(found["units"]) > 4
    assert found["moved"] > 100 * tolerance
    assert found["ddp"] < tolerance
    assert found["plain"] < tolerance


@pytest.mark.parametrize("name", ["gpt", "odd_mlp", "tied_gpt"])
def test_five_steps_equal_on_four_ranks(ranks, name):
    found = ranks(4).run(equivalence, name=name, optimizer="adamw", dtype="float64", modes="mixed")[0]
    assert found["ddp"] < 1e-9
    assert found["plain"] < 1e-9


@pytest.mark.parametrize(("world_size", "num_micro_batches"), [(2, 3), (4, 2)])
def test_accumulated_micro_batches_equal_ddp_and_one_process(ranks, world_size, num_micro_batches):
    found = ranks(world_size).run(
        equivalence,
        name="gpt",
        optimizer="adamw",
        dtype="float64",
        modes="mixed",
        num_micro_batches=num_micro_batches,
    )[0]
    assert found["ddp"] < 1e-9
    assert found["plain"] < 1e-9


@both_sizes
@pytest.mark.parametrize("name", ["gpt", "odd_mlp"])
def test_gradients_clipped_by_norm_equal_one_process(ranks, name, world_size):
    found = ranks(world_size).run(equivalence, name=name, optimizer="sgd", dtype="float64", modes="mixed", clip=0.05)[0]
    assert found["plain"] < 1e-7  # clip_grad_norm_ adds 1e-6 to the norm, as torch does
    assert found["ddp"] < 1e-7


@both_sizes
def test_blocks_that_share_a_unit_equal_ddp_and_one_process(ranks, world_size):
    found = ranks(world_size).run(
        equivalence, name="gpt", optimizer="adamw", dtype="float64", modes="mixed", shares=True
    )[0]
    assert found["units"] == ["", "tokens", "blocks.0", "blocks.1", "norm", "head"]
    assert found["modes"] == ["DP", "ZDP"]
    assert found["ddp"] < 1e-9
    assert found["plain"] < 1e-9
