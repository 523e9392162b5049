"""What a fit is profiled on, and that profiling leaves nothing of itself."""

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from lightning_osdp import Cluster, OSDPStrategy
from lightning_osdp.core.cluster import Link
from lightning_osdp.strategy.planning import plan_fit

pytestmark = pytest.mark.usefixtures("one_rank")

A_GPU = torch.device("cpu", 0)
"""Stands for one: not equal to the CPU that ranks here train on."""


class Net(L.LightningModule):
    """Two layers; `seen` has what a test notes while it trains."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 3)
        self.seen = []

    def training_step(self, batch, batch_idx):
        return self.second(self.first(batch)).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.fixture
def fit(tmp_path, monkeypatch):
    """Fits a module for two steps; links are stated."""
    link = Link(latency_s=1e-5, seconds_per_byte=1e-9)
    stated = Cluster(world_size=1, all_gather=link, reduce_scatter=link, memory_bytes=2**34)
    monkeypatch.setattr(plan_fit, "measure_cluster", lambda *_, **__: stated)

    def run(module):
        trainer = L.Trainer(
            strategy=OSDPStrategy(batch_size="keep"),
            accelerator="cpu",
            devices=1,
            max_steps=2,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tmp_path,
        )
        trainer.fit(module, DataLoader(torch.ones(8, 4), batch_size=4))
        assert trainer.global_step == 2
        return module

    return run


class TooLarge(Net):
    """Does not fit on its device whole, which Lightning has told it before."""

    was_tried = False

    def setup(self, stage):
        self._device = A_GPU

    def to(self, *args, **kwargs):
        if args and not self.was_tried:  # and not of another dtype
            self.was_tried = True
            raise torch.OutOfMemoryError("no room")
        return super().to(*args, **kwargs)

    def training_step(self, batch, batch_idx):
        self.seen.append(self.device)
        return super().training_step(batch, batch_idx)


@pytest.mark.filterwarnings("ignore:OSDP. TooLarge does not fit on one device whole")
def test_a_model_that_does_not_fit_on_its_device_keeps_to_be_told_which_that_is(fit):
    assert fit(TooLarge()).seen == [A_GPU, A_GPU]
