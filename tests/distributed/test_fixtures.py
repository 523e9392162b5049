"""Checkpoints that an earlier version wrote load bit for bit, and training goes on."""

import fixture_cases as cases
import pytest

pytestmark = pytest.mark.distributed

FULL, SHARDED = [f"{name}.pt" for name in cases.OPTIMIZERS], list(cases.OPTIMIZERS)


@pytest.mark.parametrize(("world_size", "checkpoints"), [(2, FULL + SHARDED), (4, SHARDED)])
def test_checkpoints_of_an_earlier_version_load(ranks, engine, world_size, checkpoints):
    found = ranks(world_size).run(cases.goes_on, engine=engine, checkpoints=checkpoints)[0]
    assert list(found) == checkpoints
    for wrong, step, off in found.values():
        assert wrong == [cases.NUM_STEPS]
        assert step == cases.NUM_STEPS + 2
        assert off < 1e-5
