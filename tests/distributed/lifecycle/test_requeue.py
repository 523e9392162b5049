"""Jobs that SLURM queues again: saved by all ranks between two batches, and resumed from there."""

import os
import signal
from unittest import mock

import pytest
import torch.distributed as dist
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch.trainer.connectors import signal_connector

from benchmarks.testbed.training import StartedRanks
from lightning_osdp import OSDPStrategy
from tests.distributed.support.fits import largest_difference, plan_for, shared_folder, trainer
from tests.distributed.support.models import OddMLP
from tests.support.tiers import slow

pytestmark = pytest.mark.distributed


class Slurm(SLURMEnvironment):
    """SLURM's environment of ranks that have been started."""

    world_size = StartedRanks.world_size
    global_rank = StartedRanks.global_rank
    local_rank = StartedRanks.local_rank
    node_rank = StartedRanks.node_rank
    validate_settings = StartedRanks.validate_settings


class Signalled(OddMLP):
    """Gets the signal in its second step, rank 0 in the middle of forward and the others before it."""

    def __init__(self, is_signalled):
        super().__init__("sgd")
        self.is_signalled, self.steps = is_signalled, []

    def training_step(self, batch, batch_idx):
        self.steps.append(self.trainer.global_step)
        if self.is_signalled and self.trainer.global_step == 1:
            if self.trainer.global_rank:
                os.kill(os.getpid(), signal.SIGUSR1)
            else:
                first = next(child for child in self.children() if any(True for _ in child.parameters()))
                hook = first.register_forward_hook(lambda *_: os.kill(os.getpid(), signal.SIGUSR1))
                try:
                    return super().training_step(batch, batch_idx)
                finally:
                    hook.remove()
        return super().training_step(batch, batch_idx)


def run(folder, *, is_signalled, num_steps):
    """Steps that were taken, the whole state, and what was asked of SLURM."""
    module, asked = Signalled(is_signalled), []
    plan = plan_for(OddMLP("sgd"), "mixed", world_size=dist.get_world_size())
    fit = trainer(
        OSDPStrategy(plan=plan, batch_size="keep"), max_steps=num_steps, plugins=[Slurm()], default_root_dir=folder
    )
    with mock.patch.object(signal_connector, "call", lambda command: asked.append(command) or 0):
        fit.fit(module, module.loader(dist.get_rank(), dist.get_world_size()))
    state = fit.strategy.lightning_module_state_dict()
    return module.steps, {name: value.detach().clone() for name, value in state.items()}, asked


def requeued():
    """A job that is told to save and goes on, the one that is queued again, and one that nothing disturbs."""
    folder = shared_folder()
    number = str(dist.get_world_size())
    variables = {
        "SLURM_JOB_ID": "7",
        "SLURM_NTASKS": number,
        "SLURM_NTASKS_PER_NODE": number,
        "SLURM_JOB_NAME": "train",
    }
    before = signal.getsignal(signal.SIGUSR1)
    with mock.patch.dict(os.environ, variables):
        told = run(folder, is_signalled=True, num_steps=5)
        saved = sorted(path.name for path in folder.iterdir() if path.suffix == ".ckpt")
        again = run(folder, is_signalled=False, num_steps=5)
    whole = run(shared_folder(), is_signalled=False, num_steps=5)
    return {
        "saved": saved,
        "asked": told[2],
        "steps": [each[0] for each in (told, again)],
        "difference": largest_difference(told[1], whole[1]) if dist.get_rank() == 0 else 0.0,
        "handler": signal.getsignal(signal.SIGUSR1) is before,
    }


@pytest.mark.parametrize("world_size", [slow(1), 2])
def test_a_job_is_saved_by_all_ranks_between_two_batches_and_goes_on_when_it_is_queued_again(ranks, world_size):
    for rank, found in enumerate(ranks(world_size).run(requeued)):
        assert found["saved"] == ["hpc_ckpt_1.ckpt"]
        assert found["asked"] == ([] if rank else [["scontrol", "requeue", "7"]])
        assert found["steps"] == [[0, 1, 2, 3, 4], [2, 3, 4]]
        assert found["difference"] == 0
        assert found["handler"]
