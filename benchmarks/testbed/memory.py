"""Peak of live bytes in each phase of one optimizer step, counted while Lightning's Trainer takes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, NamedTuple
from unittest.mock import patch

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.strategies import ParallelStrategy
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from benchmarks.families import Family
from benchmarks.testbed.training import quiet, train
from lightning_osdp.apply.internals import in_flight
from lightning_osdp.callbacks.peak import living_tensors
from lightning_osdp.core.plans.plan import Plan
from lightning_osdp.operations import reduce_scatter
from lightning_osdp.profiler import LiveBytes

PHASES = ("forward", "backward", "reduce-scatter", "optimizer step")
"""Phases of a step, as `lightning_osdp.planner.cost` names them; the first three come once per micro-batch."""
WARM_UP_STEPS = 1
"""Steps that are not counted: optimizer state and the first gradients are made. From then on steps are alike."""


class Change(NamedTuple):
    """Live bytes of one rank, and when."""

    phase: str
    operator: str
    """Operator of the plan whose forward began last; none before the first and outside forward."""
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class StepBytes:
    """Live bytes of one rank in one optimizer step."""

    phases: Mapping[str, int]
    """Peak by name of the phase; those that did not happen, such as a reduce-scatter on one rank, are not there."""
    curve: tuple[Change, ...] = ()
    """Bytes that were alive after every change, if asked for."""

    @property
    def peak_bytes(self) -> int:
        """Peak of the whole step."""
        return max(self.phases.values())


def count_step(
    module: Family,
    plan: Plan,
    *,
    precision: Any = "32-true",
    num_steps: int = 1,
    keeps_curve: bool = False,
    strategy: ParallelStrategy | None = None,
) -> StepBytes:
    """Trains on this rank of the default process group and counts live bytes. Call it on all ranks that exist.

    Args:
        module: the model that the plan is for; it is wrapped in place.
        plan: with the micro-batch and the number of micro-batches to train with.
        precision: the Trainer's argument of this name.
        num_steps: steps to count; of each phase the least of their peaks is returned. One is enough, except on gloo,
            where a thread may hold a tensor of the last collective a moment longer than the step does.
        keeps_curve: whether to return the bytes over the last counted step.
        strategy: see `train`.
    """
    counter = _StepCounter(keeps_curve=keeps_curve)
    with ExitStack() as hooks:
        for name in {operator for unit in plan.units for operator in unit.operators if keeps_curve and operator}:
            enter = module.get_submodule(name).register_forward_pre_hook(partial(counter.enter_operator, name))
            hooks.callback(enter.remove)
        num_steps += WARM_UP_STEPS
        hooks.enter_context(quiet())
        train(module, plan, num_steps=num_steps, precision=precision, callbacks=[counter], strategy=strategy)
    phases = {
        phase: min(step.phases[phase] for step in counter.steps) for phase in PHASES if phase in counter.steps[0].phases
    }
    return StepBytes(phases=phases, curve=counter.steps[-1].curve)


class _PhaseBytes(LiveBytes):
    """Live bytes with the peak of each phase."""

    def __init__(self, device_type: str, *, keeps_curve: bool) -> None:
        super().__init__(device_type)
        self._phase, self._phases, self._keeps_curve = PHASES[0], dict[str, int](), keeps_curve
        self._curve: list[Change] = []
        self.operator = ""

    def enter(self, phase: str) -> str:
        """Begins a phase; returns the phase that ends."""
        ended, self._phase, self.operator = self._phase, phase, ""
        self._phases[phase] = max(self._phases.get(phase, 0), self.current_bytes)
        return ended

    def found(self) -> StepBytes:
        """Bytes that were counted so far."""
        return StepBytes(phases=dict(self._phases), curve=tuple(self._curve))

    @override
    def _set(self, key: int, num_bytes: int) -> None:
        super()._set(key, num_bytes)
        self._note()

    @override
    def _forget(self, key: int) -> None:
        super()._forget(key)
        self._note()

    def _note(self) -> None:
        if self.is_active:
            self._phases[self._phase] = max(self._phases.get(self._phase, 0), self.current_bytes)
            if self._keeps_curve:
                self._curve.append(Change(self._phase, self.operator, self.current_bytes))


class _StepCounter(pl.Callback):
    """Counts all steps after `WARM_UP_STEPS`."""

    reads_parameters = False

    def __init__(self, *, keeps_curve: bool) -> None:
        self.steps: list[StepBytes] = []
        self._keeps_curve = keeps_curve
        self._live: _PhaseBytes | None = None
        self._running = ExitStack()

    def enter_operator(self, name: str, *_: Any) -> None:
        """Hook before the forward of an operator."""
        if self._live is not None:
            self._live.operator = name

    @override
    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step < WARM_UP_STEPS:
            return
        if self._live is None:
            self._live = _PhaseBytes(trainer.strategy.root_device.type, keeps_curve=self._keeps_curve)
            self._live.track(living_tensors(trainer.model, trainer.optimizers))
        self._live.track(leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor))
        self._running.enter_context(self._live)
        self._running.enter_context(_reduce_scatters_as_phase(self._live))
        self._live.enter("forward")

    @override
    def on_before_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule, loss: Tensor) -> None:
        self._enter("backward")

    @override
    def on_before_optimizer_step(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer
    ) -> None:
        self._enter("optimizer step")

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._running.close()  # between micro-batches the loader works, whose tensors do not count
        if self._live is not None and trainer.global_step > WARM_UP_STEPS + len(self.steps):
            self.steps.append(self._live.found())
            self._live = None

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._running.close()

    def _enter(self, phase: str) -> None:
        if self._live is not None:
            self._live.enter(phase)


def _reduce_scatters_as_phase(live: _PhaseBytes) -> AbstractContextManager[Any]:
    """Counts what lives during a reduce-scatter as a phase of its own, within that which calls it."""

    def as_phase(collective: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(collective)
        def run(*args: Any, **kwargs: Any) -> Any:
            around = live.enter("reduce-scatter")
            try:
                return collective(*args, **kwargs)
            finally:
                live.enter(around)

        return run

    patched = ExitStack()
    # torch's own, and what OSDP's begin with on gloo
    places = (dist, "reduce_scatter_single"), (reduce_scatter, "begin_all_to_all"), (in_flight, "begin_all_to_all")
    for module, name in places:
        patched.enter_context(patch.object(module, name, as_phase(getattr(module, name))))
    return patched
