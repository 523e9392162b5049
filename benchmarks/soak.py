"""Trains on four CPU ranks for an hour, with validation and checkpoints, and tells whether anything grows.

.. code-block:: bash

    python benchmarks/soak.py --minutes 10

What is held is compared between the second and the last fifth of the samples, by the median: the first fifth is
warm-up.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import fields
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from jsonargparse import auto_cli
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from rich.table import Table
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

# run as a script, Python looks for modules beside this file only
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.families.base import Batch
from benchmarks.families.text import MinGPT
from benchmarks.measures.leaks import HELD, Growth, Sample, Sampler, growth, read
from benchmarks.measures.section import RESULTS, machine, wide_console
from examples.mingpt.model import GPTConfig
from lightning_osdp import OSDPStrategy

NUM_RANKS = 4
KINDS = ("full", "sharded")
MEMORY_LIMIT = "2.1MB"
"""Limit under which some units are kept, and some are not."""
MEMORY = ("resident_bytes", "tensor_bytes")
LARGEST_GROWTH = 0.01
"""Fraction by which memory may grow; nothing else may grow at all."""


class Model(MinGPT):
    """A small GPT on random tokens; every validation has a loader's worker of its own."""

    config = GPTConfig(vocabulary_size=256, sequence_length=32, num_layers=2, num_heads=2, hidden_size=64)
    micro_batch_size = 4

    @override
    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        """Logs the loss."""
        self.log("val_loss", self.loss(batch), sync_dist=True)

    def _loader(self, num_batches: int, seed: int, **kwargs: Any) -> DataLoader[Any]:
        batch = self.batch(self.micro_batch_size * num_batches * self.trainer.world_size, seed=seed)
        return DataLoader(TensorDataset(*batch), batch_size=self.micro_batch_size, **kwargs)

    def train_dataloader(self) -> DataLoader[Any]:
        """Makes a loader that shuffles."""
        return self._loader(20, seed=1, shuffle=True)

    def val_dataloader(self) -> DataLoader[Any]:
        """Makes a loader with a worker process that ends with the validation."""
        return self._loader(4, seed=2, num_workers=1)


class Saves(ModelCheckpoint):
    """Keeps the best two and the last checkpoint, all of one kind, whatever the strategy's own is."""

    def __init__(self, folder: Path, kind: str) -> None:
        # A checkpoint tells the states of two callbacks apart by what they monitor.
        monitor = "val_loss" if kind == KINDS[0] else "loss_epoch"
        super().__init__(folder / kind, monitor=monitor, save_top_k=2, save_last=True)
        self._kind = kind

    @override
    def _save_checkpoint(self, trainer: pl.Trainer, filepath: str) -> None:
        strategy: Any = trainer.strategy
        strategy._state_dict_type = self._kind
        super()._save_checkpoint(trainer, filepath)


def train(folder: Path, seconds: float) -> bool:
    """Trains on ranks that write their samples into rank 0's folder; returns whether this is rank 0."""
    torch.set_num_threads(1)
    trainer = pl.Trainer(
        strategy=OSDPStrategy(memory_limit=MEMORY_LIMIT, batch_size="keep"),
        accelerator="cpu",
        devices=NUM_RANKS,
        max_epochs=-1,
        max_time=timedelta(seconds=seconds),
        callbacks=[Sampler(folder, KINDS, seconds), *(Saves(folder, kind) for kind in KINDS)],
        default_root_dir=folder,
        logger=CSVLogger(folder),
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model())
    return trainer.is_global_zero


def found_in(folder: Path, minutes: float) -> dict[str, Any]:
    """Results of a run, as JSON can write them."""
    return {
        "date": datetime.now(tz=timezone.utc).date().isoformat(),
        "machine": f"{machine()}, torch {torch.__version__}",
        "minutes": minutes,
        "ranks": [in_columns(samples) for samples in read(folder, NUM_RANKS)],
    }


def in_columns(samples: Sequence[Sample]) -> dict[str, list[float]]:
    """Samples of one rank in columns, as a file has them."""
    return {field.name: [getattr(sample, field.name) for sample in samples] for field in fields(Sample)}


def growths(result: dict[str, Any]) -> list[dict[str, Growth]]:
    """Growths by rank, and by what is held."""
    ranks = [
        [Sample(**dict(zip(columns, values, strict=True))) for values in zip(*columns.values(), strict=True)]
        for columns in result["ranks"]
    ]
    return [{quantity: growth(samples, quantity) for quantity in HELD} for samples in ranks]


def is_flat(quantity: str, found: Growth) -> bool:
    """Tells if a quantity stays, but for `LARGEST_GROWTH` where the quantity is memory."""
    return found.ratio <= (LARGEST_GROWTH if quantity in MEMORY else 0.0)


def table(result: dict[str, Any]) -> Table:
    """Table with a row for each rank and quantity."""
    last = {name: values[-1] for name, values in result["ranks"][0].items()}
    title = f"{len(result['ranks'])} ranks, {last['seconds'] / 60:.3g} minutes, {last['step']} steps ({result['date']})"
    table = Table(title=title)
    for name in ("rank", "held", "second fifth", "last fifth", "growth", "flat"):
        table.add_column(name, justify="left" if name == "held" else "right")
    for rank, quantities in enumerate(growths(result)):
        for quantity, found in quantities.items():
            unit = (1e6, " MB") if quantity in MEMORY else (1.0, "")
            ends = [f"{value / unit[0]:.6g}{unit[1]}" for value in (found.first, found.last)]
            verdict = "yes" if is_flat(quantity, found) else "NO"
            table.add_row(str(rank), quantity, *ends, f"{100 * found.ratio:+.2f}%", verdict)
    return table


def main(
    minutes: float = 60.0, output: Path = RESULTS / "soak.json", picture: Path | None = None, draw_only: bool = False
) -> None:
    """Trains, prints what grew, writes JSON and draws a picture; ends with 1 where something grew.

    Args:
        minutes: To train, planning not counted.
        output: JSON file.
        picture: SVG to draw, which needs matplotlib; null for none.
        draw_only: Whether to take what the file has instead of training.
    """
    if not draw_only:
        with tempfile.TemporaryDirectory() as name:
            if not train(Path(name), 60 * minutes):
                return
            output.write_text(as_text(found_in(Path(name), minutes)))
    result = json.loads(output.read_text())
    wide_console().print(table(result))
    if picture is not None:
        from benchmarks.pictures.soak import draw

        draw(result["ranks"], picture)
    found = [is_flat(quantity, grown) for rank in growths(result) for quantity, grown in rank.items()]
    sys.exit(not all(found))


def as_text(result: dict[str, Any]) -> str:
    """JSON with one line per rank."""
    ranks = ",\n".join(json.dumps(columns, separators=(",", ":")) for columns in result["ranks"])
    head = "".join(f"{json.dumps(key)}: {json.dumps(value)},\n" for key, value in result.items() if key != "ranks")
    return f'{{\n{head}"ranks": [\n{ranks}\n]\n}}\n'


if __name__ == "__main__":
    auto_cli(main)
