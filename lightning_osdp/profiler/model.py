"""Profile of a whole model: its own training step runs on a real batch, and the model is left as it was."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from lightning_osdp.core.affine import Affine
from lightning_osdp.core.axes import DEFAULT_ACTIVATIONS, SELECTIVE, values_of
from lightning_osdp.core.cluster import DeviceRates
from lightning_osdp.core.profile import ModelProfile
from lightning_osdp.core.text.progress import Progress, silent
from lightning_osdp.errors import ProfileError, RanksApartError, UntraceableError
from lightning_osdp.operations.splitting import inside_compiled
from lightning_osdp.profiler.machine.memory import is_out_of_memory, raise_if_fatal
from lightning_osdp.profiler.optimizer import OptimizedParameter, profile_optimizers
from lightning_osdp.profiler.parts.blocks import (
    known_levels,
    levels_of_blocks,
    profile_blocks,
    profile_crossings,
    profile_reruns,
    traced_choices,
)
from lightning_osdp.profiler.parts.operators import bytes_of, profile_exchanges, profile_operators
from lightning_osdp.profiler.parts.segments import profile_segments
from lightning_osdp.profiler.precision import ComputePrecision
from lightning_osdp.profiler.step.run_step import StepRunner, as_eager, loss_in, note_on_compiled
from lightning_osdp.profiler.step.snapshot import iterators_in, tensors_in, untouched
from lightning_osdp.profiler.timing.operation_time import Operation, estimate_step, replayed_s, roofline_s
from lightning_osdp.profiler.timing.rerun_time import Again, level_overhead, stated_overhead, work_of_blocks
from lightning_osdp.profiler.timing.step_time import Seconds, Together, alone, time_step
from lightning_osdp.profiler.tracing.operators import check_parameters, find_operators, fingerprint
from lightning_osdp.profiler.tracing.trace import Trace, trace_step, with_levels

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainingStep:
    """Training step, optimizers and precision of a module, as far as the module's own do not serve."""

    run: Callable[[Any], Any] | None = None
    """Takes the batch and returns the loss, or a mapping with it under ``"loss"``; None: the module's own
    ``training_step(batch, 0)``."""
    optimizers: Callable[[nn.Module], Sequence[Optimizer]] | None = None
    """Takes a module and returns its optimizers; None: the module's own ``configure_optimizers``."""
    precision: ComputePrecision = field(default_factory=ComputePrecision)
    """Dtypes of computing under mixed precision; ``run`` enters autocast itself."""
    batch_size: int | None = None
    """Samples in the batch; None: the size of the first dimension of its first tensor."""
    device: torch.device | None = None
    """Device on which a model on the meta device will train; None: the CPU. Other models are profiled on their own."""


_OWN_TRAINING = TrainingStep()
NOT_ON_HOST = (
    "all states of optimizers stay on the device: on the host those of torch.optim alone can step that update each"
    " element by itself, but Adagrad, and without capturable=True or differentiable=True"
)


