"""``Trainer(strategy=...)`` in a script of its own, as users start it: each way to start two ranks, and their end.

Every run must end with exit code 0: gloo aborts one in ten at interpreter exit where nothing is done about it.
``benchmarks/exits.py`` runs it more often.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from lightning.pytorch.strategies import StrategyRegistry

from lightning_osdp import ConfigurationError, OSDPStrategy, Plan
from lightning_osdp.strategy import osdp as strategy_module
from lightning_osdp.strategy.launcher import GatheringLauncher

SCRIPT = Path(__file__).with_name("script.py")
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def run(*arguments):
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)


@pytest.mark.distributed
@pytest.mark.parametrize("start", [[], TORCHRUN], ids=["subprocesses", "torchrun"])
def test_a_script_trains_on_two_ranks(tmp_path, start):
    ended = run(*start, SCRIPT, tmp_path)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "rank 0 ended at step 8" in ended.stdout
    assert "rank 1 ended at step 8" in ended.stdout
    assert ended.stdout.count("OSDP plan") == 1
    assert ended.stdout.count("predicted and measured") == 1
    plan = Plan.load(tmp_path / "osdp_plan.json")
    assert plan.world_size == 2
    assert [decision.operator for decision in plan.decisions] == ["layer"]
    assert list(tmp_path.rglob("*.ckpt"))


@pytest.mark.distributed
@pytest.mark.parametrize("strategy", ["osdp_spawn", "osdp_notebook"])
def test_workers_give_the_whole_trained_weights_and_the_plan_back(tmp_path, strategy):
    ended = run(SCRIPT, tmp_path, "--strategy", strategy)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "whole weights as saved: True; moved: True" in ended.stdout
    assert "planned for 2 ranks" in ended.stdout
    assert ended.stdout.count("ended at step") == 1  # the workers' scripts do not go on


@pytest.mark.distributed
@pytest.mark.parametrize(("strategy", "rank"), [("osdp", 0), ("osdp_notebook", 1)])
def test_an_error_on_one_rank_ends_all_with_its_text(tmp_path, strategy, rank):
    ended = run(SCRIPT, tmp_path, "--strategy", strategy, "--fail-rank", str(rank))
    assert ended.returncode not in (0, None)
    assert "ValueError: this rank has no loss" in ended.stderr
    if strategy == "osdp":  # workers have one voice, their parent's
        assert f"Rank {rank} failed: ValueError: this rank has no loss" in ended.stderr
    assert "ended at step" not in ended.stdout


def test_each_way_has_a_name_as_with_ddp():
    methods = {"osdp": "popen", "osdp_spawn": "spawn", "osdp_fork": "fork", "osdp_notebook": "fork"}
    assert {name: StrategyRegistry.get(name)._start_method for name in methods} == methods


def test_start_methods_that_do_not_exist_are_refused():
    with pytest.raises(ConfigurationError, match=r"start_method must be one of .*'forkserver'.*, got 'thread'"):
        OSDPStrategy(start_method="thread")


@pytest.mark.usefixtures("one_rank")
def test_a_notebook_is_told_which_name_to_use(monkeypatch):
    monkeypatch.setattr(strategy_module, "_IS_INTERACTIVE", True)
    strategy = OSDPStrategy()
    strategy.cluster_environment = lightning_environment()
    with pytest.raises(ConfigurationError, match=r"got 'popen'.*Use Trainer\(strategy='osdp_notebook'\)"):
        strategy._configure_launcher()
    strategy = StrategyRegistry.get("osdp_notebook")
    strategy.cluster_environment = lightning_environment()
    strategy._configure_launcher()
    assert isinstance(strategy.launcher, GatheringLauncher)
    assert strategy.launcher.is_interactive_compatible


@pytest.mark.usefixtures("one_rank")
def test_ranks_that_are_there_already_are_used(monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "0")
    strategy = OSDPStrategy(start_method="spawn")
    strategy.cluster_environment = lightning_environment()
    with pytest.warns(UserWarning, match="start_method='spawn' is ignored, the ranks have been started already"):
        strategy._configure_launcher()
    assert strategy.launcher is None


def lightning_environment():
    from lightning.fabric.plugins.environments import LightningEnvironment

    return LightningEnvironment()
