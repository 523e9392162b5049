"""Step followed at one or two micro-batch sizes: calls and bytes, on fake tensors where the model allows it."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn

from lightning_osdp.core.axes import KEEP, LEVELS
from lightning_osdp.core.profile import Span
from lightning_osdp.core.text.names import is_inside
from lightning_osdp.errors import ProfileError, UntraceableError
from lightning_osdp.operations.splitting import compiled_whole
from lightning_osdp.profiler.machine.memory import raise_if_fatal
from lightning_osdp.profiler.step.run_step import StepRunner, TrialRun, check_loss
from lightning_osdp.profiler.tracing.calls import Calls, recorded_calls
from lightning_osdp.profiler.tracing.saved_bytes import (
    Activations,
    evaluate_as_training,
    trace_activations,
    trace_evaluation,
)
from lightning_osdp.profiler.tracing.short_model import ShortModel, short_model

_log = logging.getLogger(__name__)
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
"""Containers in which repeated blocks stand."""
_CACHE_REMEDY = (
    " (each run adds to its key-value cache, which training does not need: set model.config.use_cache = False)"
)
"""Remedy for models of transformers that keep keys and values of their forward, as generating needs them."""


@dataclass(frozen=True)
class Trace:
    """Calls and bytes of a step."""

    calls: Calls
    short: ShortModel
    """Model that stands for the whole one on fake tensors."""
    activations: Mapping[int, Sequence[Activations]]
    """Bytes of each segment, by micro-batch size; the profiled size is first."""
    blocks: Mapping[str, Span]
    """Modules that may recompute or offload what they save, with their segments."""
    saving_less: Mapping[str, Mapping[int, Sequence[Activations]]]
    """`activations` of the step in which all blocks make a choice other than ``keep``, by choice."""
    notes: tuple[str, ...]
    """Notes of the plan for people."""
    trial: Callable[[int], TrialRun]
    """Trial run of so many samples, on tensors like those that were followed."""


def trace_step(step: StepRunner, choices: Collection[str] = (), *, exchanges: bool = False) -> Trace:
    """Follows a step with the profiled number of samples and, unless it ``has_one_size``, with another one.

    With ``exchanges`` operators' inputs and outputs are followed, too, where blocks keep what they save.

    Raises:
        ProfileError: there is no loss; or parameters are on the meta device and the step needs their values.
    """
    try:
        calls_and_short = short_model(step)
        trial = step.on_fake_tensors
        trace = None if calls_and_short is None else _trace(step, trial, *calls_and_short, choices, exchanges=exchanges)
        return trace or trace_whole(step, trial, choices, exchanges=exchanges)
    except UntraceableError as error:
        if step.is_meta:
            raise ProfileError(
                "Expected a model on the meta device to run one training step without the values of its parameters,"
                f" but it does not: {error.__cause__!r}. Let training_step read no values, or create the model on a"
                " real device."
            ) from error
        _log.info("OSDP: the step is traced on real tensors, for on fake ones it fails: %r", error.__cause__)
    # a real tensor that is moved away must come back with its values, which `saving_less` does not do
    choices = [choice for choice in choices if choice != "offload"]
    return trace_whole(step, step.on_real_tensors, choices, exchanges=exchanges)


def with_levels(step: StepRunner, trace: Trace, kept: Mapping[str, Sequence[tuple[int, ...]]]) -> Trace:
    """The trace with `LEVELS` of its blocks among the choices, as far as the step runs at them.

    ``kept`` has the results that each block keeps at each of its levels; a block with fewer levels than others
    recomputes at the rest.
    """
    short, saving_less = trace.short, dict(trace.saving_less)
    with short.applied():
        blocks = find_blocks(step.module, short.calls, step.blocks)
        begins = {short.places[first]: kept.get(name, ()) for name, (first, _) in trace.blocks.items()}
        for number, level in enumerate(LEVELS):
            chosen = {name: begins[first][number] for name, (first, _) in blocks.items() if len(begins[first]) > number}
            if not chosen:
                break
            try:
                found = {}
                for size in trace.activations:
                    with trace.trial(size) as (run, batch):
                        found[size] = trace_activations(
                            step.module, batch, short.calls, run, blocks, choice="recompute", kept=chosen
                        )
            except Exception as error:
                raise_if_fatal(error)
                reason = str(_cause(error)).strip().partition("\n")[0]
                note = f"blocks are not planned to recompute in part, for the step fails then: {reason}"
                _log.warning("OSDP: %s", note)
                return replace(trace, notes=(*trace.notes, note))
            if not all(map(short.has_equal_blocks, found.values())):
                _log.info("OSDP: levels of recomputation are left out, for blocks that stand for others differ at them")
                return trace
            saving_less[level] = {size: short.unfolded(parts) for size, parts in found.items()}
    return replace(trace, saving_less=saving_less)


def trace_whole(
    step: StepRunner, trial: Callable[[int], TrialRun], choices: Collection[str] = (), *, exchanges: bool = False
) -> Trace:
    """Follows a step of the model with all of its blocks, on the tensors of these trial runs; see `trace_step`."""
    with trial(step.batch_size) as (run, _), recorded_calls(step.module) as calls:
        check_loss(run())
    short = ShortModel(calls, range(len(calls.sequence) + 1))
    trace = _trace(step, trial, calls, short, choices, exchanges=exchanges)
    assert trace is not None  # nothing is left out that could disagree
    return trace


def _trace(
    step: StepRunner,
    trial: Callable[[int], TrialRun],
    calls: Calls,
    short: ShortModel,
    choices: Collection[str],
    *,
    exchanges: bool,
) -> Trace | None:
    """Follows a step of the short model; None where its blocks turn out not to stand for the others."""
    with short.applied():
        traced, notes = _by_choice(step, trial, short.calls, choices, exchanges=exchanges)
    if not all(short.has_equal_blocks(parts) for by_size in traced.values() for parts in by_size.values()):
        return None
    unfolded = {
        choice: {size: short.unfolded(parts) for size, parts in by_size.items()} for choice, by_size in traced.items()
    }
    blocks = find_blocks(step.module, calls, step.blocks)
    return Trace(calls, short, unfolded.pop(KEEP), blocks, unfolded, tuple(notes), trial)


def _by_choice(
    step: StepRunner, trial: Callable[[int], TrialRun], calls: Calls, choices: Collection[str], *, exchanges: bool
) -> tuple[dict[str, dict[int, list[Activations]]], list[str]]:
    """Bytes of segments by choice of all blocks and by micro-batch size; with notes on choices that the step fails in.

    A choice that fails is left out, for a model may not bear to be run again, or may read what it has saved.
    """
    module, blocks = step.module, find_blocks(step.module, calls, step.blocks)

    def traced(size: int, choice: str) -> list[Activations]:
        with trial(size) as (run, batch):
            is_followed = exchanges and choice == KEEP
            return trace_activations(module, batch, calls, run, blocks, choice=choice, exchanges=is_followed)

    def kept(size: int) -> list[Activations]:
        parts = traced(size, KEEP)
        try:
            with trial(size) as (run, batch):
                trace_evaluation(module, batch, calls, run, parts)
        except Exception as error:  # a training step may need gradients, as for a penalty on them
            raise_if_fatal(error)
            _log.info(
                "OSDP: without gradients the step does not run (%s): evaluation is taken as training.", _cause(error)
            )
            evaluate_as_training(parts)
        return parts

    size, *others = step.sizes
    by_choice, notes = {KEEP: {size: kept(size)}}, list[str]()
    for other in others:
        try:
            by_choice[KEEP][other] = kept(other)
        except Exception as error:  # noqa: PERF203 - a model may be made for one size only
            raise_if_fatal(error)
            _log.warning(
                "OSDP: the model does not run on %d samples (%s): bytes and time are taken as proportional.",
                other,
                _cause(error),
            )
    for choice in choices if blocks else ():
        try:
            by_choice[choice] = {size: traced(size, choice) for size in by_choice[KEEP]}
        except Exception as error:  # noqa: PERF203
            raise_if_fatal(error)
            reason = str(_cause(error)).strip().partition("\n")[0]
            configs = [getattr(child, "config", None) for child in module.modules()]
            keeps_cache = any(getattr(config, "use_cache", False) is True for config in configs)
            remedy = _CACHE_REMEDY if keeps_cache else ""
            notes.append(f"blocks are not planned to {choice}, for the step fails then: {reason}{remedy}")
            _log.warning("OSDP: %s", notes[-1])
    return by_choice, notes


def _cause(error: Exception) -> BaseException | None:
    return error.__cause__ if isinstance(error, UntraceableError) else error


def find_blocks(module: nn.Module, calls: Calls, given: Collection[nn.Module] | None = None) -> dict[str, Span]:
    """Modules that may be blocks, with the segments that they run, in order of the segments.

    A block is called once. Where blocks would lie inside each other, the outermost is taken. If none are given, blocks
    are modules of several operators that stand in one container with others of their class: one operator's input is
    all that it saves. Inside of what is compiled whole there are none: nothing can be dropped within one graph.
    """
    repeated = _repeated(module) if given is None else frozenset()
    whole = [f"{name}." if name else "" for name in compiled_whole(module)]
    repeated = frozenset(name for name in repeated if not any(name.startswith(each) for each in whole))
    blocks: dict[str, Span] = {}
    for name, child in module.named_modules():
        spans = calls.spans.get(name, [])
        if len(spans) != 1 or is_inside(name, blocks):
            continue
        first, last = spans[0]
        within = calls.sequence[first : last + 1]
        is_made_of_several = len(within) > 1 and all(each.startswith(f"{name}.") for each in within)
        if child in given if given is not None else name in repeated and is_made_of_several:
            blocks[name] = first, last
    return dict(sorted(blocks.items(), key=lambda item: item[1]))


def _repeated(module: nn.Module) -> frozenset[str]:
    """Names of modules that stand in one container with others of their class."""
    names = set()
    for name, container in module.named_modules():
        if isinstance(container, _CONTAINERS):
            kinds = Counter(type(child) for child in container.children())
            keys = (key for key, child in container.named_children() if kinds[type(child)] > 1)
            names |= {f"{name}.{key}" if name else key for key in keys}
    return frozenset(names)
