"""Bytes that an `Exchange` sends and holds: closed forms in the micro-batch and the number of ranks.

With n ranks and bytes x of one rank's input, y of its output and d of the gradient of its input, a rank sends

    inputs and their gradients      gathered, summed:  (n-1) x, (n-1) d      else  (n-1)/n x, (n-1)/n d
    outputs and their gradients     summed, gathered:  (n-1) y, (n-1) y      else  (n-1)/n y, (n-1)/n y

in one all-gather or all-to-all each: column and row 2 (n-1) (i + o/n) and 2 (n-1) (o + i/n) elements for each row of i
and o features, a pair 2 (n-1) (i + o). Sums are an all-to-all of summands, which are added up where they arrive.
Columns of one input gather it once, and send each output by itself.

Beside what data parallelism holds there are gathered inputs, n x, or parts of all inputs, x, in place of what the first
operators save of their input, and while operators run

                    forward             backward                         of the operators in forward order
    column          2 y                 max(2 y - d - g, (n-1) d, n (2 d - x) - y, g)  where it is one
    columns         2 y each            the same, and the gathered gradient that is there already, with (n-1) d more,
                                        which none but the last are given; inputs' are exchanged behind the first
    row             max(x, 2 n y)       max(n y - min(y, d), 2 d - x - y, g)
    pair            0; 2 n y            max((n-1) d, n (2 d - x), g); max(n y, g)
    pair of three   0; 0; 2 n y         max(2 n d, g); max(n d, g); max(n y, g)
    attention       o each; x+s+2 n y   max(2 n d, g), max(n d, g) of the last one; max(n y, i, g)
    of one          o; x+s+2 n y        max(o - d, (2 n - 1) d - o/p + g); max(n y, i, g)
    heads           o; x+s+2 n y        max(o - d, (n-1) d, n (2 d - x), g); max(n y, i, g)
    embedding       2 y                 max(2 y - g, y, g)

with outputs o of projections and the input i of attention's last operator, which are copied into another order, and
what that alone saves of it, s; "of one" is attention whose queries, keys and values one operator makes, with p = 3, and
a gated MLP whose gates and values one makes, with p = 2; with the
gradient of the shard, g, which counts besides and is not there yet while gradients of outputs are exchanged, and a copy
of it. An exchange holds what is sent and what is received; forward holds the input itself besides, which nothing saves.
Backward is beside the gradients of an output and of an input, y + d, which are there where weights move, too, or count
besides; what is saved is gone when gradients of inputs are exchanged.

References:
    `operations.stationary.exchanges`, which these count.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Literal, NamedTuple

from lightning_osdp.core.affine import Affine
from lightning_osdp.core.exchange import Exchange
from lightning_osdp.core.profile import ModelProfile
from lightning_osdp.core.step import Step


class Message(NamedTuple):
    """Collective of an exchange."""

    operation: Literal["all_gather", "all_to_all"]
    num_bytes: Affine
    """Bytes of the whole tensor: that an all-gather makes, or that one rank cuts into parts for all ranks, its own
    included."""


def messages(exchange: Exchange, num_ranks: int) -> Mapping[str, tuple[Message, ...]]:
    """Collectives of a micro-batch by the kind of event that issues them."""
    n, x, d = num_ranks, exchange.input_bytes, exchange.input_gradient_bytes
    outputs = exchange.outputs if exchange.is_shared else (exchange.output_bytes,)
    gathers, sums = exchange.gathers_inputs, exchange.sums_outputs
    return {
        "exchange_inputs": (Message("all_gather", x * n) if gathers else Message("all_to_all", x),),
        "exchange_outputs": tuple(Message("all_to_all", y * n if sums else y) for y in outputs),
        "exchange_output_gradients": tuple(
            Message("all_gather", y * n) if sums else Message("all_to_all", y) for y in outputs
        ),
        "exchange_input_gradients": (Message("all_to_all", d * n if gathers else d),),
    }


def saved_beyond(exchange: Exchange, num_ranks: int) -> Affine:
    """Bytes that stay from forward to backward beyond those where weights move."""
    return exchange.input_bytes * (num_ranks if exchange.gathers_inputs else 1) - exchange.saved_bytes


class _Beside(NamedTuple):
    """Bytes of a segment beside those where weights move."""

    forward: float = 0.0
    """While its forward runs, beside saved ones."""
    backward: float = 0.0
    evaluation: float = 0.0
    """While its forward runs without gradients."""


def _beside(
    each: Exchange, num_ranks: int, samples: int, *, gradients: Sequence[float], there: Sequence[float]
) -> tuple[_Beside, ...]:
    """Bytes beside those of each operator's segment.

    ``gradients`` are those of the operators' shards; ``there`` are in backward of each where weights move.
    """
    n, x, d, y = num_ranks, *(of.at(samples) for of in (each.input_bytes, each.input_gradient_bytes, each.output_bytes))
    itself, g = each.saved_bytes.at(samples), gradients[0]
    if each.num_heads:
        *of_firsts, of_last = gradients
        made, fed = [output.at(samples) for output in each.outputs], each.fed_bytes.at(samples)
        alone = each.saved_again[-1].at(samples)  # else attention saves what the last operator takes
        summands = [2 * n * d] * (len(made) - 1) + [n * d]
        if each.cuts_parameters:  # parts of its gradient are copied, and used one by one, with those of others there
            whole, part = made[0], made[0] / each.num_parts
            summands = [max(whole - d, (2 * n - 1) * d - part + g)]
        elif len(made) == 1:  # its gradient is copied before there is one of the input
            summands = [max(made[0] - d, (n - 1) * d, n * (2 * d - x))]
        firsts = (
            _Beside(itself + copied, max(added, of), n * x + copied)
            for copied, added, of in zip(made, summands, of_firsts, strict=True)
        )
        # the module whose forward this is still has its input
        return *firsts, _Beside(itself + alone + 2 * n * y, max(n * y, fed, of_last), fed + 2 * n * y)
    if each.kind == "pair":
        *of_firsts, of_last = gradients
        # gradients of gathered inputs are added up, and exchanged behind the operator that forward began with
        summands = [2 * n * d, n * d] if len(of_firsts) > 1 else [max((n - 1) * d, n * (2 * d - x))]
        firsts = (_Beside(itself, max(added, of), n * x) for added, of in zip(summands, of_firsts, strict=True))
        return *firsts, _Beside(2 * n * y, max(n * y, of_last), 2 * n * y)
    if each.kind == "column":
        return tuple(_of_columns(each, n, samples, gradients=gradients, there=there))
    lacking = max(0.0, y + d - there[0])  # such as a gradient of equal numbers, of which one is stored
    if each.kind == "row":
        backward = max(lacking + max(n * y - min(y, d), 2 * d - x - y), g)
        return (_Beside(itself + max(x, 2 * n * y), backward, x + 2 * n * y),)
    return (_Beside(itself + 2 * y, max(lacking + max(2 * y - d - g, y), g), max(n * x, 2 * y)),)


def _of_columns(
    each: Exchange, num_ranks: int, samples: int, *, gradients: Sequence[float], there: Sequence[float]
) -> Iterator[_Beside]:
    n, itself, x, d = (
        num_ranks,
        *(of.at(samples) for of in (each.saved_bytes, each.input_bytes, each.input_gradient_bytes)),
    )
    outputs = [of.at(samples) for of in each.outputs or (each.output_bytes,)]
    for place, (y, g, at) in enumerate(zip(outputs, gradients, there, strict=True)):
        added = d if place < len(outputs) - 1 else 0.0  # gradient of the input by the others that run behind this one
        lacking = max(0.0, y + d + added - at)  # such as a gradient of equal numbers, of which one is stored
        exchanged = 2 * y - d - g + (n - 1) * added
        summed = n * (2 * d - x) - y - added if place == 0 else 0.0
        most = max(exchanged, (n - 1) * (d + added), summed)
        yield _Beside(itself + 2 * y, max(lacking + most, g), max(n * x, 2 * y))


def _by_segment(step: Step, exchanges: Mapping[Exchange, int]) -> dict[int, _Beside]:
    samples, profile = step.workload.micro_batch_size, step.profile
    places = {segment.operator: index for index, segment in enumerate(profile.segments[:-1])}
    gradients = {operator.name: operator.gradient_bytes for operator in profile}
    found: dict[int, _Beside] = {}
    for each, n in exchanges.items():
        there = [profile.segments[places[name]].backward_workspace_bytes.at(samples) for name in each.operators]
        shards = [gradients[name] / n for name in each.operators]
        besides = _beside(each, n, samples, gradients=shards, there=there)
        found |= {places[name]: beside for name, beside in zip(each.operators, besides, strict=True)}
        # gathered gradients of the input are there until the first of several columns has come
        last = -2 if each.num_heads else -1 if each.is_shared else 0
        between = range(places[each.operators[0]], places[each.operators[last]])
        # and what is gathered for attention stays until the last of its projections, which it does in evaluations, too
        kept = n * each.input_bytes.at(samples) if each.num_heads else 0.0
        more = _Beside(backward=(n - 1) * each.input_gradient_bytes.at(samples), evaluation=kept)
        found |= {index: more for index in between if index not in found}
    return found


def with_exchanges(step: Step, exchanges: Mapping[Exchange, int]) -> ModelProfile:
    """Profile in which these exchanges move activations, each among so many ranks, for this step alone.

    Operators of each are called once. Bytes of evaluations stay as they are, see `evaluation_beside`.
    """
    beside = _by_segment(step, exchanges)
    saved = dict[str, float]()
    for each, n in exchanges.items():
        beyond = [saved_beyond(each, n), *(part * -1 for part in each.saved_again)]
        beyond[-1] += each.fed_bytes  # copied into the order of the ranks
        saved |= {
            name: part.at(step.workload.micro_batch_size) for name, part in zip(each.operators, beyond, strict=False)
        }
    more = 0.0
    """Bytes that segments so far save beyond those where weights move."""
    segments = []
    for index, segment in enumerate(step.profile.segments):
        own, own_saved = beside.get(index, _Beside()), saved.get(segment.operator, 0.0) if index in beside else 0.0
        behind = segment.behind(Affine(more))
        segments.append(
            replace(
                behind,
                saved_bytes=segment.saved_bytes + Affine(own_saved),
                forward_workspace_bytes=segment.forward_workspace_bytes + Affine(own.forward),
                backward_workspace_bytes=segment.backward_workspace_bytes + Affine(own.backward),
            )
            if index in beside
            else behind
        )
        more += own_saved
    return replace(step.profile, segments=tuple(segments))


def evaluation_beside(step: Step, exchanges: Mapping[Exchange, int]) -> Mapping[int, float]:
    """Bytes beside those of each segment's forward without gradients, by segment; arguments of `with_exchanges`."""
    return {index: each.evaluation for index, each in _by_segment(step, exchanges).items()}
