"""State of modules under ``fully_shard``: whole, in shards, from and to plain ones and FSDP1's, within memory."""

import fsdp2_state_cases as cases
import pytest

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize(
    ("world_size", "dtype", "slices", "then"),
    [(2, "float32", 2, (4, 3)), (4, "float32", 3, (2, 0)), (1, "float32", 2, (2, 2)), (2, "bfloat16", 0, (1, 3))],
)
def test_state_goes_into_shards_and_out_again(ranks, tmp_path, world_size, dtype, slices, then):
    names = list(cases.OPTIMIZERS) if (world_size, slices) == (2, 2) else ["adamw", "momentum"]
    found = ranks(world_size).run(cases.round_trips, names=names, dtype=dtype, slices=slices, folder=str(tmp_path))
    assert found == [dict.fromkeys(names, [])] * world_size
    other_size, others = then
    found = ranks(other_size).run(
        cases.read_again, names=names, dtype=dtype, slices=others, folder=str(tmp_path), saved=slices
    )
    assert found == [dict.fromkeys(names, [])] * other_size
