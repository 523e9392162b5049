"""Record of what operators are given and give in one forward, and which of them feed each other.

Between an operator that makes features and one that takes them, ranks may hold parts of these features for the rows of
all ranks, if whatever happens between treats each element by itself, or each head, and nobody else looks at it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary
from typing_extensions import override

from lightning_osdp.core.exchange import MOST_COLUMNS
from lightning_osdp.operations.splitting.splitters import SPLITTERS, class_name
from lightning_osdp.operations.stationary.between import is_of_one_rank
from lightning_osdp.operations.stationary.elementwise import is_elementwise, is_number_of_all
from lightning_osdp.operations.stationary.exchanges import is_in_torch_func
from lightning_osdp.profiler.step.snapshot import storage_key, tensors_in
from lightning_osdp.profiler.tracing.calls import Position
from lightning_osdp.profiler.tracing.heads import Heads


class Handed(NamedTuple):
    """Bytes that the operator of a segment is given and gives, in the dtype in which it computes."""

    input_bytes: int
    input_gradient_bytes: int
    """0 where the input needs no gradient."""
    output_bytes: int
    feeds: int | None = None
    """Number of segments to that of the one operator that takes the output, as it is or changed element by element;
    None where anything else takes it."""
    beside: int | None = None
    """Number of segments to that of the one other operator that feeds it together with this one, from the same input;
    None where no other does."""
    columns: tuple[int, ...] = ()
    """Numbers of segments to those of operators that are given the same input and follow, with no other operator in
    between; empty where this one follows another of them."""
    attended: int | None = None
    """Number of segments to that of the one operator that takes what is made by heads of the outputs of this one and of
    the two that follow it, or of this one alone; None where there is no such one, or anything else takes these
    outputs."""
    by_heads: str = ""
    """Kind of exchange that these operators can be."""
    num_projections: int = 0
    """Number of operators that make heads, this one and those that follow it."""
    num_heads: int = 0
    """Number of heads, those of keys if these are fewer."""


class Feeds(TorchDispatchMode):
    """Follows outputs of operators through a forward; the position has to be `followed` already."""

    def __init__(self, position: Position) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.position = position
        self._handed: dict[int, Handed] = {}
        self._of: dict[int | None, frozenset[int]] = {}
        """Key of a storage -> segments whose outputs, treated element by element, it has."""
        self._takers: dict[int, set[int | None]] = {}
        """Segment -> segments of operators that take its output; None for anything else that looks at it."""
        self._fed_by: dict[int, frozenset[int]] = {}
        """Segment -> segments that its operator's one input has outputs of."""
        self._first_given = WeakIdKeyDictionary()
        """Input -> segment of the first operator that was given it."""
        self._heads = Heads()
        self._of_batch = set[int | None]()
        """Keys of storages of the batch, and of what is made of it."""
        self._has_read_batch = False  # values of it, of which Python may have made anything
        self.num_shown = 0
        """Functions that are running and were shown, or will be, see `see`: operations belong to them."""
        self._like: dict[int, int] = {}
        """Segment -> the first that was given the same input."""
        self._input: Tensor | None = None
        self.running: int | None = None
        """Segment of the operator that runs."""

    def enter(self, _: nn.Module, args: Any, kwargs: Any) -> None:
        """Hook before an operator."""
        if self.position.in_backward or is_in_torch_func():  # which sees other tensors than the model's
            return
        self.running, given = self.position.now, [*tensors_in((args, kwargs))]
        (tensor,) = given if len(given) == 1 else (None,)
        may_exchange = tensor is not None and torch.is_grad_enabled()
        if tensor is not None and tensor.is_floating_point():
            may_exchange = may_exchange and tensor.dim() > 1
        self._input = tensor if may_exchange else None
        self._heads.take(self.running, given, may_exchange=may_exchange)
        for each in given:
            sources = self._of.get(storage_key(each), frozenset())
            self._take(sources, self.running if may_exchange else None)
            self._fed_by[self.running] = sources
            self._like[self.running] = self._first_given.setdefault(each, self.running)

    def leave(self, _: nn.Module, __: Any, output: Any) -> None:
        """Hook behind an operator."""
        segment, given = self.running, self._input
        if segment is not None and given is not None and isinstance(output, Tensor) and output.is_floating_point():
            itemsize = output.element_size() if given.is_floating_point() else given.element_size()
            num_bytes = given.numel() * itemsize
            self._handed[segment] = Handed(num_bytes, num_bytes if given.requires_grad else 0, output.nbytes)
            self._takers[segment] = set()
            self._note(output, frozenset([segment]))
            self._heads.give(segment, output)
        self.running = self._input = None

    def end(self, returned: Any) -> None:
        """Ends forward, which has returned this."""
        for tensor in tensors_in(returned):
            self._take(self._of.get(storage_key(tensor), frozenset()), None)
            self._heads.look(tensor)

    def by_segment(self) -> Mapping[int, Handed]:
        """Operators' inputs and outputs; without those of which nothing is known, or which have several inputs."""
        found = {}
        following = self._following()
        for segment, known in self._handed.items():
            others = following.get(segment, ())
            handed = known._replace(columns=others)
            taker, fed_by = self._taker(segment)
            feeding = fed_by - {segment}
            if taker is not None and all(self._goes_with(segment, other) for other in feeding) and len(feeding) < 2:
                beside = next((other - segment for other in feeding), None)
                handed = handed._replace(feeds=taker - segment, beside=beside)
            output = self._heads.output_of([segment, *(segment + each for each in others)])
            if output is not None:
                handed = handed._replace(
                    attended=output.segment - segment,
                    by_heads=output.kind,
                    num_projections=output.num_projections,
                    num_heads=output.num_heads,
                )
            found[segment] = handed
        return found

    def _following(self) -> Mapping[int, tuple[int, ...]]:
        """`Handed.columns` by the first segment of operators that follow each other."""
        found = dict[int, tuple[int, ...]]()
        first = None
        for segment in self._handed:
            if first is not None and self._like[segment] == self._like[first]:
                found[first] += (segment - first,)
            else:
                first = segment
                found[first] = ()
        return {first: others[: MOST_COLUMNS - 1] for first, others in found.items()}

    def _taker(self, segment: int) -> tuple[int | None, frozenset[int]]:
        """Segment of the one operator that takes the output, and segments that feed it; None where there is no one."""
        takers = self._takers[segment]
        taker = next(iter(takers)) if len(takers) == 1 else None
        return taker, frozenset() if taker is None else self._fed_by[taker]

    def _goes_with(self, segment: int, other: int) -> bool:
        """Tells if two operators are given the same, and one and the same operator takes what they make."""
        return self._like[segment] == self._like[other] and self._taker(segment) == self._taker(other)

    def see(self, function: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Takes what a function of torch is called with and gives, before the function is cut into operations.

        Sizes never come to be an operation, and a parameter may be cast before it does. Whatever ``torch.func``
        transforms looks at what it is given.
        """
        given = [*tensors_in((args, kwargs))]
        if is_in_torch_func():
            for tensor in given:
                self._take(self._of.get(storage_key(_unwrapped(tensor)), frozenset()), None)
                self._heads.look(_unwrapped(tensor))
            return
        keys = [storage_key(tensor) for tensor in given]
        sources = frozenset[int]().union(*(self._of.get(key, frozenset()) for key in keys))
        if sources and self.running is None:
            others = (tensor for tensor, key in zip(given, keys, strict=True) if key not in self._of)
            if is_of_one_rank(function, result) or not all(map(is_number_of_all, others)):
                self._take(sources, None)
        if self.running is None and self.num_shown == 0:
            self._heads.see(function, args, kwargs, result, is_alike=self._is_alike)

    def _is_alike(self, tensor: Tensor) -> bool:
        """Tells if a tensor that no operator has made is the same on all ranks, as far as anybody can tell."""
        is_of_batch = self._has_read_batch or storage_key(tensor) in self._of_batch
        return isinstance(tensor, nn.Parameter) or not is_of_batch

    def add_batch(self, batch: Any) -> None:
        """Takes the batch, which may have other values on each rank."""
        for tensor in tensors_in(batch):
            self._note_of_batch(tensor)

    @override
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [*tensors_in((args, kwargs))]
        is_of_batch = any(storage_key(tensor) in self._of_batch for tensor in given)
        known = [tensor for tensor in given if storage_key(tensor) in self._of]
        sources = frozenset[int]().union(*(self._of[storage_key(tensor)] for tensor in known))
        returned = function(*args, **(kwargs or {}))
        for tensor in tensors_in(returned) if is_of_batch else ():
            self._note_of_batch(tensor)
        self._has_read_batch |= is_of_batch and function.overloadpacket.__name__ == "_local_scalar_dense"
        for tensor in given if self.running is None and not self.num_shown else ():
            self._heads.look(tensor)
        if self.running is not None or function.namespace == "prim":
            return returned
        if sources:
            made = [*tensors_in(returned)]
            is_alone = all(storage_key(tensor) in self._of for tensor in given if tensor.numel() > 1)
            keeps_shape = len({tensor.shape for tensor in (*known, *made)}) == 1
            if is_alone and is_elementwise(function) and keeps_shape:
                for tensor in made:
                    self._note(tensor, sources)
            else:
                self._take(sources, None)
        return returned

    def _take(self, sources: frozenset[int], taker: int | None) -> None:
        for source in sources:
            self._takers[source].add(taker)

    def _note(self, tensor: Tensor, sources: frozenset[int]) -> None:
        key = storage_key(tensor)
        if key is None:
            self._take(sources, None)
            return
        if key not in self._of:
            weakref.finalize(tensor.untyped_storage(), self._of.pop, key, None).atexit = False
        self._of[key] = sources

    def _note_of_batch(self, tensor: Tensor) -> None:
        key = storage_key(tensor)
        if key is not None and key not in self._of_batch:
            weakref.finalize(tensor.untyped_storage(), self._of_batch.discard, key).atexit = False
            self._of_batch.add(key)


def _unwrapped(tensor: Tensor) -> Tensor:
    """Tensor that ``torch.func`` has wrapped, which has a storage."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return tensor


class _Functions(TorchFunctionMode):
    """Shows functions of torch to `Feeds`."""

    def __init__(self, feeds: Feeds) -> None:
        super().__init__()
        self.feeds = feeds

    @override
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.feeds.num_shown += 1
        try:
            result = function(*args, **(kwargs or {}))
        finally:
            self.feeds.num_shown -= 1
        self.feeds.see(function, args, kwargs or {}, result)
        return result


@contextmanager
def recorded_feeds(module: nn.Module, feeds: Feeds, batch: Any) -> Iterator[None]:
    """Records what operators are given and give, of those that are of a class that can be cut, and called once.

    Operators that are changed in another way are recorded, too.
    """
    calls = feeds.position.calls
    feeds.add_batch(batch)
    with ExitStack() as cleanup:
        for name, child in module.named_modules():
            if class_name(type(child)) in SPLITTERS and len(calls.spans.get(name, ())) == 1:
                cleanup.callback(child.register_forward_pre_hook(feeds.enter, with_kwargs=True).remove)
                cleanup.callback(child.register_forward_hook(feeds.leave).remove)
        cleanup.enter_context(feeds)
        cleanup.enter_context(_Functions(feeds))
        yield
