"""Kills ranks with SIGKILL at seeded moments, inside saving too, and resumes: `python benchmarks/faults.py --count 20`.

Two ranks save after every epoch, as one file or as shards. In every run one of them is killed, and the next run goes on
from ``ckpt_path="last"``: it must be the newest checkpoint that was complete, and training on must give the losses of a
run that nobody killed.
"""

import argparse
import os
import random
import signal
import socket
import sys
import tempfile
import threading
from multiprocessing import get_context
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning_utilities.core.rank_zero import rank_zero_only
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_osdp import OSDPStrategy

WORLD_SIZE, WIDTH, BATCHES = 2, 128, 2
KINDS = ("full", "sharded")
MOMENTS = ("file", "save", "step")
"""Moments at which a rank is killed: a change of the checkpoint's folder, some time into saving, or into training."""
FILE_EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir")


class Model(L.LightningModule):
    """Three layers whose every epoch is the same two batches; notes where it starts and the loss of every step."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH))
        self.folder = folder

    def training_step(self, batch: list[Tensor]) -> Tensor:
        """Computes the loss of an autoencoder."""
        return nn.functional.mse_loss(self.layers(batch[0]), batch[0])

    def on_train_start(self) -> None:
        """Writes the step to go on from."""
        note(self.folder / "started", str(self.trainer.global_step))

    def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
        """Writes step and loss."""
        note(self.folder / "losses", f"{self.trainer.global_step} {float(outputs['loss']):.9g}")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Makes Adam, which has two moments to lose."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)

    def train_dataloader(self) -> DataLoader[Any]:
        """Makes a loader that does not shuffle."""
        data = TensorDataset(torch.randn(4 * WORLD_SIZE * BATCHES, WIDTH, generator=torch.Generator().manual_seed(1)))
        sampler: DistributedSampler[Any] = DistributedSampler(data, WORLD_SIZE, dist.get_rank(), shuffle=False)
        return DataLoader(data, batch_size=4, sampler=sampler)


class Saves(ModelCheckpoint):
    """Saves every epoch, and notes the step of each ``last.ckpt`` that is complete."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / "checkpoints", save_last=True, save_on_train_epoch_end=True)
        self.path = folder / "saved"

    def _save_checkpoint(self, trainer: L.Trainer, filepath: str) -> None:
        super()._save_checkpoint(trainer, filepath)
        if Path(filepath).stem == self.CHECKPOINT_NAME_LAST:
            note(self.path, str(trainer.global_step))


