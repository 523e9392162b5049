"""Bytes that forward saves for backward, and what lives beside them, per segment, from one traced step."""

from __future__ import annotations

import warnings
import weakref
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from lightning_osdp.core.profile import Span
from lightning_osdp.operations.recomputation import KeptResults
from lightning_osdp.profiler.live_tensors import LiveBytes
from lightning_osdp.profiler.step.run_step import loss_in
from lightning_osdp.profiler.step.snapshot import storage_key, tensors_in
from lightning_osdp.profiler.tracing.calls import Calls, Position, followed
from lightning_osdp.profiler.tracing.feeds import Feeds, Handed, recorded_feeds
from lightning_osdp.profiler.tracing.operators import find_operators
from lightning_osdp.profiler.tracing.reruns import RerunPlace, recorded_reruns
from lightning_osdp.profiler.tracing.saved_tensors import saved_tensors_hooks

Saved = tuple[tuple[bool, int, int], int]
"""Place and bytes of a tensor that a segment saves and a block gets or returns. The place is (is_near, where, number).
Near is the segment's own block or the block before: ``where`` then counts the segments from the one in which a block
first gets or returns the tensor, and is that segment itself otherwise. ``number`` counts such tensors of a segment."""


@dataclass
class Activations:
    """Bytes of one segment."""

    saved_bytes: int = 0
    crossings: tuple[Saved, ...] = ()
    """Tensors that the segment saves and blocks get or return, even if another segment is counted for them."""
    forward_workspace_bytes: int = 0
    """Most live bytes in forward beside parameters, batch and everything saved so far, this segment included."""
    handed_bytes: int = 0
    """Live bytes at the end of forward beside parameters, batch and everything saved so far."""
    backward_workspace_bytes: int = 0
    """Most live bytes in backward beside parameters, batch, everything saved so far and gradients of parameters, until
    the gradients of the segment's operator are complete; to the end where it makes none."""
    rerun_workspace_bytes: int = 0
    """Most live bytes while the segment runs again in backward, beside parameters, batch, saved tensors and gradients
    that are complete."""
    evaluation_bytes: int = 0
    """Most live bytes beside parameters and batch when forward runs without gradients."""
    settled_bytes: int | None = None
    """Live bytes beside parameters, batch and gradients of parameters when the gradients of the segment's operator are
    complete, less the bytes saved by the segment and those before it. The number may be negative, and does not depend
    on how many segments there are before."""
    ending_bytes: int | None = None
    """Most live bytes, counted like `settled_bytes`, from then on to the end of the segment's backward."""
    passed_bytes: int | None = None
    """Live bytes, counted like `settled_bytes`, when the segment's backward is over."""
    is_read: bool = False
    """True where backward reads parameters of the segment's operator, or inputs of the operator need gradients."""
    rerun: RerunPlace | None = None
    """Place in the part of forward that runs again in backward; None where the segment does not."""
    handed: Handed | None = None
    """Bytes that the segment's operator is given and gives; None where that is not known, or was not
    followed."""
    own_saved_bytes: int = 0
    """Bytes that the operator saves while it runs, and no other segment, weights and what is made of them apart."""
    joint_saved_bytes: tuple[int, ...] = ()
    """Bytes like `own_saved_bytes`, which operators that move activations with it, see `Handed`, may save, too; then
    what each of these saves in addition."""


@dataclass(eq=False)
class _Storage:
    """Storage of a tensor that is saved, or that a block gets or returns."""

    num_bytes: int
    saved_in: int | None = None
    """Segment that is counted for the bytes: the first that saves the tensor."""
    savers: dict[int, None] = field(default_factory=dict)
    """Segments that save the tensor."""
    place: tuple[int, int] | None = None
    """Segment in which a block first gets or returns the tensor, and the tensor's number there."""


