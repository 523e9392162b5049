"""Resources that a process holds while it trains: memory, open files, threads, processes; read from Linux's /proc."""

from __future__ import annotations

import gc
import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import median
from typing import Any

import lightning.pytorch as pl
from rich.progress import Progress
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.nn.parameter import is_lazy
from typing_extensions import override

NUM_SAMPLES = 240
"""Samples of each rank, over the whole time."""
WARM_UP, PART = 0.2, 0.2
"""Fractions of the samples: the first is not judged, the second is compared at both ends of the rest."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Resources that one rank held at one moment between two steps."""

    seconds: float
    """Seconds since training began."""
    step: int
    resident_bytes: int
    """Memory of the process that the kernel has given and not got back."""
    tensor_bytes: int
    """Storages of all tensors that Python knows of, each once."""
    num_open_files: int
    num_threads: int
    num_processes: int
    """Number of children of this process."""
    num_checkpoints: int
    """Number of files and folders among the checkpoints."""


HELD = tuple(field.name for field in fields(Sample) if field.name not in {"seconds", "step"})


def sample(seconds: float, step: int, checkpoints: Sequence[Path]) -> Sample:
    """Reads this process."""
    process = Path("/proc/self")
    threads = list((process / "task").iterdir())
    return Sample(
        seconds=round(seconds, 3),
        step=step,
        resident_bytes=int((process / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE"),
        tensor_bytes=_tensor_bytes(),
        num_open_files=_num_entries(process / "fd"),
        num_threads=len(threads),
        num_processes=sum(len((thread / "children").read_text().split()) for thread in threads),
        num_checkpoints=sum(_num_entries(folder) for folder in checkpoints if folder.exists()),
    )


def _num_entries(folder: Path) -> int:
    return sum(1 for _ in folder.iterdir())


def _tensor_bytes() -> int:
    sizes = {}
    for found in gc.get_objects():
        # The class is asked, for instances may answer with a warning.
        if (
            issubclass(type(found), Tensor)
            and type(found) is not FakeTensor
            and not (found.is_sparse or is_lazy(found))
        ):
            storage = found.untyped_storage()
            sizes[storage._cdata] = storage.nbytes()
    return sum(sizes.values())


class Sampler(pl.Callback):
    """Takes a sample between two steps whenever the time has come, and writes it at once.

    Args:
        folder: of the files of all ranks; rank 0's is used.
        checkpoints: names of folders in it that are looked at.
        seconds: that training will take.
    """

    reads_parameters = False

    def __init__(self, folder: Path, checkpoints: Sequence[str], seconds: float) -> None:
        self._folder, self._checkpoints, self._seconds = folder, checkpoints, seconds
        self._start_s = self._last_s = 0.0
        self._progress = Progress(auto_refresh=False)  # no thread of its own
        self._task = self._progress.add_task("training", total=seconds)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._folder = trainer.strategy.broadcast(self._folder)
        self._start_s = self._last_s = time.monotonic()
        if trainer.is_global_zero:
            self._progress.start()

    @override
    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        now_s = time.monotonic()
        if now_s - self._last_s < self._seconds / NUM_SAMPLES:
            return
        self._last_s = now_s
        folders = [self._folder / name for name in self._checkpoints]
        taken = sample(now_s - self._start_s, trainer.global_step, folders)
        with _file(self._folder, trainer.global_rank).open("a") as file:
            file.write(json.dumps(asdict(taken)) + "\n")
        line = f"step {taken.step}, {taken.resident_bytes / 1e6:.0f} MB"
        self._progress.update(self._task, completed=taken.seconds, description=line)
        if trainer.is_global_zero:
            self._progress.refresh()

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._progress.stop()

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._progress.stop()


def read(folder: Path, num_ranks: int) -> list[list[Sample]]:
    """Samples of each rank, as `Sampler` has written them."""
    texts = [_file(folder, rank).read_text() for rank in range(num_ranks)]
    return [[Sample(**json.loads(line)) for line in text.splitlines()] for text in texts]


def _file(folder: Path, rank: int) -> Path:
    return folder / f"samples-{rank}.jsonl"


@dataclass(frozen=True, kw_only=True)
class Growth:
    """The median of a quantity at the beginning, after the warm-up, and at the end."""

    first: float
    last: float

    @property
    def ratio(self) -> float:
        """Growth as a fraction of the beginning; infinite from nothing."""
        if self.first == self.last:
            return 0.0
        return self.last / self.first - 1 if self.first else float("inf")


def growth(samples: Sequence[Sample], quantity: str) -> Growth:
    """Growth of a quantity from the second fifth of the samples to the last.

    Samples are counted, not seconds: a machine that stood still for a while has taken none.

    Args:
        samples: of one rank, in the order of time.
        quantity: one of `HELD`.

    Raises:
        ValueError: there are too few samples.
    """

    def middle(begin: float, end: float) -> float:
        found = samples[round(begin * len(samples)) : round(end * len(samples))]
        if not found:
            raise ValueError(f"Expected samples in each fifth, got {len(samples)} in all. Train longer.")
        return float(median(getattr(taken, quantity) for taken in found))

    return Growth(first=middle(WARM_UP, WARM_UP + PART), last=middle(1 - PART, 1))
