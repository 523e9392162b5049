"""One step followed at two micro-batch sizes: its calls and its bytes, on fake tensors where the model allows it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from lightning_osdp.core.profile import Span
from lightning_osdp.errors import ProfileError, UntraceableError
from lightning_osdp.profiler.equal_blocks.forward import Forward, recorded_forward
from lightning_osdp.profiler.equal_blocks.operation_log import NeedsSavedError
from lightning_osdp.profiler.equal_blocks.repeated import ShortModel, blocks_of, short_model
from lightning_osdp.profiler.step.loss import check_loss, loss_in
from lightning_osdp.profiler.step.resize import another_size
from lightning_osdp.profiler.step.run_step import Rehearsal, Step
from lightning_osdp.profiler.step.tensors import tensors_in
from lightning_osdp.profiler.tracing.blocks import find_blocks
from lightning_osdp.profiler.tracing.calls import Calls, recorded_calls
from lightning_osdp.profiler.tracing.operators import find_operators
from lightning_osdp.profiler.tracing.saved_bytes import (
    Activations,
    evaluate_as_training,
    trace_activations,
    trace_evaluation,
)

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Trace:
    """What a step does."""

    calls: Calls
    short: ShortModel
    """What stands for the model on fake tensors."""
    activations: Mapping[int, Sequence[Activations]]
    """By micro-batch size, of each segment; the profiled size is first."""
    blocks: Mapping[str, Span] = field(default_factory=dict)
    """Modules that need not keep what they save, with their segments."""
    saving_less: Mapping[str, Mapping[int, Sequence[Activations]]] = field(default_factory=dict)
    """By choice, the activations if all blocks do so."""


def trace_step(step: Step, choices: Collection[str] = ()) -> Trace:
    """Follows a step, with the profiled number of samples and with another.

    Args:
        step: to follow.
        choices: what blocks may do with what they save, beside keeping it.

    Raises:
        ProfileError: there is no loss; or parameters are on the meta device and the step needs their values.
    """
    try:
        return _trace_short(step, choices) or _trace(step, step.on_fake_tensors, choices)
    except UntraceableError as error:
        if step.is_meta:
            raise ProfileError(
                "Expected a model on the meta device to run one training step without the values of its parameters,"
                f" but it does not: {error.__cause__!r}. Let training_step read no values, or create the model on a"
                " real device."
            ) from error
        _log.info("OSDP: the step is traced on real tensors, for on fake ones it fails: %r", error.__cause__)
    # what is moved away is not there to come back where tensors are real
    return _trace(step, step.on_real_tensors, [choice for choice in choices if choice != "offload"])


def _trace_short(step: Step, choices: Collection[str]) -> Trace | None:
    """By a model of fewer blocks; None where there is none that stands for this one."""
    module, size = step.module, step.batch_size

    def record() -> Forward:
        with step.on_fake_tensors(size) as (run, batch), recorded_forward(module, batch, blocks_of(module)) as forward:
            check_loss(run())
        return forward

    if not blocks_of(module):
        return None
    try:
        full = record()
    except UntraceableError as error:
        if isinstance(error.__cause__, NeedsSavedError):
            return None
        raise
    short = short_model(module, full, record)
    with short.applied():
        traced = _both_sizes(step, short.calls, step.on_fake_tensors, choices)
    if not all(short.agrees(parts) for of_choice in traced.values() for parts in of_choice.values()):
        return None
    unfolded = {
        choice: {size: short.unfolded(parts) for size, parts in of_choice.items()}
        for choice, of_choice in traced.items()
    }
    return Trace(full.calls, short, unfolded.pop("keep"), find_blocks(module, full.calls, step.blocks), unfolded)


def _trace(step: Step, rehearsal: Callable[[int], Rehearsal], choices: Collection[str]) -> Trace:
    with rehearsal(step.batch_size) as (run, _), recorded_calls(step.module) as calls:
        check_loss(run())
    traced = _both_sizes(step, calls, rehearsal, choices)
    return Trace(calls, ShortModel(calls), traced.pop("keep"), find_blocks(step.module, calls, step.blocks), traced)


def _both_sizes(
    step: Step, calls: Calls, rehearsal: Callable[[int], Rehearsal], choices: Collection[str]
) -> dict[str, dict[int, list[Activations]]]:
    """By choice of what blocks do, and by micro-batch size."""
    sizes = [step.batch_size, another_size(step.batch_size)]
    blocks = find_blocks(step.module, calls, step.blocks)
    traced = {"keep": {sizes[0]: _activations(step.module, calls, rehearsal, sizes[0], blocks)}}
    try:
        traced["keep"][sizes[1]] = _activations(step.module, calls, rehearsal, sizes[1], blocks)
    except Exception as error:  # a model may be made for one size only
        _log.warning(
            "OSDP: the model does not run on %d samples (%s): bytes and time are taken as proportional.",
            sizes[1],
            _cause(error),
        )
    for choice in choices if blocks else ():
        traced |= _saving_less(step, calls, rehearsal, choice, traced["keep"], blocks=blocks)
    return traced


def _saving_less(
    step: Step,
    calls: Calls,
    rehearsal: Callable[[int], Rehearsal],
    choice: str,
    sizes: Collection[int],
    *,
    blocks: Mapping[str, Span],
) -> dict[str, dict[int, list[Activations]]]:
    """What is found where all blocks do so, but for evaluation, which is the same; nothing where the step fails."""

    def traced(size: int) -> list[Activations]:
        with rehearsal(size) as (run, batch):
            return trace_activations(
                step.module,
                find_operators(step.module, calls),
                calls,
                run_step=run,
                loss_in=loss_in,
                static=_static(step.module, batch),
                blocks=blocks,
                choice=choice,
            )

    try:
        return {choice: {size: traced(size) for size in sizes}}
    except Exception as error:  # a model may not bear to be run again, or read what it has saved
        reason = str(_cause(error)).strip().partition("\n")[0]
        remedy = _CACHE_REMEDY if any(_keeps_cache(child) for child in step.module.modules()) else ""
        step.notes.append(f"blocks are not planned to {choice}, for the step fails then: {reason}{remedy}")
        _log.warning("OSDP: %s", step.notes[-1])
    return {}


_CACHE_REMEDY = (
    " (each run adds to its key-value cache, which training does not need: set model.config.use_cache = False)"
)


def _keeps_cache(module: nn.Module) -> bool:
    """Whether it is a model of transformers that keeps keys and values of its forward, as for generating."""
    return getattr(getattr(module, "config", None), "use_cache", False) is True


def _cause(error: Exception) -> BaseException | None:
    return error.__cause__ if isinstance(error, UntraceableError) else error


def _activations(
    module: nn.Module,
    calls: Calls,
    rehearsal: Callable[[int], Rehearsal],
    size: int,
    blocks: Mapping[str, Span],
) -> list[Activations]:
    with rehearsal(size) as (run, batch):
        operators = find_operators(module, calls)
        static = _static(module, batch)
        parts = trace_activations(module, operators, calls, run_step=run, loss_in=loss_in, static=static, blocks=blocks)
    try:
        with rehearsal(size) as (run, batch):
            trace_evaluation(module, calls, parts, run, _static(module, batch))
    except Exception as error:  # a training step may need gradients, as for a penalty on them
        _log.info("OSDP: without gradients the step does not run (%s): evaluation is taken as training.", _cause(error))
        evaluate_as_training(parts)
    return parts


def _static(module: nn.Module, batch: Any) -> list[Tensor]:
    """Tensors that live throughout, beside the parameters."""
    return [*tensors_in([vars(m) for m in module.modules()]), *tensors_in(batch)]
