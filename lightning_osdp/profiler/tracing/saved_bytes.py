"""Bytes that forward saves for backward, and what lives beside them, per segment, from one traced step."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_osdp.core.profile import Span
from lightning_osdp.profiler.step.tensors import tensors_in
from lightning_osdp.profiler.tracing.blocks import saving_less
from lightning_osdp.profiler.tracing.calls import Calls
from lightning_osdp.profiler.tracing.live_bytes import LiveBytes
from lightning_osdp.profiler.tracing.operators import Operator
from lightning_osdp.profiler.tracing.passed_tensors import Crossings, Saved, crossed
from lightning_osdp.profiler.tracing.segments import Position, followed

_NO_BLOCKS: Mapping[str, Span] = {}


@dataclass
class Activations:
    """Bytes of one segment."""

    saved_bytes: int = 0
    crossings: tuple[Saved, ...] = ()
    """What it saves of tensors that blocks get or return, whoever is counted for it."""
    forward_workspace_bytes: int = 0
    """Most live bytes beside parameters, batch and everything saved so far, this segment included."""
    handed_bytes: int = 0
    """The same where it ends: what it hands on and nothing has saved yet."""
    backward_workspace_bytes: int = 0
    """Most live bytes beside those and the gradients of parameters."""
    rerun_workspace_bytes: int = 0
    """The same while a block runs again."""
    evaluation_bytes: int = 0
    """Most live bytes beside parameters and batch when forward runs without gradients."""
    reruns_early: bool = False
    """Whether it ends a block that is run again before backward has reached what its operator returned."""
    settled_bytes: int | None = None
    """Live bytes beside parameters, batch and gradients of parameters when its last gradient is complete, less what it
    and the segments before it have saved: may be negative, and is the same however many segments there are before."""
    passed_bytes: int | None = None
    """Likewise when its backward is over."""


class _Trace:
    """Follows one forward and backward through their segments."""

    def __init__(
        self,
        live: LiveBytes,
        operators: Sequence[Operator],
        calls: Calls,
        static: Sequence[Tensor],
        blocks: Mapping[str, Span],
    ) -> None:
        self.live = live
        live.track(static)
        self.static_bytes = live.current_bytes
        self.excluded = {tensor.untyped_storage()._cdata for tensor in static if tensor.layout is torch.strided}
        self.position = Position(calls, self.close_part)
        self.crossings = Crossings(lambda: self.position.now, [first for first, _ in blocks.values()])
        self.parts = [Activations() for _ in range(self.position.num_segments)]
        self.saved_before = [0] * len(self.parts)
        self.saved_in: dict[int, int] = {}
        self.total_saved = 0
        by_name = {operator.name: operator.gradients for operator in operators}
        self.made_in = [by_name[name] for name in calls.sequence]
        # Gradients that may be alive, by the segment that made them, and those that have been dropped.
        self.gradients: dict[Tensor, int] = {}
        self.dropped: set[Tensor] = set()
        self.gone: set[Tensor] = set()  # dropped before the present segment

    def keep(self, tensor: Tensor) -> Tensor:
        """Books a tensor that lives until backward; also the hook on every tensor that autograd saves."""
        if tensor.device.type == self.live.device_type and tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key not in self.excluded and not self.position.in_backward:
                self.crossings.save(storage)
            if key not in self.excluded and key not in self.saved_in:
                self.saved_in[key] = self.position.now
                self._book(self.position.now, storage.nbytes())
                weakref.finalize(storage, self._freed, key, storage.nbytes()).atexit = False
        return tensor.detach()

    def _freed(self, key: int, num_bytes: int) -> None:
        """A graph that the loss does not need was dropped in forward."""
        part = self.saved_in.pop(key)
        if self.position.in_backward:
            return
        self._book(part, -num_bytes)
        for segment in range(part, self.position.now):  # to these it was no saved tensor, but a live one
            self.parts[segment].forward_workspace_bytes += num_bytes
            self.parts[segment].handed_bytes += num_bytes
            self.saved_before[segment] -= num_bytes

    def _book(self, part: int, num_bytes: int) -> None:
        self.parts[part].saved_bytes += num_bytes
        self.total_saved += num_bytes

    def close_part(self) -> None:
        """Books the peak since the last call to the segment that ran."""
        now = self.position.now
        part = self.parts[now]
        if not self.position.in_backward:
            beside = self.live.peak_bytes - self.static_bytes - self.total_saved
            part.forward_workspace_bytes = max(part.forward_workspace_bytes, beside)
            part.handed_bytes = self.live.current_bytes - self.static_bytes - self.total_saved
            self.saved_before[now] = self.total_saved
        else:
            if self.position.is_running_again:
                there = (p for p, made_in in self.gradients.items() if made_in >= now and p not in self.gone)
                gradients = sum(p.numel() * p.element_size() for p in there)
                beside = self.live.peak_bytes - self.static_bytes - self.saved_before[now] - gradients
                part.rerun_workspace_bytes = max(part.rerun_workspace_bytes, beside)
            # The plan counts a gradient from the first segment that makes it on; one made before that is workspace.
            made = self.made_in[now] if now < len(self.made_in) else []
            for parameter in made:
                if parameter not in self.gone:
                    self.gradients.setdefault(parameter, now)
            alive = (p for p, made_in in self.gradients.items() if made_in >= now)
            gradients = sum(p.numel() * p.element_size() for p in alive)
            beside = self.live.peak_bytes - self.static_bytes - self.saved_before[now] - gradients
            part.backward_workspace_bytes = max(part.backward_workspace_bytes, beside)
            if not self.position.is_running_again:
                part.passed_bytes = self._unsaved_bytes()
            self.gone = set(self.dropped)
            self.gradients = {p: made_in for p, made_in in self.gradients.items() if p not in self.gone}
        self.live.reset_peak()

    def drop(self, parameter: Tensor) -> None:
        """Frees a gradient that is complete: the plan counts gradients itself, here they must not add up."""
        parameter.grad = None
        self.dropped.add(parameter)
        self.parts[self.position.now].settled_bytes = self._unsaved_bytes()

    def _unsaved_bytes(self) -> int:
        """What lives in backward beside gradients, less what this segment and those before it have saved."""
        now = self.position.now
        waiting = (p for p, made_in in self.gradients.items() if made_in >= now and p not in self.dropped)
        gradients = sum(p.numel() * p.element_size() for p in waiting)
        saved = sum(part.saved_bytes for part in self.parts[: now + 1])
        return self.live.current_bytes - self.static_bytes - saved - gradients


def trace_activations(
    module: nn.Module,
    operators: Sequence[Operator],
    calls: Calls,
    *,
    run_step: Callable[[], Any],
    loss_in: Callable[[Any], Tensor],
    static: Sequence[Tensor],
    blocks: Mapping[str, Span] = _NO_BLOCKS,
    choice: str = "keep",
) -> list[Activations]:
    """Saved and workspace bytes of each segment, from one forward and backward.

    Args:
        module: the whole model, on the device that it trains on, without gradients.
        operators: of the model.
        calls: what its forward does.
        run_step: runs forward; what it returns stays alive until backward is over.
        loss_in: the loss (a scalar that requires a gradient) among what it returns.
        static: tensors that live throughout, beside the parameters: buffers and the batch.
        blocks: modules with their segments, see `find_blocks`.
        choice: what these do with what they save: ``keep`` or what `saving_less` can.
    """
    parameters = list(module.parameters())
    with LiveBytes(parameters[0].device.type) as live, ExitStack() as cleanup:
        trace = _Trace(live, operators, calls, [*parameters, *static], blocks)
        cleanup.enter_context(crossed(module, blocks, trace.crossings))
        cleanup.enter_context(followed(dict(module.named_modules()), trace.position, calls))
        for parameter in parameters:
            if parameter.requires_grad:
                cleanup.callback(parameter.register_post_accumulate_grad_hook(trace.drop).remove)
        if choice != "keep":
            cleanup.enter_context(saving_less(module, blocks, choice, trace))
        with torch.autograd.graph.saved_tensors_hooks(trace.keep, lambda packed: packed):
            returned = run_step()
        trace.position.enter(trace.position.num_segments - 1)
        for tensor in tensors_in(returned):
            trace.keep(tensor)
        for segment, found in trace.crossings.by_segment().items():
            trace.parts[segment].crossings = found
        trace.position.start_backward()
        loss_in(returned).backward()
        trace.position.end()
    return trace.parts


def trace_evaluation(
    module: nn.Module, calls: Calls, parts: Sequence[Activations], run_step: Callable[[], Any], static: Sequence[Tensor]
) -> None:
    """Adds what a forward without gradients takes to the segments' bytes; the arguments are those of above."""
    parameters = list(module.parameters())
    with LiveBytes(parameters[0].device.type) as live, torch.no_grad():
        static_bytes = live.track([*parameters, *static])

        def close_part() -> None:
            part = parts[position.now]
            part.evaluation_bytes = max(part.evaluation_bytes, live.peak_bytes - static_bytes)
            live.reset_peak()

        position = Position(calls, close_part)
        with followed(dict(module.named_modules()), position, calls), warnings.catch_warnings():
            # reentrant checkpointing expects to be trained
            warnings.filterwarnings("ignore", message="None of the inputs have requires_grad")
            run_step()
        position.end()


def evaluate_as_training(parts: Sequence[Activations]) -> None:
    """Takes forward without gradients to need what the traced one needs, saved tensors included: never too little."""
    saved_bytes = 0
    for part in parts:
        saved_bytes += part.saved_bytes
        part.evaluation_bytes = saved_bytes + part.forward_workspace_bytes
