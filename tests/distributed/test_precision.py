"""Precisions: planned, trained, and close to full precision."""

import pytest
from cases import overflows, trains_in
from models import WideMLP
from tiers import slow

pytestmark = pytest.mark.distributed

NUM_ELEMENTS = sum(p.numel() for p in WideMLP().parameters())


@pytest.mark.parametrize("world_size", [2, slow(4)])
@pytest.mark.parametrize(
    ("precision", "bytes_per_element", "kept"),
    [
        slow("32-true", 4, "float32"),
        ("bf16-mixed", 2, "float32"),
        ("bf16-true", 2, "bfloat16"),
        slow("16-mixed", 2, "float32"),
    ],
)
def test_training_is_planned_and_close_to_full_precision(ranks, precision, bytes_per_element, kept, world_size):
    found = ranks(world_size).run(trains_in, precision=precision)[0]
    assert found["gathered_bytes"] == bytes_per_element * NUM_ELEMENTS
    assert found["dtypes"][1] == [f"torch.{kept}"]
    assert found["losses"] == pytest.approx(found["ddp"], rel=1e-6 if precision == "32-true" else 5e-2)
    assert found["losses"] != [found["losses"][0]] * 8
    assert found["predicted"] == pytest.approx(found["counted"], rel=2e-3)


@pytest.mark.parametrize(("world_size", "in_nodes"), [slow(2, False), (4, True)])
@pytest.mark.parametrize("clip", [slow(None), 0.5])
def test_all_ranks_leave_out_a_step_in_float16_whose_gradients_overflow_on_one(ranks, clip, world_size, in_nodes):
    for steps in ranks(world_size).run(overflows, clip=clip, in_nodes=in_nodes):
        assert steps == [(True, 65536.0), (False, 32768.0), (True, 32768.0), (True, 32768.0)]
