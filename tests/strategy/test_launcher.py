"""``Trainer(strategy="osdp", devices=2)`` in a script of its own, as users start it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_osdp import Plan


@pytest.mark.distributed
def test_a_script_trains_on_two_ranks_under_lightnings_launcher(tmp_path):
    script = Path(__file__).with_name("script.py")
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run(
        [sys.executable, script, tmp_path], capture_output=True, text=True, timeout=120, env=environment, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "rank 0 ended at step 8" in run.stdout
    assert "rank 1 ended at step 8" in run.stdout
    assert run.stdout.count("OSDP plan") == 1
    assert run.stdout.count("predicted and measured") == 1
    plan = Plan.load(tmp_path / "osdp_plan.json")
    assert plan.world_size == 2
    assert [decision.operator for decision in plan.decisions] == ["layer"]
    assert list(tmp_path.rglob("*.ckpt"))
