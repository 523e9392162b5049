"""Runs that are resumed go on as if nothing had interrupted them: random numbers, schedules, counts and callbacks."""

import random
import shutil

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from benchmarks.testbed.plans import plan_of
from lightning_osdp import OSDPStrategy
from tests.distributed.support.fits import shared_folder, trainer
from tests.distributed.support.models import BATCH_SIZE, Base
from tests.support.tiers import slow

pytestmark = pytest.mark.distributed


WIDTH, NUM_BATCHES = 10, 4


class Noisy(Dataset):
    """Samples with noise, drawn where they are read: in a worker, or in the rank's own process."""

    def __init__(self, noise):
        self.noise = noise

    def __len__(self):
        return 2 * BATCH_SIZE * NUM_BATCHES

    def __getitem__(self, index):
        return torch.arange(WIDTH) / WIDTH + 0.1 * index + self.noise * torch.rand(WIDTH)


class Resumable(DistributedSampler):
    """Goes on after the samples that were given before."""

    num_skipped = 0

    def __iter__(self):
        indices = list(super().__iter__())[self.num_skipped :]
        self.num_skipped = 0
        return iter(indices)


class ResumableLoader(DataLoader):
    """Counts its batches, and goes on after those that it gave before it was saved."""

    num_given = 0

    def state_dict(self):
        return {"num_given": self.num_given % NUM_BATCHES}

    def load_state_dict(self, state):
        self.sampler.num_skipped = BATCH_SIZE * state["num_given"]
        self.num_given = state["num_given"]

    def __iter__(self):
        self.num_given = self.sampler.num_skipped // BATCH_SIZE
        return self._counted(super().__iter__())

    def _counted(self, batches):
        for batch in batches:
            self.num_given += 1
            yield batch


class Drawing(Base):
    """Dropout, numbers of all generators in its loss, and schedules of learning rates."""

    def __init__(self, schedule, counts):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.schedule, self.counts, self.seen = schedule, counts, []

    def loss(self, batch):
        hidden = F.dropout(torch.relu(self.first(batch)), 0.5, self.training)
        return F.mse_loss(self.second(hidden), batch)

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch) * (1 + random.random() + np.random.rand())  # noqa: NPY002 (the global generator)
        self.seen.append((self.trainer.global_step, loss.item(), self.optimizers().param_groups[0]["lr"]))
        self.log("train_loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        if self.counts:
            assert self.trainer.estimated_stepping_batches == 2 * NUM_BATCHES  # which makes loaders
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": self.schedule}}

    def loader(self, noise, num_workers):
        data = Noisy(noise)
        sampler = Resumable(data, dist.get_world_size(), dist.get_rank(), shuffle=True)
        context = "fork" if num_workers else None
        return ResumableLoader(
            data, batch_size=BATCH_SIZE, sampler=sampler, num_workers=num_workers, multiprocessing_context=context
        )


def run(
    folder,
    *,
    seed,
    schedule,
    counts=False,
    noise=0.1,
    num_workers=0,
    kind="full",
    dry_run="auto",
    ckpt_path=None,
    **options,
):
    """Returns what a run saw in each step, and what it would save in the end but for weights and optimizer states."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)  # noqa: NPY002 (likewise)
    module = Drawing(schedule, counts)
    modes = {"first": "ZDP", "second": "DP"}
    plan = plan_of(module, modes, world_size=dist.get_world_size(), micro_batch_size=BATCH_SIZE)
    named = {"filename": "{step}", "auto_insert_metric_name": False, "enable_version_counter": False}
    callbacks = [
        EarlyStopping("val_loss", patience=10),
        ModelCheckpoint(folder / "best", monitor="val_loss", save_top_k=3, save_on_train_epoch_end=False, **named),
        ModelCheckpoint(folder / "steps", every_n_train_steps=3, save_top_k=-1, **named),
        ModelCheckpoint(folder / "epochs", save_top_k=-1, save_on_train_epoch_end=True, **named),
    ]
    fit = trainer(
        OSDPStrategy(plan=plan, batch_size="keep", state_dict_type=kind, dry_run=dry_run),
        **{"max_steps": -1, "max_epochs": 2, "limit_val_batches": 2, "enable_checkpointing": True, **options},
        callbacks=callbacks,
    )
    fit.fit(module, module.loader(noise, num_workers), DataLoader(Noisy(noise), batch_size=4), ckpt_path=ckpt_path)
    end = fit._checkpoint_connector.dump_checkpoint(weights_only=False)
    return module.seen, {key: str(end[key]) for key in ("loops", "callbacks", "lr_schedulers", "global_step")}


def differing(resumed_from, **options):
    """Returns differences of runs under other seeds, resumed from checkpoints of one run, from it; and its steps."""
    folder = shared_folder()
    seen, end = run(folder, seed=1, **options)
    if dist.get_rank() == 0:
        shutil.copytree(folder, folder / "kept")
    dist.barrier()
    wrong = {}
    for index, name in enumerate(resumed_from):
        steps, resumed_end = run(folder, seed=2 + index, ckpt_path=str(folder / "kept" / name), **options)
        wrong[name] = [
            (step, expected) for step, expected in zip(steps, seen[-len(steps) :], strict=True) if step != expected
        ]
        wrong[name] += [(key, resumed_end[key], end[key]) for key in end if resumed_end[key] != end[key]]
    return wrong, len(seen)


@pytest.mark.parametrize(
    ("options", "resumed_from"),
    [
        ({"schedule": "step", "val_check_interval": 0.5}, ["steps/3.ckpt", "best/4.ckpt", "epochs/4.ckpt"]),
        slow({"schedule": "step", "counts": True}, ["steps/3.ckpt", "epochs/4.ckpt"]),
        slow({"schedule": "epoch", "num_workers": 1, "kind": "sharded"}, ["epochs/4.ckpt"]),
        slow({"schedule": "epoch", "num_workers": 1, "counts": True}, ["epochs/4.ckpt"]),
        # The loader restores what workers draw in mid-epoch.
        slow({"schedule": "epoch", "num_workers": 1, "noise": 0.0, "dry_run": True}, ["steps/3.ckpt"]),
    ],
)
def test_a_resumed_run_equals_the_uninterrupted_one(ranks, options, resumed_from):
    for wrong, num_steps in ranks(2).run(differing, resumed_from=resumed_from, **options):
        assert wrong == {name: [] for name in resumed_from}
        assert num_steps == 8
