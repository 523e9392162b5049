"""Memory that runs out in a step: where, and what to say of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import lightning.pytorch as pl
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import FSDPStrategy

from lightning_osdp.apply import ShardedModel
from lightning_osdp.core.text.byte_size import format_bytes
from lightning_osdp.profiler import is_out_of_memory


@dataclass(frozen=True)
class Shortage:
    """Memory ran out on a rank."""

    place: str
    """Where in a step."""
    text: str
    """What the allocator had to say."""


def shortage_of(error: BaseException, sharded: ShardedModel) -> Shortage:
    """What happened, and where the model was then."""
    text = str(error).partition("\n")[0]
    return Shortage(sharded.place_in_step() or "the optimizer step", f"{type(error).__name__}: {text}")


def explain_shortage(error: BaseException, strategy: FSDPStrategy, sharded: ShardedModel | None) -> None:
    """Appends to an error of a real step, if memory ran out: which rank, where, under which plan, and what helps."""
    plan, module = None if sharded is None else sharded.plan, strategy.lightning_module
    if not is_out_of_memory(error) or sharded is None or plan is None:
        return
    assert module is not None
    limit = format_bytes(plan.memory_limit_bytes)
    predicted = f" that is predicted to take {format_bytes(plan.peak_bytes)} of {limit}" if plan.peak_bytes else ""
    told = (
        f"OSDP: rank {strategy.global_rank} ran out of memory in {shortage_of(error, sharded).place}, under a plan"
        f"{predicted}. Pass a lower memory_limit than {limit}, so that more is sharded, or use a smaller micro-batch."
    )
    last = last_checkpoint(module.trainer)
    if last is not None:
        told += f" The last checkpoint is {last}."
    error.args = (f"{error}\n{told}", *error.args[1:])


def last_checkpoint(trainer: pl.Trainer) -> Path | None:
    """The one that this run wrote last, if any."""
    callbacks = [each for each in trainer.checkpoint_callbacks if isinstance(each, ModelCheckpoint)]
    saved = [(each._last_global_step_saved, each._last_checkpoint_saved) for each in callbacks]
    _, path = max(((step, path) for step, path in saved if path), default=(0, ""))
    return Path(path) if path else None