class _Follower:
    """Follows one forward and backward through their segments."""

    def __init__(
        self, live: LiveBytes, module: nn.Module, calls: Calls, static: Sequence[Tensor], blocks: Mapping[str, Span]
    ) -> None:
        self.live = live
        self.static_bytes = live.track(static)
        self.excluded = {storage_key(tensor) for tensor in static}
        self.begins = [first for first, _ in blocks.values()]
        self.position = Position(calls, self.close_part)
        self.parts = [Activations() for _ in range(self.position.num_segments)]
        self.saved_before = [0] * len(self.parts)
        self.total_saved = 0
        self.storages: list[_Storage] = []
        self.alive: dict[int, _Storage] = {}
        self.num_passed = [0] * len(self.parts)
        operators = find_operators(module, calls)
        by_name = {operator.name: operator.gradients for operator in operators}
        self.reads = _Reads()
        self.feeds = Feeds(self.position)
        self.own: dict[int, dict[_Storage, None]] = {}
        """Storages that the operator of a segment saves while it runs."""
        owners = {child: name for name, child in module.named_modules()}
        segments: dict[str, list[int]] = {}
        for index, name in enumerate(calls.sequence):
            segments.setdefault(name, []).append(index)
        for child, name in owners.items():
            for parameter in child.parameters(recurse=False):
                self.reads.note(parameter, segments.get(name, ()))
        self.made_in = [*(by_name[name] for name in calls.sequence), []]
        own = (module.get_submodule(name).parameters(recurse=False) for name in calls.sequence)
        self.owned = [*(set(map(id, parameters)) for parameters in own), set[int]()]
        """Ids of the parameters of each segment's operator."""
        self.gradients: dict[Tensor, int] = {}
        """Parameters whose gradients may be alive -> the segment that made the gradient."""
        self.dropped: set[Tensor] = set()
        """Parameters whose gradients were freed."""

    def keep(self, tensor: Tensor) -> Tensor:
        """Books a tensor that lives until backward; hook on every tensor that autograd saves."""
        key, now = storage_key(tensor), self.position.now
        self.reads.read(tensor)
        if tensor.device.type == self.live.device_type and key is not None and key not in self.excluded:
            storage = self._storage(tensor)
            storage.savers[now] = None
            if self.feeds.running == now and not self.reads.is_of_parameters(tensor):
                self.own.setdefault(now, {})[storage] = None
            if storage.saved_in is None:
                storage.saved_in = now
                self._book(now, storage.num_bytes)
        return tensor.detach()

    def passed(self, tree: Any) -> None:
        """Numbers the tensors that a block gets or returns."""
        for tensor in tensors_in(tree):
            if tensor.layout is torch.strided:
                now, storage = self.position.now, self._storage(tensor)
                self.num_passed[now] += 1
                storage.place = storage.place or (now, self.num_passed[now])

    def _storage(self, tensor: Tensor) -> _Storage:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self.alive:
            self.alive[key] = _Storage(storage.nbytes())
            self.storages.append(self.alive[key])
            weakref.finalize(storage, self._freed, key).atexit = False
        return self.alive[key]

    def _freed(self, key: int) -> None:
        storage = self.alive.pop(key)
        if storage.saved_in is None or self.position.in_backward:
            return
        # A graph that the loss does not need was dropped in forward.
        self._book(storage.saved_in, -storage.num_bytes)
        for segment in range(storage.saved_in, self.position.now):  # for these it was workspace, not a saved tensor
            self.parts[segment].forward_workspace_bytes += storage.num_bytes
            self.parts[segment].handed_bytes += storage.num_bytes
            self.saved_before[segment] -= storage.num_bytes

    def note_crossings(self) -> None:
        """Lists for each segment, when forward is over, the tensors that it saves and blocks get or return.

        The first segment that saves a tensor is counted for its bytes. The segment depends on the activations of each
        block: a step in which all blocks make one choice does not show it for steps in which choices differ.
        """
        saved: dict[int, list[Saved]] = {}
        placed = ((each.place, each.num_bytes, tuple(each.savers)) for each in self.storages if each.place is not None)
        for (segment, number), num_bytes, savers in sorted(placed):
            for saver in savers:
                block = bisect_right(self.begins, saver) - 2
                is_near = segment >= (self.begins[block] if block >= 0 else 0)
                place = (is_near, saver - segment if is_near else segment, number)
                saved.setdefault(saver, []).append((place, num_bytes))
        for segment, crossings in saved.items():
            self.parts[segment].crossings = tuple(crossings)

    def note_operators(self, returned: Any) -> None:
        """Notes what operators were given and gave, and what they alone have saved, when forward is over."""
        self.feeds.end(returned)
        for segment, handed in self.feeds.by_segment().items():
            part = self.parts[segment]
            part.handed = handed
            beside = handed.columns if handed.feeds is None else [handed.beside] if handed.beside else []
            places = [segment, *(segment + each for each in beside)]
            part.own_saved_bytes = self._saved_in([segment])[0]
            part.joint_saved_bytes = self._saved_in(places)

    def _saved_in(self, places: Sequence[int]) -> tuple[int, ...]:
        """Bytes that operators of these segments alone save while they run, each storage counted for the first."""
        found, known = list[int](), set[_Storage]()
        for place in places:
            new = self.own.get(place, {}).keys() - known
            known |= new
            found.append(sum(each.num_bytes for each in new if each.savers.keys() <= {*places}))
        return tuple(found)

    def _book(self, part: int, num_bytes: int) -> None:
        self.parts[part].saved_bytes += num_bytes
        self.total_saved += num_bytes

    def close_part(self) -> None:
        """Books the peak since the last call to the segment that ran."""
        now = self.position.now
        part = self.parts[now]
        if not self.position.in_backward:
            beside = self.live.peak_bytes - self.static_bytes - self.total_saved
            part.forward_workspace_bytes = max(part.forward_workspace_bytes, beside)
            part.handed_bytes = max(0, self.live.current_bytes - self.static_bytes - self.total_saved)
            self.saved_before[now] = self.total_saved
        else:
            if self.position.is_running_again:
                part.rerun_workspace_bytes = max(part.rerun_workspace_bytes, self._peak_bytes())
            self._book_backward(part)
            if not self.position.is_running_again:
                part.passed_bytes = self._unsaved_bytes()
        self.live.reset_peak()

    def drop(self, parameter: Tensor) -> None:
        """Frees a gradient that is complete: the plan counts gradients itself, and here they would add up."""
        part = self.parts[self.position.now]
        self._book_backward(part)
        parameter.grad = None
        self.gradients.pop(parameter, None)
        self.dropped.add(parameter)
        if id(parameter) in self.owned[self.position.now]:  # the operator's last gradient, until another one comes
            part.backward_workspace_bytes = max(part.backward_workspace_bytes, part.ending_bytes or 0)
            part.settled_bytes, part.ending_bytes = self._unsaved_bytes(), None
        self.live.reset_peak()

    def _book_backward(self, part: Activations) -> None:
        """Books the peak since the last call to backward before or after the operator's gradients were complete.

        The plan counts a gradient from the first segment that makes it on; a gradient made earlier is workspace.
        """
        now = self.position.now
        for parameter in self.made_in[now]:
            if parameter not in self.dropped:
                self.gradients.setdefault(parameter, now)
        beside = self._peak_bytes()
        if part.settled_bytes is None:
            part.backward_workspace_bytes = max(part.backward_workspace_bytes, beside)
        else:
            part.ending_bytes = beside if part.ending_bytes is None else max(part.ending_bytes, beside)

    def _peak_bytes(self) -> int:
        """Peak since the last call, like `_unsaved_bytes`."""
        return self.live.peak_bytes - self.static_bytes - self.saved_before[self.position.now] - self._gradient_bytes()

    def _gradient_bytes(self) -> int:
        """Bytes of gradients that this segment and the segments behind it have made."""
        return sum(p.nbytes for p, made_in in self.gradients.items() if made_in >= self.position.now)

    def _unsaved_bytes(self) -> int:
        """Live bytes in backward without gradients, and without bytes saved by this segment and the segments before."""
        saved = sum(part.saved_bytes for part in self.parts[: self.position.now + 1])
        return self.live.current_bytes - self.static_bytes - saved - self._gradient_bytes()


