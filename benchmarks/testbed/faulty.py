"""A training script in which one rank fails in its third step: see `rank_faults`, which starts it.

It trains on GPUs where it sees any.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import lightning as L
import torch
from jsonargparse import auto_cli
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_osdp import OSDPStrategy

Place = Literal["setup", "training_step", "validation_step"]
Fault = Literal["raise", "kill", "stall", "stop", "index", "none"]
WIDTH, BATCH_SIZE = 16, 2


def _raise(_: torch.device) -> None:
    raise ValueError("this rank has failed")


def _read_beyond(device: torch.device) -> None:
    """On CUDA the device finds out, and tells when something else is asked of it."""
    nn.functional.embedding(torch.tensor([5], device=device), torch.zeros(2, 3, device=device))


FAULTS: dict[str, Callable[[torch.device], None]] = {
    "raise": _raise,
    "kill": lambda _: os.kill(os.getpid(), signal.SIGKILL),
    "stall": lambda _: time.sleep(3600),
    "stop": lambda _: os.kill(os.getpid(), signal.SIGSTOP),
    "index": _read_beyond,
    "none": lambda _: None,
}


class Model(L.LightningModule):
    """Two layers that train until something ends them."""

    def __init__(self, folder: Path, place: Place, fault: Fault, rank: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
        self.folder, self.place, self.fault, self.rank = folder, place, fault, rank

    def _pass(self, place: Place) -> None:
        if place == self.place and self.global_rank == self.rank and (self.global_step >= 3 or place == "setup"):
            (self.folder / "fault").touch()
            FAULTS[self.fault](self.device)

    def setup(self, stage: str) -> None:
        """Writes the process id."""
        (self.folder / f"pid-{self.global_rank}").write_text(str(os.getpid()))
        self._pass("setup")

    def training_step(self, batch: list[Tensor]) -> Tensor:
        """Autoencoding, at a leisurely pace."""
        time.sleep(0.01)
        self._pass("training_step")
        return nn.functional.mse_loss(self.layers(batch[0]), batch[0])

    def validation_step(self, batch: list[Tensor]) -> None:
        """Runs the layers, after the fault if it is one of validation."""
        self._pass("validation_step")
        self.layers(batch[0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Makes an optimizer whose step is too short to matter."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def train_dataloader(self) -> DataLoader[Any]:
        """Makes a loader of forty batches."""
        return DataLoader(TensorDataset(torch.randn(80, WIDTH)), batch_size=BATCH_SIZE)

    val_dataloader = train_dataloader


def main(
    folder: Path,
    *,
    plan: Path | None = None,
    method: Literal["popen", "spawn"] = "popen",
    ranks: int = 2,
    place: Place = "training_step",
    fault: Fault = "none",
    rank: int = 1,
    timeout_s: float = 1800.0,
    max_steps: int = -1,
) -> None:
    """Trains.

    Args:
        folder: Of process ids and of the file that appears when the rank fails.
        plan: File of a plan.
        method: How ranks are started.
        ranks: How many.
        place: Where the rank fails.
        fault: What it does there.
        rank: Which one.
        timeout_s: Of the process group.
        max_steps: -1: trains on for ever.
    """
    torch.set_num_threads(1)
    trainer = L.Trainer(
        strategy=OSDPStrategy(plan=plan, start_method=method, timeout=timedelta(seconds=timeout_s)),
        accelerator="auto",
        devices=ranks,
        max_steps=max_steps,
        max_epochs=-1,
        num_sanity_val_steps=0,
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model(folder, place, fault, rank))


if __name__ == "__main__":
    auto_cli(main)
