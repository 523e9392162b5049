"""Batches of many lengths: a plan that changes for long ones, beside the plan that is made for the longest."""

from __future__ import annotations

import random
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
from benchmarks.measures.beside_fsdp.cases import Lengths
from benchmarks.measures.beside_fsdp.contest import BEYOND_LIMIT
from benchmarks.measures.section import Row, Section, Target
from benchmarks.testbed.local import local_ranks
from benchmarks.testbed.training import quiet, trainer_of
from examples.mingpt.model import GPTConfig
from lightning_osdp import OSDPStrategy, PlanMonitor
from lightning_osdp.callbacks.peak import callbacks_of
from lightning_osdp.core.text.byte_size import format_bytes
from lightning_osdp.core.text.duration import format_seconds
from lightning_osdp.strategy.longer_batches import LongerBatches

MOST_LOST, LEAST_GAINED = 1.03, 1.1
"""Seconds of all steps over those under the plan for the longest; and seconds of a short step there over those here."""
MOST_APART = 1e-5
"""Distance of the last loss from that under the plan for the longest."""
_WARM_UP = 3
"""First steps, which are not timed."""
_SAMPLES = 2


@dataclass(frozen=True, kw_only=True)
class Case:
    """Order of the lengths of a fit's batches."""

    order: str
    """``growing``: each length as often, the shortest first. ``mixed``: at random, others on each rank."""
    lengths: tuple[int, ...]
    num_layers: int
    num_steps: int
    num_ranks: int
    room: float
    num_rounds: int


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
        self.num_changes, self._plan, self.loss = 0, None, 0.0
        self.learned_s = 0.0

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.ends_s.append(time.perf_counter())
        plan: Any = getattr(trainer.strategy, "plan", None)
        self.num_changes += self._plan not in (None, plan)
        self._plan = plan
        self.loss = float(outputs["loss"])
        self.learned_s = sum(each.learned_s for each in callbacks_of(trainer, LongerBatches))

    def peak_bytes(self, trainer: pl.Trainer) -> int:
        """Peak of live bytes among counted steps, of which the first with longer batches than before are some."""
        (monitor,) = callbacks_of(trainer, PlanMonitor)
        return monitor._peak.peak_bytes or 0


def lengths_of(case: Case, rank: int) -> list[int]:
    """Lengths of a rank's batches, the shortest first in any order."""
    first, number = [min(case.lengths)] * _WARM_UP, case.num_steps - _WARM_UP
    if case.order == "growing":
        return first + [case.lengths[step * len(case.lengths) // number] for step in range(number)]
    return first + random.Random(rank).choices(case.lengths, k=number)


def on_one_rank(case: Case) -> dict[str, Any]:
    """Fits in turns under a plan that changes and under that for the longest; every rank runs this.

    Returns:
        The limit, and by way the seconds of each step of each round, of which some wait for new plans, and the number
        of changes of the plan.
    """
    lengths, longest = lengths_of(case, dist.get_rank()), max(case.lengths)

    def fit(
        given: Sequence[int], limit_bytes: int | None = None, *, for_longest: bool = False
    ) -> tuple[pl.Trainer, Watch]:
        torch.manual_seed(0)
        module = Varying(given, longest=longest, num_layers=case.num_layers)
        planned_for = module.batch_of(longest) if for_longest else None
        strategy, watch = OSDPStrategy(batch_size="keep", memory_limit=limit_bytes, profile_batch=planned_for), Watch()
        with quiet(), trainer_of(strategy, num_steps=len(given), callbacks=[watch]) as trainer:
            trainer.fit(module)
        return trainer, watch

    for_longest: Any = fit([longest], for_longest=True)[0].strategy
    limit_bytes = round(case.room * for_longest.plan.all_zdp_peak_bytes)
    found: dict[str, Any] = {"limit_bytes": limit_bytes}
    for _ in range(case.num_rounds):
        for way, is_longest in (("changing", False), ("longest", True)):
            trainer, watch = fit(lengths, limit_bytes, for_longest=is_longest)
            seconds = torch.tensor(watch.ends_s, dtype=torch.float64).diff()[_WARM_UP - 1 :].tolist()
            fields = {"steps_s": seconds, "num_changes": watch.num_changes, "loss": watch.loss}
            fields |= {"learned_s": watch.learned_s}
            found.setdefault(way, []).append({**fields, "peak_bytes": watch.peak_bytes(trainer)})
    return found


def section(name: str, asked: Lengths, *, num_rounds: int) -> Section:
    """Section of all orders."""
    cases = [Case(order=order, **vars(asked), num_rounds=num_rounds) for order in ("growing", "mixed")]
    return Section(name=name, cases=cases, measure=measure, table=table, targets=targets)


def measure(case: Case) -> dict[str, Any]:
    """Seconds by way, of the faster round: of all steps, and the median of those with short batches on all ranks."""
    found = local_ranks(case.num_ranks).run(on_one_rank, case=case)[0]
    of_ranks = zip(*(lengths_of(case, rank)[_WARM_UP:] for rank in range(case.num_ranks)), strict=True)
    are_short = [max(lengths) == min(case.lengths) for lengths in of_ranks]

    def of_way(rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        best = dict(min(rounds, key=lambda each: sum(each["steps_s"])))
        seconds = best.pop("steps_s")
        short = [each for each, is_short in zip(seconds, are_short, strict=True) if is_short]
        return {"total_s": sum(seconds), "short_s": median(short), **best}

    ways = {way: of_way(found[way]) for way in ("changing", "longest")}
    return {"limit_bytes": found["limit_bytes"], **ways}


def table(rows: Sequence[Row]) -> Table:
    """Table with a row for each order and way."""
    drawn = Table("order", "plan", title="Batches of many lengths")
    for column in ("limit", "peak counted", "all steps", "finding plans", "a short step", "changes", "last loss"):
        drawn.add_column(column, justify="right")
    for row in rows:
        for way in ("changing", "longest"):
            own = row[way]
            seconds = (format_seconds(own[name]) for name in ("total_s", "learned_s", "short_s"))
            sizes = (format_bytes(row["limit_bytes"]), format_bytes(own["peak_bytes"]))
            drawn.add_row(row["case"]["order"], way, *sizes, *seconds, str(own["num_changes"]), f"{own['loss']:.4f}")
    return drawn


def targets(rows: Sequence[Row]) -> list[Target]:
    """Targets of short steps, of memory and losses in any order, and of all steps where lengths are mixed."""
    found = []
    for row in rows:
        changing, longest = row["changing"], row["longest"]
        used, apart = changing["peak_bytes"] / row["limit_bytes"], abs(changing["loss"] - longest["loss"])
        order = f"{row['case']['order']} lengths"
        found.append(Target(name=f"{order}, bytes of the limit", limit=BEYOND_LIMIT, measured=used))
        found.append(Target(name=f"{order}, losses apart", limit=MOST_APART, measured=apart))
        if row["case"]["order"] == "mixed":
            lost = changing["total_s"] / longest["total_s"]
            found.append(Target(name=f"{order}, seconds over the longest's plan", limit=MOST_LOST, measured=lost))
        gained = longest["short_s"] / changing["short_s"]
        name = f"{order}, a short step under the longest's plan over one here"
        found.append(Target(name=name, limit=LEAST_GAINED, measured=gained, is_least=True))
    return found
