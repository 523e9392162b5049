"""Bytes that forward saves for backward, and the workspace beside them, per operator, from one traced step."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_osdp.profiler.calls import floating_tensors
from lightning_osdp.profiler.live_bytes import LiveBytes
from lightning_osdp.profiler.operators import Operator
from lightning_osdp.profiler.tensors import tensors_in


@dataclass
class Activations:
    """Bytes of one operator's part of a step: from its call to the next operator's, and the same span in backward."""

    saved_bytes: int = 0
    forward_workspace_bytes: int = 0
    """Most live bytes beside parameters, batch and everything saved so far, this part included."""
    backward_workspace_bytes: int = 0
    """Most live bytes beside those and the operator's own gradients."""


class _Trace:
    """Follows one forward and backward, splitting time at the operators' calls and their outputs' gradients."""

    def __init__(self, live: LiveBytes, operators: Sequence[Operator], static: Sequence[Tensor]) -> None:
        self.live, self.operators = live, operators
        live.track(static)
        self.static_bytes = live.current_bytes
        self.excluded = {tensor.untyped_storage()._cdata for tensor in static if tensor.layout is torch.strided}
        # One part per operator, and the loss: what runs after the last operator's call.
        self.parts = [Activations() for _ in range(len(operators) + 1)]
        self.saved_before = [0] * len(self.parts)
        self.saved_in: dict[int, int] = {}
        self.total_saved = 0
        self.now = 0
        self.in_backward = False
        # Gradients that may be alive, by the part that made them, and those that have been dropped since.
        self.gradients: dict[Tensor, int] = {}
        self.dropped: set[Tensor] = set()

    def keep(self, tensor: Tensor) -> Tensor:
        """Books a tensor that lives until backward; also the hook on every tensor that autograd saves."""
        if tensor.device.type == self.live.device_type and tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key not in self.excluded and key not in self.saved_in:
                self.saved_in[key] = self.now
                self._book(self.now, storage.nbytes())
                weakref.finalize(storage, self._freed, key, storage.nbytes()).atexit = False
        return tensor.detach()

    def _freed(self, key: int, num_bytes: int) -> None:
        """A graph that the loss does not need was dropped in forward."""
        part = self.saved_in.pop(key)
        if not self.in_backward:
            self._book(part, -num_bytes)

    def _book(self, part: int, num_bytes: int) -> None:
        self.parts[part].saved_bytes += num_bytes
        self.total_saved += num_bytes

    def close_part(self) -> None:
        """Books the peak since the last call to the part that ran."""
        part = self.parts[self.now]
        if not self.in_backward:
            beside = self.live.peak_bytes - self.static_bytes - self.total_saved
            part.forward_workspace_bytes = max(part.forward_workspace_bytes, beside)
            self.saved_before[self.now] = self.total_saved
        else:
            # The plan counts a gradient from the last operator that makes it on; one made before that is workspace.
            alive = (p for p, made_in in self.gradients.items() if made_in >= self.now)
            gradients = sum(p.numel() * p.element_size() for p in alive)
            beside = self.live.peak_bytes - self.static_bytes - self.saved_before[self.now] - gradients
            part.backward_workspace_bytes = max(part.backward_workspace_bytes, beside)
            self.gradients = {p: made_in for p, made_in in self.gradients.items() if p not in self.dropped}
        self.live.reset_peak()

    def enter(self, index: int) -> None:
        self.close_part()
        self.now = index
        if self.in_backward and index < len(self.operators):
            self.gradients.update((p, index) for p in self.operators[index].gradients if p not in self.dropped)

    def drop(self, parameter: Tensor) -> None:
        """Frees a gradient that is complete: the plan counts gradients itself, here they must not add up."""
        parameter.grad = None
        self.dropped.add(parameter)


def trace_activations(
    module: nn.Module,
    operators: Sequence[Operator],
    run_step: Callable[[], Any],
    loss_in: Callable[[Any], Tensor],
    static: Sequence[Tensor],
    *,
    last: str,
) -> list[Activations]:
    """Saved and workspace bytes of each operator, and last of the loss, from one forward and backward.

    Args:
        module: the whole model, on the device that it trains on, without gradients.
        operators: in forward order.
        run_step: runs forward; what it returns stays alive until backward is over.
        loss_in: the loss (a scalar that requires a gradient) among what it returns.
        static: tensors that live throughout, beside the parameters: buffers and the batch.
        last: name of the operator whose last call ends last; the loss follows.
    """
    parameters = list(module.parameters())
    with LiveBytes(parameters[0].device.type) as live:
        trace = _Trace(live, operators, [*parameters, *static])
        with _hooks(trace, parameters, last):
            with torch.autograd.graph.saved_tensors_hooks(trace.keep, lambda packed: packed):
                returned = run_step()
            trace.now = len(operators)
            for tensor in tensors_in(returned):
                trace.keep(tensor)
            trace.close_part()
            trace.in_backward = True
            loss_in(returned).backward()
            trace.close_part()
    return trace.parts


@contextmanager
def _hooks(trace: _Trace, parameters: Sequence[Tensor], last: str) -> Iterator[None]:
    calls_left = {index: operator.num_calls for index, operator in enumerate(trace.operators) if operator.name == last}

    with ExitStack() as cleanup:

        def after(index: int, output: Any) -> None:
            if index in calls_left:
                calls_left[index] -= 1
                if calls_left[index] == 0:
                    trace.enter(len(trace.operators))
            tensor = next((t for t in floating_tensors(output) if t.requires_grad), None)
            if tensor is not None:
                # Removed at the end, for a module may return its parameter.
                cleanup.callback(tensor.register_hook(lambda _: trace.enter(index)).remove)

        for index, operator in enumerate(trace.operators):
            before = operator.module.register_forward_pre_hook(lambda *_, index=index: trace.enter(index))
            cleanup.callback(before.remove)
            following = operator.module.register_forward_hook(lambda _, __, output, index=index: after(index, output))
            cleanup.callback(following.remove)
        for parameter in parameters:
            if parameter.requires_grad:
                cleanup.callback(parameter.register_post_accumulate_grad_hook(trace.drop).remove)
        yield
