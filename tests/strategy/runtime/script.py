"""A user's script: CPU ranks under any launcher. See --help."""

import argparse
import sys
from multiprocessing import forkserver
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from torch import nn

from lightning_osdp import OSDPStrategy, SearchSpace

STEPS, SEED = 8, 5


class Model(BoringModel):
    """Fails, if asked to, on one rank in its third step, or of memory in that of its second epoch or in a race.

    The others then wait in a collective.
    """

    def __init__(self, fail_rank, *, of_memory, races):
        super().__init__()
        self.norm = nn.BatchNorm1d(32)
        self.fail_rank, self.of_memory, self.races = fail_rank, of_memory, races

    def forward(self, x):
        return self.layer(self.norm(x))

    def training_step(self, batch, batch_idx):
        if self.races:
            if self.global_rank == self.fail_rank and self.trainer.strategy.is_racing and self.trainer.global_step == 6:
                raise torch.OutOfMemoryError("Tried to allocate 20.00 MiB.")
        elif self.global_rank == self.fail_rank and batch_idx == 2 and self.trainer.state.fn == "fit":
            if not self.of_memory:
                raise ValueError("this rank has no loss")
            if self.current_epoch == 1:
                raise torch.OutOfMemoryError("Tried to allocate 20.00 MiB.")
        self.log("seed", torch.initial_seed())
        return super().training_step(batch, batch_idx)

    def train_dataloader(self):
        return torch.utils.data.DataLoader(RandomDataset(32, 64), batch_size=4)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--strategy", default="osdp")
    how.add_argument("--start-method")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--num-nodes", type=int, default=1)
    parser.add_argument("--fail-rank", type=int)
    parser.add_argument("--num-trainers", type=int, default=1, help="that fit the model, one after the other")
    parser.add_argument("--of-memory", action="store_true")
    parser.add_argument("--memory-limit")
    parser.add_argument("--race", action="store_true")
    options = parser.parse_args()
    if options.start_method == "forkserver":
        forkserver.ensure_running()  # before the seed is known
    L.seed_everything(SEED, verbose=False)
    model = Model(options.fail_rank, of_memory=options.of_memory, races=options.race)
    start = model.layer.weight.detach().clone()
    for _ in range(options.num_trainers):
        trainer = new_trainer(options)
        trainer.fit(model)
    if not torch.distributed.is_initialized():
        report(trainer, model, start)
    sys.stdout.write(f"rank {trainer.global_rank} ended at step {trainer.global_step}\n")


def new_trainer(options):
    given = {"start_method": options.start_method, "memory_limit": options.memory_limit}
    given = {name: value for name, value in given.items() if value is not None}
    if options.race:
        given |= {"race": True, "search_space": SearchSpace(min_unit_bytes=0)}
    return L.Trainer(
        strategy=OSDPStrategy(**given) if given else options.strategy,
        accelerator="cpu",
        devices=options.devices,
        num_nodes=options.num_nodes,
        max_steps=100 if options.race else STEPS,  # as long as a race may last
        limit_val_batches=1,
        default_root_dir=options.folder,
        logger=False,
        enable_progress_bar=False,
    )


def report(trainer, model, start):
    """Writes values of the process that started workers."""
    checkpoint = torch.load(trainer.checkpoint_callback.best_model_path, weights_only=False)
    same = all(torch.equal(checkpoint["state_dict"][name], value) for name, value in model.state_dict().items())
    sys.stdout.write(f"whole weights as saved: {same}; moved: {not torch.equal(model.layer.weight, start)}\n")
    sys.stdout.write(f"planned for {trainer.strategy.plan.world_size} ranks\n")
    seed = int(trainer.callback_metrics["seed"])
    sys.stdout.write(f"{model.norm.num_batches_tracked} batches normalised, seeded with {seed}\n")


if __name__ == "__main__":
    main()
