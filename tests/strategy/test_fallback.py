"""What is said of a rehearsal."""

import pytest

from lightning_osdp.strategy.dry_run import fallback
from lightning_osdp.strategy.dry_run.step import Rehearsed
from lightning_osdp.strategy.runtime.error_texts import Shortage


@pytest.mark.parametrize(
    ("rehearsed", "text"),
    [
        ([Rehearsed(), Rehearsed()], "OSDP: rehearsed an optimizer step on each rank alone, in 2.00 s"),
        (
            [Rehearsed(), Rehearsed(shortage=Shortage("forward of h", "OutOfMemoryError: no room"))],
            "OSDP: rehearsed an optimizer step on each rank alone, in 2.00 s",
        ),
        (
            [Rehearsed(), Rehearsed(why_not="ValueError: no batch")],
            "OSDP: a step cannot be rehearsed on rank 1, so training begins: ValueError: no batch",
        ),
    ],
)
def test_a_rehearsal_is_told_of_as_it_went_on_all_ranks(monkeypatch, rehearsed, text):
    told = []
    monkeypatch.setattr(fallback, "rank_zero_info", told.append)
    fallback._tell(rehearsed, 2.0)
    assert told == [text]
