"""Seconds of operators and of the whole forward and backward, on the device that trains."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from lightning_osdp.core.progress import Progress, silent
from lightning_osdp.profiler.calls import floating_tensors
from lightning_osdp.profiler.operators import Operator

_REPEATS = 3
_REPEAT_BUDGET_S = 1.5
"""What takes longer than this all together is not repeated further."""


@dataclass(frozen=True)
class Seconds:
    """Forward and backward of one micro-batch."""

    forward_s: float = 0.0
    backward_s: float = 0.0

    @property
    def total_s(self) -> float:
        """Both."""
        return self.forward_s + self.backward_s


def synchronize(device: torch.device) -> None:
    """Waits until the device has done what it was asked to."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def time_step(module: nn.Module, device: torch.device, loss_of: Callable[[], Tensor]) -> Seconds:
    """Fastest of a few whole forwards and backwards of one micro-batch, after one to warm up."""

    def step() -> Seconds:
        module.zero_grad()  # gradients that are there already would be added to
        return _timed(device, loss_of, lambda loss: loss.backward())

    return _fastest(step)


def time_operators(
    operators: Sequence[Operator],
    device: torch.device,
    run_step: Callable[[], object],
    *,
    stage: str = "timing",
    progress: Progress = silent,
) -> dict[str, Seconds]:
    """Seconds of each distinct operator by signature, from replaying it on the inputs that forward gives it.

    Only operators without others inside are replayed; the rest of the step is what `time_step` finds beyond them.
    """
    found: dict[str, Seconds] = {}
    num_distinct = len({operator.signature for operator in operators if operator.is_leaf})
    with _replays(operators, device, found, lambda: progress(stage, f"operator {len(found) + 1} of {num_distinct}")):
        run_step()
    return found


def _fastest(measure: Callable[[], Seconds]) -> Seconds:
    start = time.perf_counter()
    measure()
    best: Seconds | None = None
    for _ in range(_REPEATS):
        seconds = measure()
        best = seconds if best is None or seconds.total_s < best.total_s else best
        if time.perf_counter() - start > _REPEAT_BUDGET_S:
            break
    assert best is not None
    return best


def _timed(device: torch.device, forward: Callable[[], Any], backward: Callable[[Any], object]) -> Seconds:
    synchronize(device)
    start = time.perf_counter()
    output = forward()
    synchronize(device)
    middle = time.perf_counter()
    backward(output)
    synchronize(device)
    return Seconds(middle - start, time.perf_counter() - middle)


@contextmanager
def _replays(
    operators: Sequence[Operator], device: torch.device, found: dict[str, Seconds], on_next: Callable[[], None]
) -> Iterator[None]:
    with ExitStack() as stack:
        for operator in operators:
            if operator.is_leaf:

                def before(
                    m: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], operator: Operator = operator
                ) -> None:
                    if operator.signature not in found:
                        on_next()
                        found[operator.signature] = _replay(operator, device, args, kwargs)

                stack.callback(operator.module.register_forward_pre_hook(before, with_kwargs=True).remove)
        yield


def _replay(operator: Operator, device: torch.device, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Seconds:
    """Fastest of a few calls on copies of the inputs, which the operator may write to."""
    requires_grad = iter(operator.grad_inputs)

    def leaf(tensor: Tensor) -> Tensor:
        copy = tensor.detach().clone()
        return copy.requires_grad_(next(requires_grad, False)) if copy.is_floating_point() else copy

    leaves = tree_map_only(Tensor, leaf, (args, kwargs))
    parameters = [p for p in operator.module.parameters() if p.requires_grad]
    wanted = [t for t in floating_tensors(leaves) if t.requires_grad] + parameters

    def backward(output: Any) -> None:
        outputs = [t for t in floating_tensors(output) if t.requires_grad]
        if outputs and wanted:
            torch.autograd.grad(outputs, wanted, [torch.ones_like(t) for t in outputs], allow_unused=True)

    def measure() -> Seconds:
        args, kwargs = tree_map_only(Tensor, torch.clone, leaves)
        return _timed(device, lambda: operator.module.forward(*args, **kwargs), backward)

    # Hooks of our own, for those of a checkpointed block around would recompute it.
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
    with torch.set_grad_enabled(operator.with_grad), hooks:
        return _fastest(measure)