class _Reads(TorchDispatchMode):
    """Notes which parameters a step reads in backward, or saves for it, by the segments of their operators.

    Tensors that are made of parameters alone count as they do: where training gathers a parameter in the dtype of
    computing, the copy that autocast makes of it here is the parameter itself.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_in_backward = False
        self.segments: set[int] = set()
        """Segments whose operator's parameters are read."""
        self._of: dict[int | None, set[int]] = {}  # key of a storage -> segments

    def note(self, parameter: Tensor, segments: Iterable[int]) -> None:
        """Adds segments in which an operator has a parameter, or what is made of it."""
        key = storage_key(parameter)
        if key not in self._of:
            weakref.finalize(parameter.untyped_storage(), self._of.pop, key, None).atexit = False
        self._of.setdefault(key, set()).update(segments)

    def is_of_parameters(self, tensor: Tensor) -> bool:
        """True for a parameter, and for what is made of parameters alone."""
        return storage_key(tensor) in self._of

    def read(self, tensor: Tensor) -> None:
        """Takes a tensor for one that backward reads."""
        self.segments |= self._of.get(storage_key(tensor), set())

    @override
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = function(*args, **(kwargs or {}))
        given = [*tensors_in((args, kwargs))]
        if self.is_in_backward:
            for tensor in given:
                self.read(tensor)
        elif given and all(storage_key(tensor) in self._of for tensor in given):
            segments = set[int]().union(*(self._of[storage_key(tensor)] for tensor in given))
            for tensor in tensors_in(returned):
                if tensor.layout is torch.strided:
                    self.note(tensor, segments)
        return returned


