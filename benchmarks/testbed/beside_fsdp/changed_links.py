"""Ranks on which a model trains while their links become slower, and again on the links as they are then."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import lightning.pytorch as pl
import torch.distributed as dist
from typing_extensions import override

from benchmarks.families import build
from benchmarks.testbed.beside_fsdp.contest import after_the_first_steps
from benchmarks.testbed.namespaces import set_own_rate
from benchmarks.testbed.training import quiet, trainer_of
from lightning_osdp import OSDPStrategy

_WAIT_S = 5e-3
"""Seconds that each all-gather comes to wait where links are not shaped."""
_MOST_STEPS, _NUM_AFTER = 200, 20
"""Steps after the change in which a race must begin, and steps after it."""


@dataclass(frozen=True)
class TakenStep:
    """Optimizer step of a fit, as rank 0 sees it."""

    seconds: float
    """Seconds from the end of the step before."""
    is_in_race: bool


def on_one_rank(
    *, model: str, room: float, rate_then_mbit: float | None, changed_at: int, num_steps: int, num_fresh_steps: int
) -> dict[str, Any]:
    """Trains under a plan that may race, changes the links, and trains anew on them; every rank runs this.

    Args:
        model: name of a family.
        room: memory limit over the peak of the fastest plan without one.
        rate_then_mbit: of links after the change, in 10^6 bit/s; None: they are not shaped, and all-gathers come to
            wait.
        changed_at: optimizer step before which links change.
        num_steps: that the fit is told that it has; it ends soon after a race that comes then.
        num_fresh_steps: of the fit on the links as they are then.

    Returns:
        Fields of each `TakenStep` from the second on, by fit; and what was noted of the plans that have won races.
    """
    with quiet(), after_the_first_steps(), ExitStack() as changes:
        usual, _ = _fit(model, None, 1, race=False)
        assert usual.plan is not None
        limit_bytes = round(room * usual.plan.peak_bytes)

        def change() -> None:
            if rate_then_mbit is None:
                changes.enter_context(_waiting())
            else:
                set_own_rate(rate_then_mbit)

        found: dict[str, Any] = {}
        changing = _Changing(changed_at, change)
        changed = _fit(model, limit_bytes, num_steps, race="auto", callbacks=[changing])
        fresh = _fit(model, limit_bytes, num_fresh_steps, race=True)
        for name, (strategy, steps) in (("changed", changed), ("fresh", fresh)):
            assert strategy.plan is not None
            found[name] = [vars(step) for step in steps]
            found[f"{name}_notes"] = [note for note in strategy.plan.notes if "won the race" in note]
        return found


def _fit(
    model: str, limit_bytes: int | None, num_steps: int, *, race: Any, callbacks: Sequence[pl.Callback] = ()
) -> tuple[OSDPStrategy, list[TakenStep]]:
    module, watch = build(model), _Watch()
    limit = None if limit_bytes is None else f"{limit_bytes}B"
    strategy = OSDPStrategy(batch_size="keep", memory_limit=limit, race=race)
    with trainer_of(strategy, num_steps=num_steps, callbacks=[watch, *callbacks]) as trainer:
        trainer.fit(module, module.loader(1, num_batches=num_steps))
    return strategy, watch.steps


class _Watch(pl.Callback):
    """Seconds of steps, and which are in a race."""

    reads_parameters = False

    def __init__(self) -> None:
        self.steps: list[TakenStep] = []
        self._end_s = 0.0

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert isinstance(trainer.strategy, OSDPStrategy)
        before_s, self._end_s = self._end_s, time.perf_counter()
        if batch_idx:
            self.steps.append(TakenStep(self._end_s - before_s, trainer.strategy.is_racing))


class _Changing(pl.Callback):
    """Change of links before a step; it ends training soon after the race that follows, or after `_MOST_STEPS`."""

    reads_parameters = False

    def __init__(self, changed_at: int, change: Callable[[], None]) -> None:
        self._changed_at, self._change = changed_at, change
        self._ends_at: int | None = None

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx == self._changed_at:
            self._change()

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        assert isinstance(trainer.strategy, OSDPStrategy)
        if batch_idx >= self._changed_at and trainer.strategy.is_racing:
            self._ends_at = batch_idx + _NUM_AFTER
        elif batch_idx == self._changed_at:
            self._ends_at = batch_idx + _MOST_STEPS
        trainer.should_stop = batch_idx == self._ends_at


@contextmanager
def _waiting() -> Iterator[None]:
    """Has every all-gather wait, within the context, before it begins."""

    def wait(gather: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        time.sleep(_WAIT_S)
        return gather(*args, **kwargs)

    with patch.object(dist, "all_gather_single", partial(wait, dist.all_gather_single)):
        yield
