"""Operators cut into slices: their sizes, and what a profile becomes where each is an operator of its own.

Slices of x and W are multiplied one after the other, and their products added up (OSDP, "operator splitting"). With x
and y the bytes of input and output, G of the input's gradient, k slices, s = 1 / k, and A what the operator's segment
saves, x among it where that is new:

- forward of slice i: the sum so far and, from the second slice on, the product to be added: y, then 2 y;
- backward of slice i, from the last one on: the output's gradient y, what is saved of x, and of the input's gradient
  the part of this slice, s G, and the whole one, G, from the second of them on; where the operator is frozen, the last
  one ends its segment's backward, with what that takes after the operator's own, such as a sum of G with others;
- a slice's gradients are complete, and reduced, before the next one's backward begins.

[Empirical: counted on one rank of eight, in float32 and bf16-mixed.]
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from lightning_osdp.core.affine import ZERO, Affine
from lightning_osdp.core.profile import Cut, ModelProfile, OperatorProfile, ParameterProfile, Rerun, Segment, Span
from lightning_osdp.errors import ConfigurationError


def slice_sizes(num_features: int, num_slices: int) -> tuple[int, ...]:
    """Number of features of each slice: as even as possible, the larger slices first.

    Raises:
        ConfigurationError: there are not as many features as slices, or no slice is asked for.

    Example:
        >>> slice_sizes(10, 4)
        (3, 3, 2, 2)
    """
    if not 1 <= num_slices <= num_features:
        raise ConfigurationError(
            f"Expected between 1 and {num_features} slices, one feature in each at least, got {num_slices}."
            " Ask for fewer slices, or leave the operator whole."
        )
    size, rest = divmod(num_features, num_slices)
    return (size + 1,) * rest + (size,) * (num_slices - rest)


def slice_names(operator: str, num_slices: int) -> tuple[str, ...]:
    """Qualified names of the slices of an operator; the operator's own name for one slice, which is not split."""
    if num_slices == 1:
        return (operator,)
    return tuple(f"{operator}.slices.{index}" for index in range(num_slices))


def split_operators(profile: ModelProfile, num_slices: Mapping[str, int], *, slice_s: float = 0.0) -> ModelProfile:
    """Profile with these operators split: each slice is an operator, and a unit of its own in any partition.

    Activations of blocks are chosen before: the result has no blocks.

    Args:
        profile: of the whole operators.
        num_slices: operator -> its number of slices.
        slice_s: seconds of each slice after the first, as in `Cluster.slice_s`.

    Raises:
        ConfigurationError: an operator cannot be split, or not into so many slices.
    """
    chosen = {name: number for name, number in num_slices.items() if number > 1}
    if not chosen:
        return profile
    by_name = {operator.name: operator for operator in profile}
    operators: list[OperatorProfile] = []
    for operator in profile:
        operators += _slices(operator, chosen[operator.name]) if operator.name in chosen else [operator]
    segments: list[Segment] = []
    places: list[Span] = []
    """First and last new segment of each old one."""
    handed = ZERO
    for segment in profile.segments:
        first = len(segments)
        number = chosen.get(segment.operator, 1)
        cut = _cut(by_name[segment.operator]) if number > 1 else None
        segments += [segment] if cut is None else _segments(segment, cut, number, handed, slice_s)
        places.append((first, len(segments) - 1))
        handed = segment.handed_bytes
    spans = {
        name: tuple((places[first][0], places[last][1]) for first, last in calls)
        for name, calls in profile.spans.items()
    }
    for name, number in chosen.items():
        firsts = [places[first][0] for first, _ in profile.spans[name]]
        for index, part in enumerate(slice_names(name, number)):
            spans[part] = tuple((first + index, first + index) for first in firsts)
    return replace(
        profile,
        operators=tuple(operators),
        segments=tuple(segments),
        spans=spans,
        blocks=(),
        crossings=(),
        rerun={
            name: Rerun(
                (places[first][0], places[last][1]),
                is_early,
                tuple(part for module in modules for part in slice_names(module, chosen.get(module, 1))),
            )
            for name, ((first, last), is_early, modules) in profile.rerun.items()
        },
        copied=tuple(((places[first][0], places[last][1]), num_bytes) for (first, last), num_bytes in profile.copied),
    )


def _cut(operator: OperatorProfile) -> Cut:
    if operator.cut is None:
        raise ConfigurationError(
            f"Expected an operator that can be split, got {operator.name!r} ({operator.kind}). Leave it whole."
        )
    return operator.cut