def trace_activations(
    module: nn.Module,
    batch: Any,
    calls: Calls,
    run: Callable[[], Any],
    blocks: Mapping[str, Span],
    *,
    choice: str,
    kept: Mapping[str, Sequence[int]] = MappingProxyType({}),
    exchanges: bool = False,
) -> list[Activations]:
    """Saved and workspace bytes of each segment, from one forward and backward.

    The result of ``run`` stays alive until backward is over. All blocks make one ``choice``, see `saving_less`; those
    that recompute keep these results. With ``exchanges`` operators' inputs and outputs are followed, too.
    """
    static = _static(module, batch)
    with LiveBytes(static[0].device.type) as live, ExitStack() as cleanup:
        follower = _Follower(live, module, calls, static, blocks)
        position, parts = follower.position, follower.parts
        for block in map(module.get_submodule, blocks):
            before = block.register_forward_pre_hook(lambda _, *given: follower.passed(given), with_kwargs=True)
            after = block.register_forward_hook(lambda _, __, output: follower.passed(output))
            cleanup.callback(before.remove)
            cleanup.callback(after.remove)
        cleanup.enter_context(followed(module, position))
        needing = set[str]()  # operators whose inputs need gradients
        for name in dict.fromkeys(calls.sequence):
            needs = partial(_note_inputs, needing, name)
            cleanup.callback(module.get_submodule(name).register_forward_pre_hook(needs, with_kwargs=True).remove)
        for parameter in module.parameters():
            if parameter.requires_grad:
                cleanup.callback(parameter.register_post_accumulate_grad_hook(follower.drop).remove)
        reruns = cleanup.enter_context(recorded_reruns(module, position))
        cleanup.enter_context(saving_less(module, blocks, choice, follower, kept))
        with ExitStack() as forward:
            if exchanges:
                forward.enter_context(recorded_feeds(module, follower.feeds, batch))
            forward.enter_context(saved_tensors_hooks(follower.keep, lambda packed: packed))
            forward.enter_context(follower.reads)
            returned = run()
        position.enter(position.num_segments - 1)
        for tensor in tensors_in(returned):
            follower.keep(tensor)
        follower.note_crossings()
        if exchanges:
            follower.note_operators(returned)
        position.start_backward()
        follower.reads.is_in_backward = True
        with follower.reads:
            loss_in(returned).backward()
        position.end()
        for segment, name in enumerate(calls.sequence):
            parts[segment].is_read = name in needing or segment in follower.reads.segments
        for segment, place in reruns.by_segment().items():
            parts[segment].rerun = place
    return parts


