"""Runs that are resumed go on as if nothing had interrupted them: random numbers, schedules, counts and callbacks."""

import pytest
import resume_cases as cases
from tiers import slow

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize(
    ("options", "resumed_from"),
    [
        ({"schedule": "step", "val_check_interval": 0.5}, ["steps/3.ckpt", "best/4.ckpt", "epochs/4.ckpt"]),
        slow({"schedule": "epoch", "num_workers": 1, "kind": "sharded"}, ["epochs/4.ckpt"]),
        # What workers draw in mid-epoch is the loader's to restore.
        slow({"schedule": "epoch", "num_workers": 1, "noise": 0.0, "dry_run": True}, ["steps/3.ckpt"]),
    ],
)
def test_a_resumed_run_equals_the_uninterrupted_one(ranks, options, resumed_from):
    for wrong, num_steps in ranks(2).run(cases.differing, resumed_from=resumed_from, **options):
        assert wrong == {name: [] for name in resumed_from}
        assert num_steps == 8
