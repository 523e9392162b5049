"""Follows what operators make by heads, as through attention, to the operator that takes it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from lightning_osdp.core.exchange import NUM_GATED, NUM_PROJECTED
from lightning_osdp.operations.stationary.between import is_of_one_rank
from lightning_osdp.operations.stationary.blocks import Blocks, MixedError, follow, gives_sizes
from lightning_osdp.profiler.machine.memory import raise_if_fatal
from lightning_osdp.profiler.step.snapshot import storage_key, tensors_in


class Output(NamedTuple):
    """Operator that takes what is made by heads."""

    segment: int
    kind: str
    """Kind of exchange that this operator and those before it can be."""
    num_projections: int
    """Number of operators that make heads."""
    num_heads: int


class Heads:
    """Follows outputs of operators, each as one tensor, as gates and values, and as queries, keys and values."""

    def __init__(self) -> None:
        self._one, self._two, self._three = self._every = _Parts(1), _Parts(NUM_GATED), _Parts(NUM_PROJECTED)

    def give(self, segment: int, output: Tensor) -> None:
        """Takes the output of the operator of a segment."""
        for each in self._every:
            each.give(segment, output)

    def take(self, segment: int, given: Sequence[Tensor], *, may_exchange: bool) -> None:
        """Takes what the operator of a segment is given, whose activations may be exchanged or not."""
        for each in self._every:
            each.take(segment, given, may_exchange=may_exchange)

    def look(self, tensor: Tensor) -> None:
        """Takes a tensor that something else looks at, if it has what operators have made."""
        for each in self._every:
            each.look(tensor)

    def see(self, function: Any, args: Any, kwargs: Any, result: Any, *, is_alike: Callable[[Tensor], bool]) -> None:
        """Takes what a function of torch is called with and gives.

        ``is_alike`` tells if a tensor that no operator has made is the same on all ranks.
        """
        for each in self._every:
            each.see(function, args, kwargs, result, is_alike=is_alike)

    def output_of(self, projections: Sequence[int]) -> Output | None:
        """Operator that alone takes what is made by heads of what the first of these makes, or of what all three make.

        None where there is no such one. Heads of one feature each are left to pairs, which need no copies.
        """
        first = projections[:1]
        tried = [("attention", self._three, first), ("gated", self._two, first), ("heads", self._one, first)]
        if len(projections) == NUM_PROJECTED:
            tried.append(("attention", self._one, projections))
        for kind, parts, chosen in tried:
            taker = parts.taker_of(chosen)
            if taker is not None and (kind != "heads" or not parts.is_of_features(taker)):
                return Output(taker, kind, len(chosen), parts.num_heads(taker))
        return None


class _Made(NamedTuple):
    """Tensor that functions made of outputs of these segments, each doing the same to each head."""

    sources: frozenset[int]
    blocks: Blocks


class _Parts:
    """Follows outputs of operators through functions that do the same to each of their parts.

    Args:
        num_parts: number of tensors that an output has beside each other: queries, keys and values, gates and values,
            or one of them.
    """

    def __init__(self, num_parts: int) -> None:
        self._num_parts = num_parts
        self._made = WeakIdKeyDictionary()  # tensor -> `_Made`
        self._of: dict[int | None, frozenset[int]] = {}  # key of a storage -> segments
        self._takers: dict[int, set[int | None]] = {}
        """Segment -> segments of operators that take its output; None for anything else that looks at it."""
        self._of_taker: dict[int, _Made] = {}
        self._num_features: dict[int, int] = {}
        """Segment of an operator that takes what was made of heads -> number of features that it takes."""

    def give(self, segment: int, output: Tensor) -> None:
        """Takes the output of the operator of a segment."""
        self._takers[segment] = set()
        number, rest = divmod(output.shape[-1], self._num_parts)
        if rest == 0:
            self._note(output, _Made(frozenset([segment]), Blocks(-1, number, self._num_parts)))

    def take(self, segment: int, given: Iterable[Tensor], *, may_exchange: bool) -> None:
        """Takes what the operator of a segment is given, whose activations may be exchanged or not."""
        for tensor in given:
            made = self._made.get(tensor)
            if made is None or not may_exchange or not made.blocks.are_features:
                self.look(tensor)
            else:
                self._add(made.sources, segment)
                self._of_taker[segment], self._num_features[segment] = made, tensor.shape[-1]

    def look(self, tensor: Tensor) -> None:
        """Takes a tensor that something else looks at, if it has what operators have made."""
        self._add(self._of.get(storage_key(tensor), frozenset()), None)

    def see(self, function: Any, args: Any, kwargs: Any, result: Any, *, is_alike: Callable[[Tensor], bool]) -> None:
        """Takes what a function of torch is called with and gives, see `Heads.see`."""
        given = [*tensors_in((args, kwargs))]
        of_given = [made for each in given if (made := self._made.get(each)) is not None]
        sources = frozenset[int]().union(*(made.sources for made in of_given))
        if not sources or gives_sizes(function):
            return
        tensors = [each for each in tree_leaves(result) if isinstance(each, Tensor)]
        if not tensors and not is_of_one_rank(function, result):
            return
        try:
            may_follow = tensors and all(each in self._made or is_alike(each) for each in given)
            found = follow(function, args, kwargs, self._blocks_of) if may_follow else None
        except MixedError:
            found = None
        except Exception as error:  # a function that runs with these tensors alone
            raise_if_fatal(error)
            found = None
        if found is None or len(found.blocks) != len(tensors) or min(each.number for each in found.blocks) < 2:
            self._add(sources, None)
            return
        for tensor, blocks in zip(tensors, found.blocks, strict=True):
            self._note(tensor, _Made(sources, blocks))

    def taker_of(self, projections: Sequence[int]) -> int | None:
        """Segment of the operator that alone takes what is made by heads of what these make, if there is one."""
        takers = {taker for segment in projections for taker in self._takers.get(segment, {None})}
        taker = next(iter(takers)) if len(takers) == 1 else None
        if taker is None or self._of_taker[taker].sources != {*projections}:
            return None
        return taker

    def num_heads(self, taker: int) -> int:
        """Number of heads that an operator takes."""
        return self._of_taker[taker].blocks.number

    def is_of_features(self, taker: int) -> bool:
        """Tells if each feature that an operator takes is a head."""
        return self.num_heads(taker) == self._num_features[taker]

    def _blocks_of(self, tensor: Tensor) -> Blocks | None:
        made = self._made.get(tensor)
        return None if made is None else made.blocks

    def _add(self, sources: Iterable[int], taker: int | None) -> None:
        for source in sources:
            self._takers[source].add(taker)

    def _note(self, tensor: Tensor, made: _Made) -> None:
        key = storage_key(tensor)
        if key not in self._of:
            weakref.finalize(tensor.untyped_storage(), self._of.pop, key, None).atexit = False
        self._made[tensor], self._of[key] = made, self._of.get(key, frozenset()) | made.sources
