"""What a window or a step that was broken off has left does not reach what is trained after it."""

import broken_off_cases as cases
import pytest
from tiers import slow

pytestmark = pytest.mark.distributed

OVER_ALL = [("ZDP", "last"), ("DP", "last"), ("ZDP", "every")]
IN_NODES = [("HSDP", "node"), ("HDP", "node"), ("HDP", "last")]


@pytest.mark.parametrize(
    ("case", "world_size", "kinds"),
    [
        (cases.ended_epochs, 2, OVER_ALL),
        slow(cases.ended_epochs, 4, IN_NODES),
        *(slow(case, 2, OVER_ALL) for case in (cases.stopped_fits, cases.errors_in_backward)),
        *(slow(case, 4, IN_NODES) for case in (cases.stopped_fits, cases.errors_in_backward)),
    ],
)
def test_training_goes_on_as_under_ddp(ranks, case, world_size, kinds):
    found = ranks(world_size).run(case, kinds=kinds)[0]
    assert len(found) == len(kinds)
    assert max(found) < 1e-9, found


@pytest.mark.slow
def test_manual_optimization_goes_on_after_an_error_as_under_ddp(ranks):
    assert max(ranks(2).run(cases.errors_by_hand)) < 1e-6
