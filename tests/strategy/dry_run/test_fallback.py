"""Messages about a dry run."""

import pytest

from lightning_osdp.strategy import dry_run
from lightning_osdp.strategy.dry_run import DryRun


@pytest.mark.parametrize(
    ("dry_runs", "text"),
    [
        ([DryRun(), DryRun()], "OSDP: dry run of an optimizer step on each rank alone, in 2.00 s"),
        (
            [DryRun(), DryRun(place="forward of h", error="OutOfMemoryError: no room")],
            "OSDP: dry run of an optimizer step on each rank alone, in 2.00 s",
        ),
        (
            [DryRun(), DryRun(error="ValueError: no batch")],
            "OSDP: no dry run of a step on rank 1, so training begins: ValueError: no batch",
        ),
    ],
)
def test_a_dry_run_is_told_of_as_it_went_on_all_ranks(monkeypatch, dry_runs, text):
    told = []
    monkeypatch.setattr(dry_run, "rank_zero_info", told.append)
    dry_run._log_result(dry_runs, 2.0)
    assert told == [text]
