"""What was measured of a model, put together as its profile."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from lightning_osdp.core.affine import Affine
from lightning_osdp.core.profile import (
    Cut,
    ModelProfile,
    OperatorProfile,
    ParameterProfile,
    Segment,
)
from lightning_osdp.profiler.optimizer import OptimizedParameter
from lightning_osdp.profiler.precision import ComputePrecision
from lightning_osdp.profiler.timing.step_time import Seconds
from lightning_osdp.profiler.tracing.calls import Flow
from lightning_osdp.profiler.tracing.operators import Operator, find_operators, fingerprint
from lightning_osdp.profiler.tracing.segment_bytes import (
    affine,
    profile_blocks,
    profile_crossings,
    saved_before,
    segment_bytes,
)
from lightning_osdp.profiler.tracing.trace import Trace
from lightning_osdp.splitting import cut_dims, splittable


def assemble(
    module: nn.Module,
    trace: Trace,
    *,
    seconds: Mapping[int, Seconds],
    optimized: Mapping[nn.Parameter, OptimizedParameter],
    batch_size: int,
    precision: ComputePrecision,
    activations: Sequence[str],
) -> ModelProfile:
    """The profile of a model from its parts, but for its batch and the optimizer's step.

    Args:
        module: the model.
        trace: what its step does.
        seconds: of micro-batches of the profiled size, and of another one where that could be run.
        optimized: what the optimizers make of each parameter.
        batch_size: samples of the profiled batch.
        precision: dtypes of computing.
        activations: what blocks may do with what they save.
    """
    operators = find_operators(module, trace.calls)
    segments = _segments(operators, trace, seconds)
    positions = {parameter: index for index, parameter in enumerate(module.parameters())}
    names = {operator.name for operator in operators if operator.name}
    features = splittable(module)
    around = {name for operator in operators for name in operator.enclosing if name}
    return ModelProfile(
        operators=tuple(
            replace(
                _operator(operator, positions, optimized, precision),
                cut=_cut(operator, features.get(operator.name), trace.calls.flows, batch_size),
            )
            for operator in operators
        ),
        segments=segments,
        spans={
            # a block's own segments are those of its operators
            name: tuple(spans) if name in trace.blocks else trace.calls.spans_of(name)
            for name, spans in trace.calls.spans.items()
            if name in names | around
        },
        blocks=profile_blocks(trace, segments, activations),
        crossings=profile_crossings(trace),
        fingerprint=fingerprint(module),
        profiled_batch_size=batch_size,
        buffer_bytes=_bytes(list(module.buffers())),
    )


def _operator(
    operator: Operator,
    positions: Mapping[nn.Parameter, int],
    optimized: Mapping[nn.Parameter, OptimizedParameter],
    precision: ComputePrecision,
) -> OperatorProfile:
    compute_dtype, reduce_dtype = precision.dtype_of(operator.module), precision.reduce_dtype_of(operator.module)
    trainable = [p for p in operator.parameters if p.requires_grad]
    return OperatorProfile(
        name=operator.name,
        kind=type(operator.module).__name__,
        enclosing=operator.enclosing,
        signature=operator.signature,
        stands_alone=precision.is_exempt(operator.module),
        num_trainable=sum(p.numel() for p in trainable),
        parameter_bytes=_bytes(operator.parameters),
        gathered_bytes=_bytes(operator.parameters, compute_dtype),
        trainable_bytes=_bytes(trainable),
        gradient_bytes=_bytes(operator.gradients, compute_dtype),
        optimizer_bytes=sum(optimized[p].state_bytes for p in trainable if p in optimized),
        parameters=tuple(
            replace(
                _parameter(p, positions[p], optimized.get(p), compute_dtype),
                reduced_itemsize=_itemsize(p, reduce_dtype) if reduce_dtype else None,
            )
            for p in operator.parameters
        ),
        dtype=", ".join(dict.fromkeys(str(p.dtype).removeprefix("torch.") for p in operator.parameters)),
    )


def _cut(operator: Operator, num_features: int | None, flows: Mapping[str, Flow], batch_size: int) -> Cut | None:
    """None where it cannot be split, or is not a unit of its own anyway."""
    if num_features is None or operator.enclosing[0] != operator.name or operator.name not in flows:
        return None
    dims, flow = cut_dims(operator.module), flows[operator.name]
    names = {parameter: name for name, parameter in operator.module.named_parameters(recurse=False)}
    return Cut(
        num_features=num_features,
        is_cut=tuple(names[parameter] in dims for parameter in operator.parameters),
        cuts_rows=0 in dims.values(),
        input_bytes=Affine.proportional(batch_size, flow.input_bytes),
        input_gradient_bytes=Affine.proportional(batch_size, flow.input_gradient_bytes),
        output_bytes=Affine.proportional(batch_size, flow.output_bytes),
    )


def _parameter(
    parameter: nn.Parameter, position: int, optimized: OptimizedParameter | None, compute_dtype: torch.dtype | None
) -> ParameterProfile:
    return ParameterProfile(
        position=position,
        num_elements=parameter.numel(),
        itemsize=parameter.element_size(),
        gathered_itemsize=_itemsize(parameter, compute_dtype),
        num_rows=parameter.shape[0],
        is_trainable=parameter.requires_grad,
        state_bytes_per_element=optimized.state_bytes / max(1, parameter.numel()) if optimized else 0.0,
        group=optimized.group if optimized else 0,
        place=optimized.place if optimized else 0,
    )


def _segments(operators: Sequence[Operator], trace: Trace, seconds: Mapping[int, Seconds]) -> tuple[Segment, ...]:
    """Seconds are the mean over segments that are alike: equal operators, followed by equal ones, saving as much."""
    names = [*trace.calls.sequence, ""]
    signatures = {operator.name: operator.signature for operator in operators if operator.name}
    alike: dict[tuple[object, ...], list[int]] = {}
    for index, name in enumerate(names):
        following = names[index + 1] if index + 1 < len(names) else ""
        saved = tuple(parts[index].saved_bytes for parts in trace.activations.values())
        alike.setdefault((signatures.get(name), signatures.get(following), saved), []).append(index)
    group_of = {index: group for group in alike.values() for index in group}

    def mean_s(index: int, of: Callable[[Seconds], Sequence[float]]) -> Affine:
        group = group_of[index]
        return affine({size: sum(of(each)[i] for i in group) / len(group) for size, each in seconds.items()})

    before = saved_before(trace.activations)
    return tuple(
        Segment(
            operator=name,
            forward_s=mean_s(index, lambda each: each.forward_s),
            backward_s=mean_s(index, lambda each: each.backward_s),
            **segment_bytes(trace.activations, index, before[index]),
        )
        for index, name in enumerate(names)
    )


def _itemsize(tensor: Tensor, dtype: torch.dtype | None) -> int:
    return dtype.itemsize if dtype and tensor.is_floating_point() else tensor.element_size()


def _bytes(tensors: Sequence[Tensor], dtype: torch.dtype | None = None) -> int:
    return sum(t.numel() * _itemsize(t, dtype) for t in tensors)
