"""Batches of many lengths: a plan that changes for long ones, beside the plan that is made for the longest."""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from rich.table import Table
from torch.utils.data import DataLoader
from typing_extensions import override

from benchmarks.families.base import Batch
from benchmarks.families.text import MinGPT
from benchmarks.measures.section import Row, Section, Target
from benchmarks.testbed.local import local_ranks
from benchmarks.testbed.training import StartedRanks, quiet
from examples.mingpt.model import GPTConfig
from lightning_osdp import OSDPStrategy
from lightning_osdp.core.text.byte_size import format_bytes
from lightning_osdp.core.text.duration import format_seconds

MOST_LOST, LEAST_GAINED = 1.03, 1.1
"""Seconds of all steps over those under the plan for the longest; and seconds of a short step there over those here."""
_WARM_UP = 3
"""First steps, which are not timed."""
_SAMPLES = 2


@dataclass(frozen=True)
class Case:
    """Order of the lengths of a fit's batches."""

    order: str
    """``growing``: each length as often, the shortest first. ``mixed``: at random, others on each rank."""
    lengths: tuple[int, ...]
    num_layers: int
    num_steps: int
    num_rounds: int
    num_ranks: int = 2
    room: float = 1.05
    """Memory limit over the peak of the fastest plan for the shortest batches."""


_ORDERS = ("growing", "mixed")
CASES = tuple(Case(order, (64, 128, 256, 512), num_layers=12, num_steps=120, num_rounds=2) for order in _ORDERS)
QUICK_CASES = tuple(Case(order, (8, 128), num_layers=4, num_steps=12, num_rounds=1, room=1.3) for order in _ORDERS)


class Varying(MinGPT):
    """A GPT on batches of these lengths."""

    def __init__(self, lengths: Sequence[int], *, longest: int, num_layers: int) -> None:
        self.config = GPTConfig(
            vocabulary_size=512, sequence_length=longest, num_layers=num_layers, num_heads=4, hidden_size=128
        )
        super().__init__()
        self.lengths = lengths

    def batch_of(self, length: int) -> Batch:
        """Batch of this length."""
        inputs, targets = self.batch(_SAMPLES)
        return inputs[:, :length].contiguous(), targets[:, :length].contiguous()

    def train_dataloader(self) -> DataLoader[Batch]:
        """Loader of all batches."""
        return DataLoader([self.batch_of(length) for length in self.lengths], batch_size=None)  # type: ignore[arg-type]


class Watch(pl.Callback):
    """Seconds from the end of each step to that of the next, with whatever is done for a change of the plan."""

    reads_parameters = False

    def __init__(self) -> None:
        self.ends_s: list[float] = []
        self.num_changes, self._plan = 0, None

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.ends_s.append(time.perf_counter())
        plan: Any = getattr(trainer.strategy, "plan", None)
        self.num_changes += self._plan not in (None, plan)
        self._plan = plan


def lengths_of(case: Case, rank: int) -> list[int]:
    """Lengths of a rank's batches, the shortest first in any order."""
    first, number = [min(case.lengths)] * _WARM_UP, case.num_steps - _WARM_UP
    if case.order == "growing":
        return first + [case.lengths[step * len(case.lengths) // number] for step in range(number)]
    return first + random.Random(rank).choices(case.lengths, k=number)


def on_one_rank(case: Case) -> dict[str, Any]:
    """Fits in turns under a plan that changes and under that for the longest; every rank runs this.

    Returns:
        The limit, and by way the seconds of each step of each round, and the number of changes of the plan.
    """
    lengths, longest = lengths_of(case, dist.get_rank()), max(case.lengths)

    def fit(
        given: Sequence[int], limit_bytes: int | None = None, *, for_longest: bool = False
    ) -> tuple[OSDPStrategy, Watch]:
        module = Varying(given, longest=longest, num_layers=case.num_layers)
        planned_for = module.batch_of(longest) if for_longest else None
        strategy, watch = OSDPStrategy(batch_size="keep", memory_limit=limit_bytes, profile_batch=planned_for), Watch()
        with tempfile.TemporaryDirectory() as folder, quiet():
            pl.Trainer(
                strategy=strategy,
                default_root_dir=folder,
                accelerator="cpu",
                devices=case.num_ranks,
                plugins=[StartedRanks()],
                max_steps=len(given),
                callbacks=[watch],
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
                enable_model_summary=False,
                use_distributed_sampler=False,
            ).fit(module)
        return strategy, watch

    usual, _ = fit(lengths[:1])
    assert usual.plan is not None
    limit_bytes = round(case.room * usual.plan.peak_bytes)
    found: dict[str, Any] = {"limit_bytes": limit_bytes}
    for _ in range(case.num_rounds):
        for way, is_longest in (("changing", False), ("longest", True)):
            _, watch = fit(lengths, limit_bytes, for_longest=is_longest)
            seconds = torch.tensor(watch.ends_s).diff()[_WARM_UP - 1 :].tolist()
            found.setdefault(way, []).append({"steps_s": seconds, "num_changes": watch.num_changes})
    return found


def section(cases: Sequence[Case]) -> Section:
    """All orders."""
    return Section(name="lengths", cases=cases, measure=measure, table=table, targets=targets)


def measure(case: Case) -> dict[str, Any]:
    """Seconds by way: of all steps, and the median of those in which all ranks have the shortest batches."""
    found = local_ranks(case.num_ranks).run(on_one_rank, case=case)[0]
    of_ranks = zip(*(lengths_of(case, rank)[_WARM_UP:] for rank in range(case.num_ranks)), strict=True)
    are_short = [max(lengths) == min(case.lengths) for lengths in of_ranks]

    def of_way(rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        best = min(rounds, key=lambda each: sum(each["steps_s"]))
        short = [seconds for seconds, is_short in zip(best["steps_s"], are_short, strict=True) if is_short]
        return {"total_s": sum(best["steps_s"]), "short_s": median(short), "num_changes": best["num_changes"]}

    ways = {way: of_way(found[way]) for way in ("changing", "longest")}
    return {"limit_bytes": found["limit_bytes"], **ways}


def table(rows: Sequence[Row]) -> Table:
    """Table with a row for each order and way."""
    drawn = Table("order", "plan", title="Batches of many lengths")
    for column in ("limit", "all steps", "a short step", "changes"):
        drawn.add_column(column, justify="right")
    for row in rows:
        for way in ("changing", "longest"):
            own = row[way]
            seconds = (format_seconds(own["total_s"]), format_seconds(own["short_s"]))
            limit = format_bytes(row["limit_bytes"])
            drawn.add_row(row["case"]["order"], way, limit, *seconds, str(own["num_changes"]))
    return drawn


def targets(rows: Sequence[Row]) -> list[Target]:
    """Targets of mixed lengths."""
    found = []
    for row in rows:
        changing, longest = row["changing"], row["longest"]
        if row["case"]["order"] == "mixed":
            lost = changing["total_s"] / longest["total_s"]
            found.append(Target(name="mixed lengths, seconds over the longest's plan", limit=MOST_LOST, measured=lost))
        gained = longest["short_s"] / changing["short_s"]
        name = f"{row['case']['order']} lengths, a short step under the longest's plan over one here"
        found.append(Target(name=name, limit=LEAST_GAINED, measured=gained, is_least=True))
    return found
