"""Fits that have a dry run, and fits that have none."""

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_osdp import OSDPStrategy
from tests.strategy.quiet import quiet_trainer

pytestmark = pytest.mark.usefixtures("one_rank")


class ByHand(L.LightningModule):
    """Momentum shows in the second step whether another one was taken before the first."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(0)
        self.body = nn.Linear(6, 4)
        self.losses = []

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        loss = self.body(batch).square().mean()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.losses.append(float(loss))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def losses(*, dry_run):
    module = ByHand()
    trainer = quiet_trainer(
        OSDPStrategy(dry_run=dry_run),
        max_steps=3,
    )
    trainer.fit(module, DataLoader(torch.ones(12, 6), batch_size=4))
    assert trainer.strategy.plan is not None
    return module.losses[-3:]


def test_manual_optimization_has_no_dry_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert losses(dry_run=True) == losses(dry_run=False)
