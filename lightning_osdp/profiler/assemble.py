"""What was measured of a model, put together as its profile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lightning_osdp.core.profile import ModelProfile, OperatorProfile
from lightning_osdp.profiler.activations import Activations
from lightning_osdp.profiler.affine import Affine
from lightning_osdp.profiler.operators import Operator, fingerprint
from lightning_osdp.profiler.optimizer import OptimizerProfile
from lightning_osdp.profiler.tensors import tensors_in
from lightning_osdp.profiler.timing import Seconds


@dataclass(frozen=True)
class Timing:
    """Seconds of one micro-batch of this size."""

    size: int
    operators: Mapping[str, Seconds]
    """By signature."""
    step: Seconds


def assemble(
    module: nn.Module,
    operators: Sequence[Operator],
    *,
    activations: Sequence[Activations],
    timings: Sequence[Timing],
    optimizers: OptimizerProfile,
    batch: Any,
    batch_size: int,
    compute_dtype: torch.dtype | None,
) -> ModelProfile:
    """The profile of a model from its parts.

    Args:
        module: the model.
        operators: in forward order.
        activations: of each operator, and last of the loss.
        timings: of the profiled batch, and of another size where that could be measured.
        optimizers: their state and step.
        batch: the profiled batch.
        batch_size: its samples.
        compute_dtype: dtype of gathered parameters under mixed precision; None: as they are.
    """
    profiles = []
    *parts, loss = activations
    for operator, part in zip(operators, parts, strict=True):
        taken = [
            (timing.size, timing.operators.get(operator.signature, Seconds()) if operator.is_leaf else Seconds())
            for timing in timings
        ]
        forward = _affine([(size, operator.num_calls * seconds.forward_s) for size, seconds in taken])
        backward = _affine([(size, operator.num_calls * seconds.backward_s) for size, seconds in taken])
        trainable = [p for p in operator.parameters if p.requires_grad]
        profiles.append(
            OperatorProfile(
                name=operator.name,
                kind=type(operator.module).__name__,
                enclosing=operator.enclosing,
                num_calls=operator.num_calls,
                signature=operator.signature,
                num_trainable=sum(p.numel() for p in trainable),
                parameter_bytes=_bytes(operator.parameters),
                gathered_bytes=_bytes(operator.parameters, compute_dtype),
                trainable_bytes=_bytes(trainable),
                gradient_bytes=_bytes(operator.gradients, compute_dtype),
                optimizer_bytes=sum(optimizers.state_bytes.get(p, 0) for p in trainable),
                forward_s_per_sample=forward.per_sample_s,
                backward_s_per_sample=backward.per_sample_s,
                forward_fixed_s=forward.fixed_s,
                backward_fixed_s=backward.fixed_s,
                activation_bytes_per_sample=part.saved_bytes / batch_size,
                forward_workspace_bytes_per_sample=part.forward_workspace_bytes / batch_size,
                backward_workspace_bytes_per_sample=part.backward_workspace_bytes / batch_size,
            )
        )
    # Replayed alone an operator may take longer than inside the step; the rest is never negative.
    other = _affine([(timing.size, max(0.0, timing.step.total_s - _in(operators, timing))) for timing in timings])
    return ModelProfile(
        operators=tuple(profiles),
        fingerprint=fingerprint(module),
        profiled_batch_size=batch_size,
        other_s_per_sample=other.per_sample_s,
        other_fixed_s=other.fixed_s,
        optimizer_s_per_element=optimizers.s_per_element,
        optimizer_is_foreach=optimizers.is_foreach,
        optimizer_workspace_ratio=optimizers.workspace_ratio,
        loss_activation_bytes_per_sample=loss.saved_bytes / batch_size,
        loss_forward_workspace_bytes_per_sample=loss.forward_workspace_bytes / batch_size,
        loss_backward_workspace_bytes_per_sample=loss.backward_workspace_bytes / batch_size,
        buffer_bytes=_bytes(list(module.buffers())),
        batch_bytes_per_sample=_bytes(list(tensors_in(batch))) / batch_size,
    )


def _affine(seconds: Sequence[tuple[int, float]]) -> Affine:
    """Time over the micro-batch from one or two measured (size, seconds), the first of them exact."""
    (size, exactly), *others = seconds
    return Affine.through(size, exactly, *others[0]) if others else Affine.proportional(size, exactly)


def _in(operators: Sequence[Operator], timing: Timing) -> float:
    """Seconds of all operators together."""
    leaves = [operator for operator in operators if operator.is_leaf]
    return sum(o.num_calls * timing.operators.get(o.signature, Seconds()).total_s for o in leaves)


def _bytes(tensors: Sequence[Tensor], dtype: torch.dtype | None = None) -> int:
    return sum(t.numel() * (dtype.itemsize if dtype and t.is_floating_point() else t.element_size()) for t in tensors)