def _slices(operator: OperatorProfile, num_slices: int) -> Iterator[OperatorProfile]:
    cut = _cut(operator)
    sizes = slice_sizes(cut.num_features, num_slices)
    elements = sum(parameter.num_elements for parameter in operator.parameters if parameter.is_trainable)
    for index, (name, size) in enumerate(zip(slice_names(operator.name, num_slices), sizes, strict=True)):
        parameters = tuple(_parameters(operator, cut, size, is_last=index == num_slices - 1))
        trainable = [parameter for parameter in parameters if parameter.is_trainable]
        num_trainable = sum(parameter.num_elements for parameter in trainable)
        gathered = [parameter.num_elements * parameter.gathered_itemsize for parameter in parameters]
        yield replace(
            operator,
            name=name,
            enclosing=(name, *operator.enclosing[1:]),
            signature=f"{operator.signature}[{size}{' and the rest' if index == num_slices - 1 else ''}]",
            parameters=parameters,
            parameter_bytes=sum(parameter.num_elements * parameter.itemsize for parameter in parameters),
            num_trainable=num_trainable,
            gathered_bytes=sum(gathered),
            trainable_bytes=sum(parameter.num_elements * parameter.itemsize for parameter in trainable),
            gradient_bytes=sum(parameter.num_elements * parameter.gathered_itemsize for parameter in trainable),
            optimizer_bytes=round(operator.optimizer_bytes * num_trainable / max(1, elements)),
            stands_alone=True,
            is_read=True,
            cut=None,
        )


def _parameters(operator: OperatorProfile, cut: Cut, size: int, *, is_last: bool) -> Iterator[ParameterProfile]:
    for parameter, is_cut in zip(operator.parameters, cut.is_cut, strict=True):
        if is_cut:
            num_rows = size if cut.cuts_rows else parameter.num_rows
            yield replace(parameter, num_elements=parameter.num_elements // cut.num_features * size, num_rows=num_rows)
        elif is_last:
            yield parameter


def _segments(segment: Segment, cut: Cut, num_slices: int, handed: Affine, slice_s: float) -> Iterator[Segment]:
    """Segments of the slices; work between the operator and the next one stays in the last slice's segment.

    ``handed`` are bytes alive when the operator is called, beside saved ones; x is among them where no segment saves x.
    """
    x, y, gradient = cut.input_bytes, cut.output_bytes, cut.input_gradient_bytes
    saved_x = _least(x, segment.saved_bytes)
    besides = _most(handed, saved_x)
    # in backward, a block that runs again makes its tensors again, as if they had been saved
    x_again = saved_x + _least(x, segment.made_again_bytes)
    settled = segment.settled_bytes
    between = None if settled is None else settled + x_again + y  # live from one slice's backward to the next
    to_the_end = segment.saved_bytes + segment.backward_workspace_bytes  # what is saved counts from the last slice on
    sizes = slice_sizes(cut.num_features, num_slices)
    for index, (name, size) in enumerate(zip(slice_names(segment.operator, num_slices), sizes, strict=True)):
        share = size / cut.num_features
        part = gradient * share
        products = y + y if index else y
        more_s = Affine(slice_s / 2 if index else 0.0)
        timed = {"forward_s": segment.forward_s * share + more_s, "backward_s": segment.backward_s * share + more_s}
        if index == num_slices - 1:
            yield replace(
                segment,
                operator=name,
                forward_workspace_bytes=_most(
                    segment.forward_workspace_bytes, (besides + products).less(segment.saved_bytes)
                ),
                settled_bytes=None if settled is None else (settled + x_again + y + part).less(gradient),
                ending_bytes=None,
                passed_bytes=between,
                evaluation_bytes=_most(segment.evaluation_bytes, x + products),
                **timed,
            )
        else:
            workspace = segment.made_before_bytes + x_again + y + gradient + part
            yield Segment(
                operator=name,
                forward_workspace_bytes=besides + products,
                handed_bytes=besides + y,
                backward_workspace_bytes=workspace if index or settled is not None else _most(workspace, to_the_end),
                rerun_workspace_bytes=segment.rerun_workspace_bytes,
                settled_bytes=None if settled is None else settled + part + (x_again + y if index else ZERO),
                ending_bytes=None if index else segment.ending_bytes,
                passed_bytes=between if index else segment.passed_bytes,
                evaluation_bytes=_least(segment.evaluation_bytes, x + products),
                **timed,
            )


def _most(quantity: Affine, other: Affine) -> Affine:
    """Larger of two quantities in each part."""
    return Affine(max(quantity.fixed, other.fixed), max(quantity.per_sample, other.per_sample))


def _least(quantity: Affine, other: Affine) -> Affine:
    return Affine(min(quantity.fixed, other.fixed), min(quantity.per_sample, other.per_sample))