def _note_inputs(needing: set[str], name: str, _: nn.Module, args: Any, kwargs: Any) -> None:
    if any(tensor.requires_grad for tensor in tensors_in((args, kwargs))):
        needing.add(name)


def trace_evaluation(
    module: nn.Module, batch: Any, calls: Calls, run: Callable[[], Any], parts: Sequence[Activations]
) -> None:
    """Adds to the segments the bytes of a forward without gradients; arguments as of `trace_activations`."""
    static = _static(module, batch)
    with LiveBytes(static[0].device.type) as live, torch.no_grad():
        static_bytes = live.track(static)

        def close_part() -> None:
            part = parts[position.now]
            part.evaluation_bytes = max(part.evaluation_bytes, live.peak_bytes - static_bytes)
            live.reset_peak()

        position = Position(calls, close_part)
        with followed(module, position), warnings.catch_warnings():
            # reentrant checkpointing warns where nothing is trained
            warnings.filterwarnings("ignore", message="None of the inputs have requires_grad")
            run()
        position.end()


def evaluate_as_training(parts: Sequence[Activations]) -> None:
    """Takes the bytes of the traced forward, saved tensors included, for those of evaluation: never too few."""
    saved_bytes = 0
    for part in parts:
        saved_bytes += part.saved_bytes
        part.evaluation_bytes = saved_bytes + part.forward_workspace_bytes


def _static(module: nn.Module, batch: Any) -> list[Tensor]:
    """Tensors that live throughout: parameters, other tensors that modules hold, and the batch."""
    return [*module.parameters(), *tensors_in([vars(m) for m in module.modules()]), *tensors_in(batch)]


@contextmanager
def saving_less(
    module: nn.Module,
    blocks: Mapping[str, Span],
    choice: str,
    follower: _Follower,
    kept: Mapping[str, Sequence[int]],
) -> Iterator[None]:
    """Has blocks recompute or offload what they save, in steps whose values do not matter.

    To ``offload``, tensors must be fake: a tensor that is moved away comes back as an empty one of its shape. Tensors
    that live throughout are not moved. Blocks that ``recompute`` keep the results at these positions, by block.
    """
    with ExitStack() as cleanup:
        for name, span in blocks.items() if choice != "keep" else ():
            block = module.get_submodule(name)
            if choice == "recompute":
                results = KeptResults(kept[name], on_keep=follower.keep) if name in kept else None
                less = _recomputing(block.forward, span, follower.position, results)
            else:
                less = _offloading(block.forward, span, follower.position, follower.excluded)
            cleanup.enter_context(patch.object(block, "forward", less))
        yield


def _recomputing(
    forward: Callable[..., Any], span: Span, position: Position, results: KeptResults | None
) -> Callable[..., Any]:
    contexts: dict[str, Any] = {} if results is None else {"context_fn": results.contexts}

    def begin(*args: Any, **kwargs: Any) -> Any:
        position.enter(span[0])
        num_args, names = len(args), tuple(kwargs)  # a closure over the inputs themselves would keep them alive

        def run(*given: Any) -> Any:
            return forward(*given[:num_args], **dict(zip(names, given[num_args:], strict=True)))

        # all by position: checkpoint does not save arguments that it gets by name
        return checkpoint(run, *args, *kwargs.values(), use_reentrant=False, **contexts)

    return begin


def _offloading(
    forward: Callable[..., Any], span: Span, position: Position, stay: Collection[int | None]
) -> Callable[..., Any]:
    def pack(tensor: Tensor) -> Callable[[], Tensor]:
        if tensor.layout is not torch.strided or storage_key(tensor) in stay:
            return lambda: tensor
        return partial(torch.empty_strided, tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device)

    def begin(*args: Any, **kwargs: Any) -> Any:
        position.enter(span[0])
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda make: make()):
            return forward(*args, **kwargs)

    return begin
