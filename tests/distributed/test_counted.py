"""What is alive in a fit beside what its plan predicts: nothing that setup left, and whatever users keep."""

import counted_cases as cases
import pytest
from tiers import slow

LOGGED_BYTES = 256
"""A number or two for each value that Lightning logs, whose times differ."""

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize(
    "options",
    [
        slow({"plans": True, "dry_run": False, "averages": False}),
        {"plans": False, "dry_run": True, "averages": False},
        {"plans": False, "dry_run": False, "averages": True},
    ],
    ids=["planned", "dry run", "averaged"],
)
def test_setup_leaves_nothing_beside_what_the_plan_predicts(ranks, options):
    assert ranks(2).run(cases.left_behind, **options) == [[], []]


def test_a_tensor_that_a_callback_keeps_is_told_beside_the_peak(ranks):
    for ((peak, before, quiet), (same, other, table)), _ in ranks(2).run(cases.kept, name="tensor"):
        assert other - before == pytest.approx(cases.KEPT_BYTES, abs=LOGGED_BYTES)
        assert same == peak
        assert "other tensors" not in quiet
        assert " ".join(table.splitlines()[-1].split()) == "other tensors of yours not in the plan 1.00 MiB -"


def test_outputs_that_are_kept_in_a_list_are_counted(ranks):
    for ((_, before, _), (_, other, _)), outs in ranks(2).run(cases.kept, name="outputs"):
        assert len(set(outs)) == 1
        # when the last counted step begins, those of all before it are alive
        assert other - before == pytest.approx((len(outs) - 1) * outs[0], abs=LOGGED_BYTES)


def test_what_users_keep_counts_against_the_limit_of_a_dry_run(ranks):
    for fits, error in ranks(2).run(cases.dry_runs):
        assert fits == ()
        assert "ran out of memory" in error
