"""Ranks killed at seeded moments: what resumes is the newest complete checkpoint."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.distributed

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "faults.py"


def test_training_goes_on_from_the_newest_complete_checkpoint_whichever_rank_is_killed():
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", str(SCRIPT), "--count", "3"],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr[-2000:]
    assert "3 ranks killed, 4 of 4 runs as they should" in ended.stdout
