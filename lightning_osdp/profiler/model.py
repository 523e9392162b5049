"""Profiles a whole model: runs its own training step on a real batch, and leaves no trace."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_osdp.core.affine import Affine
from lightning_osdp.core.cluster import DeviceRates
from lightning_osdp.core.profile import ModelProfile
from lightning_osdp.core.text.progress import Progress, silent
from lightning_osdp.errors import ProfileError, RanksApartError
from lightning_osdp.profiler.assemble import assemble
from lightning_osdp.profiler.compiled import as_eager, compiled_modules, note_of
from lightning_osdp.profiler.machine.memory import is_out_of_memory
from lightning_osdp.profiler.optimizer import profile_optimizers
from lightning_osdp.profiler.precision import ComputePrecision
from lightning_osdp.profiler.step.loss import loss_in
from lightning_osdp.profiler.step.run_step import Step
from lightning_osdp.profiler.step.snapshot import iterators_in, untouched
from lightning_osdp.profiler.step.tensors import tensors_in
from lightning_osdp.profiler.timing.estimate import estimate_step, seconds_on
from lightning_osdp.profiler.timing.step_time import Seconds, time_step
from lightning_osdp.profiler.together import Together, alone
from lightning_osdp.profiler.tracing.operators import check_parameters
from lightning_osdp.profiler.tracing.segment_bytes import traced_choices
from lightning_osdp.profiler.tracing.trace import Trace, trace_step

_log = logging.getLogger(__name__)
_AS_IT_IS = ComputePrecision()


def profile_model(
    module: nn.Module,
    batch: Any,
    *,
    batch_size: int | None = None,
    training_step: Callable[[Any], Any] | None = None,
    configure_optimizers: Callable[[nn.Module], Sequence[Optimizer]] | None = None,
    precision: ComputePrecision = _AS_IT_IS,
    context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    device: torch.device | None = None,
    rates: DeviceRates | None = None,
    activations: Sequence[str] = ("keep", "recompute"),
    blocks: Collection[str] | None = None,
    together: Together = alone,
    progress: Progress = silent,
) -> ModelProfile:
    """Bytes and seconds of every operator of a model, from running its training step on one batch.

    Bytes come from a run on fake tensors, where the model allows it. Then the step runs several times, forward and
    backward, and is timed; of a model on the meta device, its operations are, one by one. Parameters, buffers,
    attributes, gradients and random number generators are as before when it returns, see `untouched`. Nothing is
    profiled that the batch does not make the model run.

    Args:
        module: the model, with parameters on the device that it will train on, or on the meta device.
        batch: one batch of its training data, on that device.
        batch_size: samples in the batch; None: the size of the first dimension of its first tensor.
        training_step: takes the batch and returns the loss, or a mapping with it under ``"loss"``; None: the
            module's own ``training_step(batch, 0)``.
        configure_optimizers: returns the optimizers of the module that it is given; None: the module's own method,
            which must return an optimizer or a list of them.
        precision: dtypes of computing under mixed precision.
        context: makes the context that forward runs in, such as autocast.
        device: where a model on the meta device will train; None: the CPU. A real one is profiled where it is.
        rates: of a device that one does not have; times then follow from them, and nothing is timed but the optimizer.
        activations: what blocks may do with what they save, see `SearchSpace`.
        blocks: names of the modules that may be blocks; None: those that stand in one container with others of their
            class. Those that are not called once are left out.
        together: how the ranks of a job run the step at the same time, where all of them profile the model; by default
            this process does it alone.
        progress: called with each stage as it begins, and how far it has come.

    Raises:
        ProfileError: no loss, a loss without gradient or not finite, no parameters, or an optimizer that cannot be
            run on a copy.
    """
    check_parameters(module)
    for name in iterators_in(module):
        _log.warning(
            "OSDP: %r is an iterator: what training_step takes from it while it is profiled, training will not get.",
            name,
        )
    if training_step is None:
        training_step = lambda batch: module.training_step(batch, 0)  # type: ignore[operator]  # noqa: E731
    if batch_size is None:
        batch_size = _first_dimension(batch)

    given, batch = batch, precision.cast(batch)

    def run(batch: Any) -> Any:
        with context():
            return training_step(batch)

    device = next((p.device for p in module.parameters() if not p.is_meta), device or torch.device("cpu"))
    given_blocks = None if blocks is None else frozenset(module.get_submodule(name) for name in blocks)
    step = Step(module, batch, batch_size, run, device, given_blocks)
    progress("tracing the model", "")
    compiled = compiled_modules(module)
    with precision.applied(module), as_eager(compiled):
        trace = trace_step(step, traced_choices(activations))
        seconds = _seconds(step, trace, rates, together, progress)
    progress("profiling the optimizer", "")
    with untouched(module):
        optimizer, optimized = profile_optimizers(module, configure_optimizers or _plain_optimizers, device)
    # a cast makes a copy beside what the loader gave
    batch_bytes = sum(tensor.nbytes for tensor in {*tensors_in(given), *tensors_in(batch)})
    return replace(
        assemble(
            module,
            trace,
            seconds=seconds,
            optimized=optimized,
            batch_size=batch_size,
            precision=precision,
            activations=activations,
        ),
        optimizer=optimizer,
        batch_bytes=Affine.proportional(batch_size, batch_bytes),
        notes=tuple(dict.fromkeys((*step.notes, *([note_of(compiled)] if compiled else [])))),
    )


def _seconds(
    step: Step, trace: Trace, rates: DeviceRates | None, together: Together, progress: Progress
) -> dict[int, Seconds]:
    """Seconds at the traced sizes; only at the first where the model does not run on another one.

    The step is run and timed where it can be, else its operations are, one by one. Ranks run it together unless only
    some have a model with values.
    """
    is_run = not step.is_meta and rates is None
    if not all(together(lambda: is_run, stage="timing")):
        together = alone
    seconds_of = cache(seconds_on(step.device, rates))
    timing = partial(time_step, step.module, trace.calls, step.device, progress=progress)
    found: dict[int, Seconds] = {}
    for size in trace.activations:
        stage = f"timing {size} {'sample' if size == 1 else 'samples'}"
        try:
            seconds = _timed(step, size, stage, timing, together) if is_run else None
            if is_run and seconds is None:
                _log.info("OSDP: %d samples do not fit on a device unsharded, so operations are timed alone", size)
            if seconds is None:
                progress(stage, "operation by operation")
                seconds = estimate_step(step, trace.short, size, seconds_of)
            found[size] = seconds
        except Exception as error:
            if not found or isinstance(error, RanksApartError):
                raise
            _log.warning("OSDP: the model does not run on %d samples (%s): time is taken as proportional.", size, error)
    return found


def _timed(
    step: Step, size: int, stage: str, time: Callable[..., Seconds | None], together: Together
) -> Seconds | None:
    """Seconds of the whole step; None on every rank where it does not fit on a device unsharded."""
    try:
        with step.on_real_tensors(size) as (run, _):
            return time(partial(_loss_of, run), stage=stage, together=together)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        # for the batch alone; the other ranks are at their first run
        together(lambda: None, stage=stage)
        return None


def _loss_of(run: Callable[[], Any]) -> Tensor:
    return loss_in(run())


def _first_dimension(batch: Any) -> int:
    tensor = next((tensor for tensor in tensors_in(batch) if tensor.dim() > 0), None)
    if tensor is None:
        raise ProfileError(
            f"Cannot tell how many samples the batch holds: found no tensor in {type(batch).__name__}."
            " Pass batch_size to profile_model."
        )
    return int(tensor.shape[0])


def _plain_optimizers(module: nn.Module) -> Sequence[Optimizer]:
    configured = module.configure_optimizers()  # type: ignore[operator]
    optimizers = [configured] if isinstance(configured, Optimizer) else configured
    if not isinstance(optimizers, (list, tuple)) or not all(isinstance(o, Optimizer) for o in optimizers):
        raise ProfileError(
            f"Expected configure_optimizers to return an optimizer or a list of optimizers, got {configured!r}."
            " Pass configure_optimizers to profile_model."
        )
    return optimizers