class Killer(L.Callback):
    """Kills this process at a seeded moment within its first three epochs."""

    def __init__(self, moment: str, seed: int, folder: Path) -> None:
        self.moment, self.folder, self.seeded = moment, folder, random.Random(seed)
        self.epochs_left, self.num_events = self.seeded.randint(1, 3), self.seeded.randint(0, 12)

    def on_train_epoch_start(self, *_: Any) -> None:
        """Counts epochs down to the kill."""
        self.epochs_left -= 1
        if self.moment == "step" and self.epochs_left == 0:
            self._kill_soon()

    def on_save_checkpoint(self, *_: Any) -> None:
        """Arms the kill as saving begins, where the epoch has come."""
        if self.epochs_left > 0:
            return
        if self.moment == "file":
            sys.addaudithook(self._count)
        else:
            self._kill_soon()

    def _kill_soon(self) -> None:
        delay_s = self.seeded.choice([0.0, 0.003, 0.01, 0.03]) * self.seeded.random()
        threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGKILL)).start()

    def _count(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in FILE_EVENTS and (isinstance(arguments[0], int) or str(self.folder) in str(arguments[0])):
            self.num_events -= 1
            if self.num_events < 0:
                os.kill(os.getpid(), signal.SIGKILL)


@rank_zero_only
def note(path: Path, line: str) -> None:
    """Appends a line, in one write."""
    with path.open("a") as file:
        file.write(f"{line}\n")


def train(rank: int, port: int, folder: Path, num_epochs: int, *, kind: str, kill: tuple[str, int] | None) -> None:
    """Trains one rank; the checkpoints of the run before are in the folder."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(WORLD_SIZE), GROUP_RANK="0")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), LOCAL_WORLD_SIZE=str(WORLD_SIZE))
    os.environ.update(TORCHELASTIC_RUN_ID="faults", GLOO_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    callbacks: list[L.Callback] = [Saves(folder)]
    if kill is not None:
        callbacks.append(Killer(*kill, folder / "checkpoints"))
    plan = folder / "osdp_plan.json"
    trainer = L.Trainer(
        strategy=OSDPStrategy(plan=plan if plan.exists() else None, state_dict_type=kind),
        accelerator="cpu",
        devices=WORLD_SIZE,
        max_epochs=num_epochs,
        callbacks=callbacks,
        default_root_dir=folder,
        use_distributed_sampler=False,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model(folder), ckpt_path="last", weights_only=False)


def run(folder: Path, num_epochs: int, kind: str, kill: tuple[int, str, int] | None) -> list[int | None]:
    """Exit codes of the ranks; after a kill, the others are given a second, as a launcher would."""
    context = get_context("forkserver")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = []
    for rank in range(WORLD_SIZE):
        own = None if kill is None or kill[0] != rank else kill[1:]
        options = {"kind": kind, "kill": own}
        processes.append(context.Process(target=train, args=(rank, port, folder, num_epochs), kwargs=options))
        processes[-1].start()
    wait([process.sentinel for process in processes])
    for process in processes:
        process.join(None if kill is None else 1)
        process.kill()
        process.join()
    return [process.exitcode for process in processes]


def lines(path: Path) -> list[str]:
    """Lines of a file that may not be there yet."""
    return path.read_text().splitlines() if path.exists() else []


def wrong_in(folder: Path, before: dict[str, int], expected: dict[str, str], *, is_last: bool) -> str:
    """Description of what is wrong with a run; the empty string if nothing is.

    Args:
        folder: of the runs.
        before: number of lines in each file before this one.
        expected: loss of each step.
        is_last: whether nobody was killed.
    """
    started = lines(folder / "started")[before["started"] :]
    saved = lines(folder / "saved")[: before["saved"]]
    newest = int(saved[-1]) if saved else 0
    if len(started) != 1 or not newest <= int(started[0]) <= newest + BATCHES:
        return f"started at steps {started}, but {newest} was complete"
    new = dict(line.split() for line in lines(folder / "losses")[before["losses"] :])
    if any(abs(float(loss) - float(expected[step])) > 1e-6 * float(expected[step]) for step, loss in new.items()):
        return f"has other losses: {new}"
    whole = [step for step in expected if int(step) > int(started[0])]
    return "did not train to the end" if is_last and list(new) != whole else ""


def main() -> int:
    """The exit code is the number of runs in which nobody was killed, or that did not resume as they should."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    get_context("forkserver").set_forkserver_preload(["lightning", "lightning_osdp"])
    seeded, num_epochs, failed, killed = random.Random(options.seed), 6 * options.count + 3, 0, 0
    with tempfile.TemporaryDirectory() as name:
        whole, folder = Path(name) / "whole", Path(name) / "killed"
        folder.mkdir()
        run(whole, num_epochs, "full", None)
        (whole / "osdp_plan.json").rename(folder / "osdp_plan.json")
        expected = dict(line.split() for line in lines(whole / "losses"))
        for index in range(options.count + 1):
            is_last = index == options.count
            before = {file: len(lines(folder / file)) for file in ("started", "saved", "losses")}
            kind, moment = seeded.choice(KINDS), MOMENTS[index % len(MOMENTS)]
            # Only rank 0 writes one file.
            victim = 0 if (moment, kind) == ("file", "full") else seeded.randrange(WORLD_SIZE)
            codes = run(folder, num_epochs, kind, None if is_last else (victim, moment, options.seed + index))
            wrong = wrong_in(folder, before, expected, is_last=is_last)
            killed += not is_last and codes[victim] == -signal.SIGKILL
            failed += bool(wrong)
            what = "to the end" if is_last else f"{moment}, {kind}, rank {victim} killed"
            start = " ".join(lines(folder / "started")[before["started"] :])
            sys.stdout.write(f"run {index}: from step {start}, {what}; exit codes {codes}; {wrong or 'as it should'}\n")
            sys.stdout.flush()
    sys.stdout.write(
        f"{killed} ranks killed, {options.count + 1 - failed} of {options.count + 1} runs as they should\n"
    )
    missed: int = options.count - killed
    return failed + missed


if __name__ == "__main__":
    sys.exit(main())