def profile_model(
    module: nn.Module,
    batch: Any,
    training: TrainingStep = _OWN_TRAINING,
    *,
    rates: DeviceRates | None = None,
    activations: Sequence[str] = DEFAULT_ACTIVATIONS,
    blocks: Collection[str] | None = None,
    exchanges: bool = False,
    on_host: bool = False,
    known: ModelProfile | None = None,
    together: Together = alone,
    progress: Progress = silent,
) -> ModelProfile:
    """Bytes and seconds of every operator of a model, from running its training step on one batch.

    Bytes come from a run on fake tensors, where the model allows that. Then the step runs several times, forward and
    backward, and is timed. For a model on the meta device, operations are timed one by one instead. Parameters,
    buffers, attributes, gradients and random number generators are as before when the function returns. Modules that
    the batch does not make the model run are not profiled.

    Args:
        module: the model, with parameters on the device that it will train on, or on the meta device.
        batch: one batch of its training data, on that device.
        training: the step and the optimizers, if they are not the module's own; and precision.
        rates: rates of a device that this machine lacks; times then follow from the rates, and nothing is timed.
        activations: choices of blocks for the tensors that they save for backward, see `SearchSpace`.
        blocks: names of the modules that may be blocks; None: modules that stand in one container with others of their
            class. Modules that are not called exactly once are left out.
        exchanges: whether to follow operators, so that pairs of them are known whose activations can move in place of
            weights. Only a search space that names ``stationary`` among its modes reads them.
        on_host: whether to time updates on the host, for plans that may have states there.
        known: profile of the model on another batch, whose levels blocks have again, and whose optimizer is that of
            the profile; no parameter then has a state, and bytes and seconds are proportional to the samples. None:
            levels and optimizer are found, and two numbers of samples tell what does not grow with them.
        together: runs the step at the same time on all ranks of a job that profile the model; by default this process
            profiles alone.
        progress: called with each stage as it begins, and with the state of the stage.

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
    precision = training.precision
    batch_size = _first_dimension(batch) if training.batch_size is None else training.batch_size
    device = next((p.device for p in module.parameters() if not p.is_meta), training.device or torch.device("cpu"))
    cast_batch = precision.cast(batch)
    step = StepRunner(
        module,
        cast_batch,
        batch_size,
        training.run or partial(module_step, module),
        device,
        None if blocks is None else frozenset(module.get_submodule(name) for name in blocks),
        has_one_size=known is not None,
    )
    progress("tracing the model", "")
    with precision.applied(module), as_eager(module):
        trace = trace_step(step, traced_choices(activations), exchanges=exchanges)
        seconds_of = cache(partial(replayed_s, device=device) if rates is None else partial(roofline_s, rates=rates))
        is_run = not step.is_meta and rates is None
        seconds = _seconds(step, trace, seconds_of, together, progress, is_run=is_run)
        again = _again(step, trace, seconds, seconds_of, with_results=SELECTIVE in activations)
        operators = find_operators(module, trace.calls)
        segments, levels = profile_segments(operators, trace, seconds), {}
        has_levels = SELECTIVE in activations and again and not _run_graphs(module, trace.blocks)
        if has_levels and known is not None:
            levels = known_levels(known)
        elif has_levels:
            # by the rates of another device nothing is timed
            overhead = level_overhead if rates is None else partial(stated_overhead, rates)
            has_device = device.type != "cpu" if rates is None else rates.is_cuda
            levels = levels_of_blocks(trace, segments, again[batch_size], batch_size, overhead, has_device=has_device)
        if levels:
            progress("tracing levels of recomputation", "")
            trace = with_levels(step, trace, {name: of.kept for name, of in levels.items()})
    progress("profiling the optimizer", "")
    optimized: Mapping[nn.Parameter, OptimizedParameter] = {}
    if known is None:
        with untouched(module):
            optimizer, optimized = profile_optimizers(
                module, training.optimizers or configured_optimizers, device, rates=rates, on_host=on_host
            )
    else:
        optimizer = known.optimizer
    crossings = profile_crossings(trace)
    may_be_units = {name for operator in operators for name in (operator.name, *operator.enclosing) if name}
    profiled = profile_operators(module, operators, trace, optimized, precision)
    return ModelProfile(
        operators=profiled,
        segments=segments,
        spans={
            # a block's own segments are those of its operators
            name: tuple(spans) if name in trace.blocks else trace.calls.spans_of(name)
            for name, spans in trace.calls.spans.items()
            if name in may_be_units
        },
        blocks=profile_blocks(trace, segments, crossings, values_of(activations), again=again, levels=levels),
        crossings=crossings,
        rerun=profile_reruns(trace, may_be_units),
        exchanges=profile_exchanges(module, profiled, trace, is_followed=exchanges),
        fingerprint=fingerprint(module),
        profiled_batch_size=batch_size,
        optimizer=optimizer,
        buffer_bytes=bytes_of(module.buffers()),
        # a cast makes a copy beside what the loader gave
        batch_bytes=Affine.proportional(batch_size, bytes_of({*tensors_in(batch), *tensors_in(cast_batch)})),
        notes=tuple(
            note
            for note in (
                *trace.notes,
                note_on_compiled(module, exchanges=exchanges),
                note_on_device(device, rates),
                NOT_ON_HOST if on_host and optimizer.host_s_per_element is None else None,
            )
            if note
        ),
    )


def note_on_device(device: torch.device, rates: DeviceRates | None = None) -> str | None:
    """Note of a plan on numbers of a kind of device on which the profiler was never run, measured there or stated."""
    if rates is not None and rates.is_cuda:
        return "bytes, and seconds by stated rates, are unvalidated on CUDA, but for one model on one GPU"
    if device.type != "cuda":
        return None
    return (
        "times of segments, collectives, units and the optimizer are unvalidated on CUDA: `make gpu-check` says which"
        " of them hold on this machine"
    )


def _seconds(
    step: StepRunner,
    trace: Trace,
    seconds_of: Callable[[Operation], float],
    together: Together,
    progress: Progress,
    *,
    is_run: bool,
) -> dict[int, Seconds]:
    """Seconds at the traced micro-batch sizes; only at the first where the model runs at no other size.

    The whole step is timed where it ``is_run``, otherwise its operations are timed one by one. Ranks run the step
    together unless only some ranks have a model with values.
    """
    if not all(together(lambda: is_run, stage="timing")):
        together = alone

    def timed(size: int, stage: str) -> Seconds | None:
        """Seconds of the whole step; None on every rank where the step does not fit on a device unsharded."""
        time = partial(time_step, step.module, trace.calls, step.device)
        try:
            with step.on_real_tensors(size) as (run, _):
                return time(lambda: loss_in(run()), stage=stage, together=together, progress=progress)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            # memory ran out for the batch already: the other ranks wait in their first run
            together(lambda: None, stage=stage)
            return None

    by_size: dict[int, Seconds] = {}
    for size in trace.activations:
        stage = f"timing {size} {'sample' if size == 1 else 'samples'}"
        try:
            seconds = timed(size, stage) if is_run else None
            if is_run and seconds is None:
                _log.info("OSDP: %d samples do not fit on a device unsharded, so operations are timed alone", size)
            if seconds is None:
                progress(stage, "operation by operation")
                seconds = estimate_step(step, trace.short, size, seconds_of)
            by_size[size] = seconds
        except Exception as error:
            raise_if_fatal(error)
            if not by_size or isinstance(error, RanksApartError):
                raise
            _log.warning("OSDP: the model does not run on %d samples (%s): time is taken as proportional.", size, error)
    return by_size


def _again(
    step: StepRunner,
    trace: Trace,
    sizes: Iterable[int],
    seconds_of: Callable[[Operation], float],
    *,
    with_results: bool,
) -> dict[int, dict[str, Again]]:
    """Work of each block that recomputes, for each number of samples.

    Empty where no block recomputes, and where operations cannot be timed one by one: all of forward is then taken.
    """
    if "recompute" not in trace.saving_less:
        return {}
    try:
        return {size: work_of_blocks(step, trace, size, seconds_of, with_results=with_results) for size in sizes}
    except Exception as error:
        if not (isinstance(error, UntraceableError) or is_out_of_memory(error)):
            raise
        _log.info("OSDP: blocks are taken to run all of their forward again, for operations cannot be timed: %s", error)
        return {}


def _run_graphs(module: nn.Module, blocks: Iterable[str]) -> bool:
    """Tells if blocks run compiled code, in which no operation is seen whose results could be kept."""
    in_graphs = inside_compiled(module)
    return any(each in in_graphs for name in blocks for each in module.get_submodule(name).modules())


def _first_dimension(batch: Any) -> int:
    tensor = next((tensor for tensor in tensors_in(batch) if tensor.dim() > 0), None)
    if tensor is None:
        raise ProfileError(
            f"Cannot tell how many samples the batch holds: found no tensor in {type(batch).__name__}."
            " Pass TrainingStep(batch_size=...) to profile_model."
        )
    return int(tensor.shape[0])


def module_step(module: nn.Module, batch: Any) -> Any:
    """Runs the module's own training step, without Lightning's warning that logging needs a Trainer."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"You are trying to `self\.log")
        return module.training_step(batch, 0)  # type: ignore[operator]


def configured_optimizers(module: nn.Module) -> Sequence[Optimizer]:
    """Optimizers that the module configures, in any form that Lightning takes, without their schedules.

    Raises:
        ProfileError: ``configure_optimizers`` returns anything else.
    """
    configured = given = module.configure_optimizers()  # type: ignore[operator]
    if isinstance(given, tuple) and len(given) == 2 and isinstance(given[0], (list, tuple)):
        given, _ = given
    if isinstance(given, (Optimizer, Mapping)):
        given = [given]
    each_given = given if isinstance(given, (list, tuple)) else [given]
    optimizers: list[Any] = [each.get("optimizer") if isinstance(each, Mapping) else each for each in each_given]
    if not all(isinstance(each, Optimizer) for each in optimizers):
        raise ProfileError(
            "Expected configure_optimizers to return optimizers, alone or with schedules as Lightning takes them, got"
            f" {configured!r}. Pass TrainingStep(optimizers=...) to profile_model."
        )
    return optimizers
