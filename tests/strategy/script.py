"""A user's script: two CPU ranks by Lightning's own launcher. Usage: script.py FOLDER"""

import sys

import lightning as L
import torch
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset

import lightning_osdp  # noqa: F401 (registers "osdp")


class Model(BoringModel):
    def train_dataloader(self):
        return torch.utils.data.DataLoader(RandomDataset(32, 64), batch_size=4)


if __name__ == "__main__":
    trainer = L.Trainer(
        strategy="osdp",
        accelerator="cpu",
        devices=2,
        max_steps=8,
        limit_val_batches=1,
        default_root_dir=sys.argv[1],
        logger=False,
        enable_progress_bar=False,
    )
    trainer.fit(Model())
    sys.stdout.write(f"rank {trainer.global_rank} ended at step {trainer.global_step}\n")
