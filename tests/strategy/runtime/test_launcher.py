"""``Trainer(strategy=...)`` in a script of its own, as users start it: each way to start ranks, and their end.

Every run must end with exit code 0: gloo aborts one in ten at interpreter exit where nothing is done about it.
``benchmarks/exits.py`` runs it more often. Four ranks are those of two nodes, and forked ones: every other process
imports torch and Lightning for itself, which takes longer than all that it does.
"""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from lightning.pytorch.strategies import StrategyRegistry

from lightning_osdp import ConfigurationError, OSDPStrategy, Plan
from lightning_osdp.strategy.runtime import launcher
from lightning_osdp.strategy.runtime.launcher import GatheringLauncher
from tests.support.tiers import slow

SCRIPT = Path(__file__).with_name("script.py")
STEPS, SEED = 8, 5
"""Number of steps and seed of the script."""


def start(*arguments):
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def ended(process):
    """Exit code, stdout and stderr."""
    try:
        told = process.communicate(timeout=200)
    finally:
        process.kill()
    return process.returncode, *told


def run(*arguments):
    return ended(start(*arguments))


def torchrun(*arguments):
    return ["-m", "torch.distributed.run", *arguments]


def on_two_nodes(*arguments):
    """Runs two nodes of two ranks each on this machine, and returns how each node ended."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    meeting = ["--master-addr", "127.0.0.1", "--master-port", port]
    nodes = [
        start(
            *torchrun("--nnodes", 2, "--node-rank", node, "--nproc-per-node", 2, *meeting),
            *(SCRIPT, "--num-nodes", 2, *arguments),
        )
        for node in range(2)
    ]
    return [ended(node) for node in nodes]


def check_trained(folder, stdout, *, world_size, num_trainers=1):
    """Checks that all ranks ended, after one plan, which each Trainer shows."""
    for rank in range(world_size):
        assert f"rank {rank} ended at step {STEPS}" in stdout
    assert stdout.count("OSDP plan") == num_trainers
    assert stdout.count("predicted and measured") == num_trainers
    plan = Plan.load(folder / "osdp_plan.json")
    assert plan.world_size == world_size
    assert {decision.operator for decision in plan.decisions} == {"layer", "norm"}
    assert list(folder.rglob("*.ckpt"))


@pytest.mark.slow
@pytest.mark.distributed
def test_a_script_trains_on_the_ranks_of_torchrun(tmp_path):
    code, stdout, stderr = run(*torchrun("--standalone", "--nproc-per-node", 2), SCRIPT, tmp_path, "--devices", 2)
    assert code == 0, stdout + stderr
    check_trained(tmp_path, stdout, world_size=2)


@pytest.mark.distributed
@pytest.mark.slow
def test_two_trainers_in_a_script_fit_its_model_one_after_the_other_on_all_ranks(tmp_path):
    code, stdout, stderr = run(SCRIPT, tmp_path, "--num-trainers", 2)
    assert code == 0, stdout + stderr
    check_trained(tmp_path, stdout, world_size=2, num_trainers=2)
    assert "another Trainer has sharded this model already" in stderr


@pytest.mark.distributed
@pytest.mark.slow
def test_two_nodes_train_under_one_plan(tmp_path):
    (code, stdout, stderr), (other_code, other_stdout, other_stderr) = on_two_nodes(tmp_path)
    assert (code, other_code) == (0, 0), stderr + other_stderr
    check_trained(tmp_path, stdout + other_stdout, world_size=4)
    assert "OSDP plan" in stdout


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("how", "world_size"),
    [
        slow(("--strategy", "osdp_spawn"), 2),
        slow(("--strategy", "osdp_notebook"), 4),
        (("--start-method", "forkserver"), 2),
    ],
    ids=lambda value: value[1] if isinstance(value, tuple) else None,
)
def test_workers_give_the_whole_trained_weights_and_the_plan_back(tmp_path, how, world_size):
    code, stdout, stderr = run(SCRIPT, tmp_path, "--devices", world_size, *how)
    assert code == 0, stdout + stderr
    assert "whole weights as saved: True; moved: True" in stdout
    assert f"planned for {world_size} ranks" in stdout
    assert stdout.count("ended at step") == 1  # the workers' scripts do not go on
    assert f"{STEPS} batches normalised, seeded with {SEED}\n" in stdout  # no rank has written to another's buffers


@pytest.mark.distributed
@pytest.mark.parametrize(("strategy", "rank", "world_size"), [slow("osdp", 0, 2), slow("osdp_notebook", 3, 4)])
def test_an_error_on_one_rank_ends_all_with_its_text(tmp_path, strategy, rank, world_size):
    code, stdout, stderr = run(
        *(SCRIPT, tmp_path, "--devices", world_size, "--strategy", strategy, "--fail-rank", rank)
    )
    assert code not in (0, None)
    assert "ValueError: this rank has no loss" in stderr
    if strategy == "osdp":  # workers have one voice, their parent's
        assert f"Rank {rank} failed: ValueError: this rank has no loss" in stderr
        assert stderr.count("Traceback (most recent call last)") == 1  # from the rank that failed
    assert "ended at step" not in stdout


@pytest.mark.distributed
@pytest.mark.slow
def test_of_an_error_that_all_ranks_have_each_but_one_prints_a_line(tmp_path):
    code, stdout, stderr = run(SCRIPT, tmp_path, "--devices", 3, "--memory-limit", "2KiB")
    assert code == 1
    assert stderr.count("Traceback (most recent call last)") == 1
    text = "InfeasibleError: No plan fits: the limit is 2.00 KiB per rank"
    for told in (
        f"lightning_osdp.errors.{text}",
        *(f"\nOSDP: rank {rank} ends as rank 0 does: {text}" for rank in (1, 2)),
    ):
        assert stderr.count(told) == 1, stderr
    assert "ended at step" not in stdout


@pytest.mark.distributed
@pytest.mark.slow
def test_memory_that_runs_out_on_one_node_ends_the_others_ranks_with_where_and_what_helps(tmp_path):
    for code, stdout, stderr in on_two_nodes(tmp_path, "--fail-rank", 3, "--of-memory"):
        assert code not in (0, None)
        assert "Rank 3 failed: OutOfMemoryError: Tried to allocate 20.00 MiB." in stderr
        assert "OSDP: rank 3 ran out of memory in forward of the root unit, under a plan that is predicted to" in stderr
        assert ", so that more is sharded, or use a smaller micro-batch." in stderr
        assert "ended at step" not in stdout
        (last,) = set(re.findall(r"The last checkpoint is (\S+\.ckpt)\.", stderr))
        assert torch.load(last, weights_only=False)["global_step"] == 4


@pytest.mark.distributed
@pytest.mark.slow
def test_memory_that_runs_out_on_one_rank_in_its_turn_in_a_race_ends_all_and_names_the_turn(tmp_path):
    code, stdout, stderr = run(SCRIPT, tmp_path, "--devices", 2, "--fail-rank", 1, "--race")
    assert code not in (0, None)
    assert "Rank 1 failed: OutOfMemoryError: Tried to allocate 20.00 MiB." in stderr
    assert re.search(r"It was the turn of '(?!the plan)[\w ]+' in a race of plans: race=False trains without", stderr)
    assert "ended at step" not in stdout


def test_each_way_has_a_name_as_with_ddp():
    methods = {"osdp": "popen", "osdp_spawn": "spawn", "osdp_fork": "fork", "osdp_notebook": "fork"}
    assert {name: StrategyRegistry.get(name)._units.options.start_method for name in methods} == methods


def test_start_methods_that_do_not_exist_are_refused():
    with pytest.raises(ConfigurationError, match=r"start_method must be one of .*'forkserver'.*, got 'thread'"):
        OSDPStrategy(start_method="thread")


@pytest.mark.usefixtures("one_rank")
def test_a_notebook_is_told_which_name_to_use(monkeypatch):
    monkeypatch.setattr(launcher, "_IS_INTERACTIVE", True)
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
