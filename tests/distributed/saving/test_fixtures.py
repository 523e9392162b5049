"""Checkpoints that an earlier version wrote, under FSDP1, load bit for bit, and training goes on; its plans do not."""

import pytest

from lightning_osdp.core.plans.plan import SCHEMA_VERSION
from lightning_osdp.errors import PlanFormatError
from lightning_osdp.strategy.checkpointing.entries import read_plan
from tests.distributed.support import checkpoint_fixtures
from tests.support.tiers import slow

pytestmark = pytest.mark.distributed


CHECKPOINTS = [f"{name}{suffix}" for name in checkpoint_fixtures.OPTIMIZERS for suffix in (".pt", "")]
"""Files and folders of shards."""
OTHER_SCHEMA = (
    f" to have schema_version {SCHEMA_VERSION}, got 2. Plan anew with this version of lightning_osdp, or use the"
    " version that wrote the plan."
)


@pytest.mark.parametrize("world_size", [2, slow(4)])
def test_checkpoints_of_an_earlier_version_load(ranks, world_size):
    found = ranks(world_size).run(checkpoint_fixtures.goes_on, checkpoints=CHECKPOINTS)[0]
    assert list(found) == CHECKPOINTS
    for wrong, step, off in found.values():
        assert wrong == [checkpoint_fixtures.NUM_STEPS]
        assert step == checkpoint_fixtures.NUM_STEPS + 2
        assert off < 1e-5


@pytest.mark.parametrize("checkpoint", CHECKPOINTS)
def test_plans_in_checkpoints_of_an_earlier_version_are_refused(checkpoint):
    path = checkpoint_fixtures.FOLDER / checkpoint
    with pytest.raises(PlanFormatError) as refused:
        read_plan(path)
    assert str(refused.value) == f"Expected the plan in checkpoint {str(path)!r}{OTHER_SCHEMA}"
