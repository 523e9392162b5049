"""Bytes that forward saves for backward, and the workspace beside them, per operator, from one traced step."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_osdp.profiler.live_bytes import LiveBytes
from lightning_osdp.profiler.operators import Operator, floating_tensors


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

    def __init__(self, live: LiveBytes, operators: Sequence[Operator]) -> None:
        self.live, self.operators = live, operators
        # One part per operator, and the loss: what runs after the last operator's call.
        self.parts = [Activations() for _ in range(len(operators) + 1)]
        self.saved_before = [0] * len(self.parts)
        self.static_bytes = live.current_bytes
        self.excluded = {parameter.untyped_storage()._cdata for o in operators for parameter in o.module.parameters()}
        self.seen: set[int] = set()
        self.total_saved = 0
        self.now = 0
        self.in_backward = False

    def exclude(self, tensors: Sequence[Tensor]) -> None:
        self.excluded.update(tensor.untyped_storage()._cdata for tensor in tensors)

    def pack(self, tensor: Tensor) -> Tensor:
        """Hook on every tensor that autograd saves."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self.excluded and key not in self.seen and tensor.device.type == self.live.device_type:
            self.seen.add(key)
            self.parts[self.now].saved_bytes += storage.nbytes()
            self.total_saved += storage.nbytes()
        return tensor.detach()

    def close_part(self) -> None:
        """Books the peak since the last call to the part that ran."""
        part = self.parts[self.now]
        if not self.in_backward:
            beside = self.live.peak_bytes - self.static_bytes - self.total_saved
            part.forward_workspace_bytes = max(part.forward_workspace_bytes, beside)
            self.saved_before[self.now] = self.total_saved
        else:
            parameters = self.operators[self.now].parameters if self.now < len(self.operators) else []
            gradients = sum(p.numel() * p.element_size() for p in parameters if p.requires_grad)
            saved = self.saved_before[self.now]
            beside = self.live.peak_bytes - self.static_bytes - saved - gradients
            part.backward_workspace_bytes = max(part.backward_workspace_bytes, beside)
        self.live.reset_peak()

    def enter(self, index: int) -> None:
        self.close_part()
        self.now = index


def trace_activations(
    module: nn.Module, operators: Sequence[Operator], loss_of: Callable[[], Tensor], static: Sequence[Tensor]
) -> list[Activations]:
    """Saved and workspace bytes of each operator, and last of the loss, from one forward and backward.

    Args:
        module: the whole model, on the device that it trains on.
        operators: in forward order.
        loss_of: runs forward, returns the loss (a scalar that requires a gradient).
        static: tensors that live throughout, beside the parameters: buffers and the batch.
    """
    device_type = next(module.parameters()).device.type
    with LiveBytes(device_type) as live:
        live.track([*module.parameters(), *static])
        trace = _Trace(live, operators)
        trace.exclude(static)
        with _hooks(trace, module):
            with torch.autograd.graph.saved_tensors_hooks(trace.pack, lambda packed: packed):
                loss = loss_of()
            trace.close_part()
            trace.in_backward = True
            trace.now = len(operators)
            loss.backward()
            trace.close_part()
    return trace.parts


@contextmanager
def _hooks(trace: _Trace, module: nn.Module) -> Iterator[None]:
    def drop(parameter: Tensor) -> None:
        # The plan counts gradients itself: here they must not add up.
        parameter.grad = None

    # The operator whose call ends last is the last leaf in forward order; containers close around it.
    last = max((i for i, operator in enumerate(trace.operators) if operator.is_leaf), default=None)
    with ExitStack() as stack:
        for index, operator in enumerate(trace.operators):

            def before(*_: object, index: int = index) -> None:
                trace.enter(index)

            def after(_: object, __: object, output: Any, index: int = index) -> None:
                if index == last:
                    trace.enter(len(trace.operators))
                tensor = next((t for t in floating_tensors(output) if t.requires_grad), None)
                if tensor is not None:
                    tensor.register_hook(lambda _: trace.enter(index))

            stack.callback(operator.module.register_forward_pre_hook(before).remove)
            stack.callback(operator.module.register_forward_hook(after).remove)
        for parameter in module.parameters():
            if parameter.requires_grad:
                stack.callback(parameter.register_post_accumulate_grad_hook(drop).remove)
        yield
