"""Operators of a profile: their parameters, cuts, and exchanges of their activations."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from lightning_osdp.core.affine import ZERO, Affine
from lightning_osdp.core.exchange import Exchange
from lightning_osdp.core.profile import Cut, OperatorProfile, ParameterProfile
from lightning_osdp.operations.splitting import cut_dims, inside_compiled, splittable
from lightning_osdp.operations.stationary import refusal_of_one
from lightning_osdp.profiler.optimizer import OptimizedParameter
from lightning_osdp.profiler.parts.segments import affine
from lightning_osdp.profiler.precision import ComputePrecision
from lightning_osdp.profiler.tracing.calls import Flow
from lightning_osdp.profiler.tracing.operators import Operator
from lightning_osdp.profiler.tracing.trace import Trace


def profile_operators(
    module: nn.Module,
    operators: Sequence[Operator],
    trace: Trace,
    optimized: Mapping[nn.Parameter, OptimizedParameter],
    precision: ComputePrecision,
) -> tuple[OperatorProfile, ...]:
    """Operators with their parameters, and with the dimensions along which they can be split."""
    positions = {parameter: index for index, parameter in enumerate(module.parameters())}
    features = splittable(module)
    batch_size = next(iter(trace.activations))
    profiles = []
    called = {*trace.calls.sequence}
    read = {
        name
        for parts in trace.activations.values()
        for name, part in zip(trace.calls.sequence, parts, strict=False)
        if part.is_read or part.rerun is not None
    }
    for operator in operators:
        is_exempt = precision.is_exempt(operator.module)
        dtype, reduce_dtype = (None, None) if is_exempt else (precision.dtype, precision.reduce_dtype)
        trainable = [p for p in operator.parameters if p.requires_grad]
        profiles.append(
            OperatorProfile(
                name=operator.name,
                kind=type(operator.module).__name__,
                enclosing=operator.enclosing,
                signature=operator.signature,
                stands_alone=is_exempt,
                num_trainable=sum(p.numel() for p in trainable),
                parameter_bytes=bytes_of(operator.parameters),
                gathered_bytes=bytes_of(operator.parameters, dtype),
                trainable_bytes=bytes_of(trainable),
                gradient_bytes=bytes_of(operator.gradients, dtype),
                optimizer_bytes=sum(optimized[p].state_bytes for p in trainable if p in optimized),
                is_read=operator.name in read or operator.name not in called,
                parameters=tuple(
                    ParameterProfile(
                        position=positions[p],
                        num_elements=p.numel(),
                        itemsize=p.element_size(),
                        gathered_itemsize=_itemsize(p, dtype),
                        reduced_itemsize=_itemsize(p, reduce_dtype) if reduce_dtype else None,
                        num_rows=p.shape[0] if p.dim() else 1,
                        is_trainable=p.requires_grad,
                        state_bytes_per_element=optimized[p].state_bytes / max(1, p.numel()) if p in optimized else 0.0,
                        group=optimized[p].group if p in optimized else 0,
                        place=optimized[p].place if p in optimized else 0,
                    )
                    for p in operator.parameters
                ),
                dtype=", ".join(dict.fromkeys(str(p.dtype).removeprefix("torch.") for p in operator.parameters)),
                cut=_cut(operator, features.get(operator.name), trace.calls.flows, batch_size),
            )
        )
    return tuple(profiles)


def _cut(operator: Operator, num_features: int | None, flows: Mapping[str, Flow], batch_size: int) -> Cut | None:
    """Cut of an operator; None where it cannot be split, or cannot be a unit of its own."""
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


def profile_exchanges(
    module: nn.Module, operators: Sequence[OperatorProfile], trace: Trace, *, is_followed: bool
) -> tuple[Exchange, ...]:
    """Operators, by themselves and several together, whose activations can move in place of their weights.

    Each can be a unit, is trained as a whole, is called once, has no hooks, and is not compiled. An operator with
    features on both sides could move them in two ways: the one that sends fewer bytes is taken. Where the trace has
    not followed what operators are given and give, there are neither pairs nor columns of one input, and each is taken
    to save nothing of its input for itself: gathered inputs are then predicted to take one input more than they do.
    """
    features, in_graphs = splittable(module), inside_compiled(module)
    may = {
        operator.name
        for operator in operators
        if operator.name in features
        and operator.enclosing[0] == operator.name
        and operator.trainable_bytes == operator.parameter_bytes > 0
        and not operator.stands_alone
        and module.get_submodule(operator.name) not in in_graphs
        and not refusal_of_one(module, operator.name)
    }
    embeddings = {name for name in may if isinstance(module.get_submodule(name), nn.Embedding)}
    if not is_followed:
        alone = {name for name in may - trace.calls.apart if len(trace.calls.spans.get(name, ())) == 1}
        return tuple(
            _by_first_call(each, each.cut, is_embedding=each.name in embeddings)
            for each in operators
            if each.name in alone and each.cut
        )
    sequence, found = trace.calls.sequence, list[Exchange]()
    for index, name in enumerate(sequence):
        at = {size: parts[index] for size, parts in trace.activations.items()}
        if name not in may or any(part.handed is None for part in at.values()):
            continue
        handed = {size: part.handed for size, part in at.items() if part.handed is not None}
        first = handed[next(iter(handed))]
        given = affine({size: each.input_bytes for size, each in handed.items()})
        needed = affine({size: each.input_gradient_bytes for size, each in handed.items()})
        saved = affine({size: part.own_saved_bytes for size, part in at.items()})
        made = affine({size: each.output_bytes for size, each in handed.items()})
        kind = _kind_alone(first.input_bytes, first.output_bytes, is_embedding=name in embeddings)
        found.append(Exchange(kind, (name,), given, needed, made, saved))
        place, by_heads = _attended(trace, index, num_projections=1)
        if by_heads and may - embeddings >= {name, sequence[place]}:
            found.append(_with_output(found[-1], trace, index, place, by_heads))
        is_pair = first.feeds is not None
        behind = [each for each in (first.beside, first.feeds) if each is not None] if is_pair else first.columns
        places = [index, *(index + each for each in behind)]
        members = tuple(sequence[place] for place in places)
        is_always = len({(each.feeds, each.beside, each.columns) for each in handed.values()}) == 1
        outputs = _outputs(trace, places)
        # columns of one input send it once, where each by itself sends it or its output, whichever is less
        given_bytes, sent_bytes = given.per_sample, [each.per_sample for each in outputs]
        is_less = is_pair or given_bytes < sum(min(given_bytes, each) for each in sent_bytes)
        if is_less and places == sorted(places) and may - embeddings >= {*members} and is_always and len(outputs) > 1:
            saved, *saved_again = (
                affine(dict(zip(at, sizes, strict=True)))
                for sizes in zip(*(part.joint_saved_bytes for part in at.values()), strict=True)
            )
            kind, made = ("pair", outputs[-1]) if is_pair else ("column", sum(outputs, ZERO))
            exchange = Exchange(
                kind,
                members,
                *(given, needed, made, saved),
                saved_again=tuple(saved_again),
                outputs=() if is_pair else outputs,
            )
            found.append(exchange)
            place, by_heads = _attended(trace, index, num_projections=len(members))
            if by_heads and sequence[place] in may - embeddings:
                found.append(_with_output(exchange, trace, index, place, by_heads))
    return tuple(found)


def _attended(trace: Trace, index: int, *, num_projections: int) -> tuple[int, str]:
    """Place of the operator that takes what is made by heads of so many from this one on, and the kind of exchange.

    The kind is empty where there is none.
    """
    found = {
        (index + handed.attended, handed.by_heads)
        if handed.attended and handed.num_projections == num_projections
        else (index, "")
        for parts in trace.activations.values()
        if (handed := parts[index].handed) is not None
    }
    return next(iter(found)) if len(found) == 1 else (index, "")


def _with_output(columns: Exchange, trace: Trace, index: int, attended: int, kind: str) -> Exchange:
    """Exchange of an operator, or of columns of one input, together with the operator at this place, by heads."""
    at = {size: parts[attended] for size, parts in trace.activations.items()}
    handed = {size: part.handed for size, part in at.items() if part.handed is not None}
    heads = [each.num_heads for parts in trace.activations.values() if (each := parts[index].handed) is not None]
    return dataclasses.replace(
        columns,
        kind=kind,
        operators=(*columns.operators, trace.calls.sequence[attended]),
        output_bytes=affine({size: each.output_bytes for size, each in handed.items()}),
        saved_again=(*columns.saved_again, affine({size: part.own_saved_bytes for size, part in at.items()})),
        outputs=columns.outputs or (columns.output_bytes,),
        fed_bytes=affine({size: each.input_bytes for size, each in handed.items()}),
        num_heads=math.gcd(*heads),
    )


def _outputs(trace: Trace, places: Sequence[int]) -> tuple[Affine, ...]:
    """Outputs of operators at these places; empty where one is not known."""
    found = [{size: parts[place].handed for size, parts in trace.activations.items()} for place in places]
    if any(handed is None for of_place in found for handed in of_place.values()):
        return ()
    return tuple(
        affine({size: each.output_bytes for size, each in of_place.items() if each is not None}) for of_place in found
    )


def _by_first_call(operator: OperatorProfile, cut: Cut, *, is_embedding: bool) -> Exchange:
    """Exchange of an operator alone, by the bytes of its first call."""
    bytes_of_one = (each.per_sample for each in (cut.input_bytes, cut.output_bytes))
    return Exchange(
        _kind_alone(*bytes_of_one, is_embedding=is_embedding),
        (operator.name,),
        input_bytes=cut.input_bytes,
        input_gradient_bytes=cut.input_gradient_bytes,
        output_bytes=cut.output_bytes,
    )


def _kind_alone(input_bytes: float, output_bytes: float, *, is_embedding: bool) -> str:
    """Kind of the exchange of an operator alone that sends fewer bytes."""
    return "embedding" if is_embedding else "column" if input_bytes <= output_bytes else "row"


def bytes_of(tensors: Iterable[Tensor], dtype: torch.dtype | None = None) -> int:
    """Bytes of all tensors, floating-point tensors as if they had ``dtype`` where that is given."""
    return sum(t.numel() * _itemsize(t, dtype) for t in tensors)


def _itemsize(tensor: Tensor, dtype: torch.dtype | None) -> int:
    return dtype.itemsize if dtype and tensor.is_floating_point() else tensor.element_size()
