"""Ranks killed at seeded moments: what resumes is the newest complete checkpoint."""

import pytest

from benchmarks import faults

pytestmark = pytest.mark.distributed


def test_training_goes_on_from_the_newest_complete_checkpoint_whichever_rank_is_killed(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["faults.py", "--count", "3"])
    num_failed = faults.main()
    printed = capsys.readouterr().out
    assert num_failed == 0, printed
    assert "3 ranks killed, 4 of 4 runs as they should" in printed
