"""Equal blocks in a row: a few stand for all, so that following a step takes as long at any depth.

Whoever follows a step may follow that of a *short model*, the same module with most of its repeated blocks taken out
of their container, and read off what the full one would give. Which ones may go is not guessed from the looks of
modules. The first forward runs all of them, and its operations are compared: those from the beginning of a block to
that of the next must be those of the block before, on the same tensors as seen from the block, and leave nothing alive.
Then the forward of the short model must be that of the full one with these operations left out. Last, two of the blocks
that stay must agree in everything that is measured; the others are taken to be as these.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_osdp.errors import UntraceableError
from lightning_osdp.profiler.machine.memory import raise_if_fatal
from lightning_osdp.profiler.step.run_step import StepRunner, check_loss
from lightning_osdp.profiler.step.snapshot import storage_key, tensors_in
from lightning_osdp.profiler.tracing.calls import Calls, recorded_calls
from lightning_osdp.profiler.tracing.saved_tensors import saved_tensors_hooks

T = TypeVar("T")
Token = int | str | object
"""A storage: the number under which it was made, a name where it was there before, or what equals no other."""
_log = logging.getLogger(__name__)

_NUM_FIRST = 3
"""Of equal blocks those that stay at the beginning; the last two of them must agree. At the end one stays."""
_LEAST_CUT = 4
"""Fewer blocks are not worth it."""


@dataclass(frozen=True)
class _Cut:
    """Blocks of one container that are taken out."""

    container: nn.Module
    prefix: str
    """Of the names of its blocks."""
    kept: dict[str, str]
    """Key of a block that stays -> its key in the short model."""
    start: Mark
    """Of the first block that is left out."""
    end: Mark
    """Of the first behind it that is not."""
    period: int
    """Segments of a block."""

    def renamed(self, name: str) -> str:
        """A name in the short model."""
        if not name.startswith(self.prefix):
            return name
        key, dot, rest = name.removeprefix(self.prefix).partition(".")
        return f"{self.prefix}{self.kept.get(key, f'({key} left out)')}{dot}{rest}"


@dataclass(frozen=True)
class ShortModel:
    """What stands for a model: itself with some blocks taken out of it; or all of it, where none can be."""

    calls: Calls
    """Of the short model."""
    places: Sequence[int]
    """For each segment of the full model, the one of the short model that it is, or that stands for it."""
    cuts: tuple[_Cut, ...] = ()

    def applied(self) -> AbstractContextManager[None]:
        """Makes the model the short one for a while."""
        return _without(self.cuts)

    def agrees(self, parts: Sequence[object]) -> bool:
        """Whether blocks that stand for others are alike in these parts, one for each segment of the short model."""
        places = [(self.places[cut.start.num_segments], cut.period) for cut in self.cuts]
        return all(parts[place : place + period] == parts[place - period : place] for place, period in places)

    def unfolded(self, parts: Sequence[T]) -> list[T]:
        """One for each segment of the full model, from one for each of the short one."""
        return [parts[place] for place in self.places]


def short_model(step: StepRunner) -> tuple[Calls, ShortModel] | None:
    """Calls of a model, and the shortest one that does what it does; None where its blocks cannot be compared.

    Raises:
        UntraceableError: the step does not run on fake tensors.
    """
    module = step.module
    blocks = {
        prefix + key: block for prefix, container in _containers(module) for key, block in container.named_children()
    }
    if not blocks:
        return None
    try:
        full = _logged(step, blocks)
    except UntraceableError as error:
        if isinstance(error.__cause__, NeedsSavedError):
            return None
        raise
    cuts = _cuts(module, full)
    if cuts:
        try:
            with _without(cuts):
                short = _logged(step, {})
        except Exception as error:  # a model may count on all of its blocks
            raise_if_fatal(error)
            _log.info("OSDP: every block is traced, for without some of them the model fails: %r", error)
        else:
            if _does_the_same(full, cuts, short):
                return full.calls, ShortModel(short.calls, _places(full.calls, cuts), cuts)
    return full.calls, ShortModel(full.calls, _places(full.calls, ()))


def _logged(step: StepRunner, blocks: Mapping[str, nn.Module]) -> ForwardLog:
    """The forward of what the module is now."""
    with step.on_fake_tensors(step.batch_size) as (run, batch), logged_forward(step.module, batch, blocks) as log:
        check_loss(run())
    return log


@contextmanager
def _without(cuts: Sequence[_Cut]) -> Iterator[None]:
    before = [(cut.container._modules, dict(cut.container._modules)) for cut in cuts]
    try:
        for cut, (modules, blocks) in zip(cuts, before, strict=True):
            modules.clear()
            modules.update({new: blocks[old] for old, new in cut.kept.items()})
        yield
    finally:
        for modules, blocks in before:
            modules.clear()
            modules.update(blocks)


def _containers(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Those that may hold enough equal blocks, by the prefix of their names."""
    least = _NUM_FIRST + _LEAST_CUT + 2
    for name, child in module.named_modules():
        if isinstance(child, (nn.ModuleList, nn.Sequential)) and len(child) >= least:
            yield f"{name}." if name else "", child


def _cuts(module: nn.Module, full: ForwardLog) -> tuple[_Cut, ...]:
    """In the order of forward; blocks inside of blocks that are left out go with them."""
    places = Counter(id(child) for _, child in module.named_modules(remove_duplicate=False))
    places.update(id(parameter) for _, parameter in module.named_parameters(remove_duplicate=False))
    cuts: list[_Cut] = []
    for prefix, container in _containers(module):
        if not any(prefix.startswith(cut.prefix) for cut in cuts):
            cut = _cut(prefix, container, full)
            if cut is not None and all(places[id(part)] == 1 for part in _left_out(cut)):
                cuts.append(cut)
    return tuple(sorted(cuts, key=lambda cut: cut.start))


def _left_out(cut: _Cut) -> Iterator[object]:
    for key, block in cut.container._modules.items():
        if key not in cut.kept and block is not None:
            yield from block.modules()
            yield from block.parameters()


def _cut(prefix: str, container: nn.Module, full: ForwardLog) -> _Cut | None:
    """The longest run of blocks that are alike, all but those that stay."""
    keys = list(container._modules)
    blocks = [prefix + key for key in keys]
    begins = [full.marks[block].num_operations for block in blocks if len(full.calls.spans.get(block, ())) == 1]
    if len(begins) < len(blocks) or begins != sorted(begins):
        return None
    alike = [goes_on(full, *blocks[index : index + 3]) for index in range(len(blocks) - 2)]
    runs = [[*run] for is_alike, run in groupby(range(len(alike)), alike.__getitem__) if is_alike]
    longest = max(runs, key=len, default=[])
    if len(longest) < _NUM_FIRST + _LEAST_CUT:
        return None
    first, behind = longest[0] + _NUM_FIRST, longest[-1] + 1
    start, end = full.marks[blocks[first]], full.marks[blocks[behind]]
    return _Cut(
        container=container,
        prefix=prefix,
        kept=dict(zip(keys[:first] + keys[behind:], keys, strict=False)),
        start=start,
        end=end,
        period=(end.num_segments - start.num_segments) // (behind - first),
    )


def _does_the_same(full: ForwardLog, cuts: Sequence[_Cut], short: ForwardLog) -> bool:
    """Whether the short model's forward is the full one's without what was cut."""

    def renamed(name: str) -> str:
        for cut in cuts:
            name = cut.renamed(name)
        return name

    def is_same(token: Token, other: Token) -> bool:
        if isinstance(token, int):
            return other == token - sum(c.end.num_made - c.start.num_made for c in cuts if c.start.num_made <= token)
        return isinstance(token, str) and other == renamed(token)

    operations = _outside(full.operations, [(cut.start.num_operations, cut.end.num_operations) for cut in cuts])
    sequence = _outside(full.calls.sequence, _segments(cuts))
    return (
        [renamed(name) for name in sequence] == short.calls.sequence
        and renamed(full.calls.last) == short.calls.last
        and are_same(operations, short.operations, is_same)
    )


def _places(calls: Calls, cuts: Sequence[_Cut]) -> list[int]:
    """As in `ShortModel`, for a full model with these calls."""
    segments = range(len(calls.sequence) + 1)
    place = {segment: index for index, segment in enumerate(_outside(segments, _segments(cuts)))}
    for cut in cuts:
        for segment in range(cut.start.num_segments, cut.end.num_segments):
            place[segment] = place[segment - cut.period]
    return [place[segment] for segment in segments]


def _segments(cuts: Sequence[_Cut]) -> list[tuple[int, int]]:
    return [(cut.start.num_segments, cut.end.num_segments) for cut in cuts]


def _outside(items: Sequence[T], cuts: Sequence[tuple[int, int]]) -> list[T]:
    left = list(items)
    for start, end in reversed(cuts):
        del left[start:end]
    return left


class Logged(NamedTuple):
    """One operation."""

    what: tuple[Any, ...]
    """Function, numbers, and of tensors all but which ones they are."""
    tokens: tuple[Token, ...]
    """Which tensors: first those that it takes, then those that it returns."""


class Mark(NamedTuple):
    """A moment of the forward."""

    num_operations: int
    num_segments: int
    """That have begun."""
    num_made: int
    """Storages made so far."""
    live_bytes: int
    """Of those that are alive."""


class NeedsSavedError(Exception):
    """Forward runs a backward of its own, and so needs what autograd saves."""


@contextmanager
def logged_forward(module: nn.Module, batch: Any, blocks: Mapping[str, nn.Module]) -> Iterator[ForwardLog]:
    """Logs a forward on fake tensors; what autograd saves is dropped, so that only what the model keeps stays alive.

    Raises:
        NeedsSavedError: inside, where a tensor is asked for that was dropped.
    """

    def needed(_: object) -> Tensor:
        raise NeedsSavedError

    with ExitStack() as cleanup:
        log = ForwardLog(module, batch, cleanup.enter_context(recorded_calls(module)))
        for name, block in blocks.items():
            cleanup.callback(block.register_forward_pre_hook(partial(log.mark, name), prepend=True).remove)
        cleanup.enter_context(saved_tensors_hooks(lambda _: None, needed))
        cleanup.enter_context(log)
        yield log


def goes_on(full: ForwardLog, before: str, block: str, after: str) -> bool:
    """Whether from the beginning of a block to that of the one after it the same is done as from the one before it."""
    start, middle, end = (full.marks[name] for name in (before, block, after))
    operators, signatures = full.calls.sequence[start.num_segments : middle.num_segments], full.calls.signatures
    shift = middle.num_made - start.num_made

    def moved(name: str) -> str:
        return block + name.removeprefix(before) if name == before or name.startswith(f"{before}.") else name

    def is_same(token: Token, other: Token) -> bool:
        if isinstance(token, int):
            return other == token + shift or (other == token and token < start.num_made)
        return isinstance(token, str) and other in (token, moved(token))

    return (
        start.live_bytes == middle.live_bytes == end.live_bytes
        and bool(operators)
        and [moved(name) for name in operators] == full.calls.sequence[middle.num_segments : end.num_segments]
        and all(signatures[name] == signatures[moved(name)] for name in (before, *operators))
        and are_same(
            full.operations[start.num_operations : middle.num_operations],
            full.operations[middle.num_operations : end.num_operations],
            is_same,
        )
    )


def are_same(some: Sequence[Logged], others: Sequence[Logged], is_same: Callable[[Token, Token], bool]) -> bool:
    """Whether operations are the same on the same tensors, as ``is_same`` says of two."""
    return len(some) == len(others) and all(
        one.what == other.what and len(one.tokens) == len(other.tokens) and all(map(is_same, one.tokens, other.tokens))
        for one, other in zip(some, others, strict=True)
    )


class ForwardLog(TorchDispatchMode):
    """Every operation of a forward, and on which tensors it works: to be compared one block on, or with another one."""

    supports_higher_order_operators = True  # `recorded_calls` refuses them

    def __init__(self, module: nn.Module, batch: Any, calls: Calls) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls = calls
        self.operations: list[Logged] = []
        self.marks: dict[str, Mark] = {}
        """Block -> where its first call begins."""
        self._num_made = 0
        self._live_bytes = 0
        # storages that are there before; names of a module's, its attributes included, begin with its own
        self._tokens: dict[int, Token] = {}
        held = [(f"{name}.", vars(child)) for name, child in module.named_modules()]
        for prefix, holder in [*held, ("", batch)]:
            for index, tensor in enumerate(tensors_in(holder)):
                if (key := storage_key(tensor)) is not None:
                    self._tokens.setdefault(key, f"{prefix}{index}")

    def mark(self, block: str, *_: object) -> None:
        """Hook before the forward of a block."""
        mark = Mark(len(self.operations), len(self.calls.sequence), self._num_made, self._live_bytes)
        self.marks.setdefault(block, mark)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func.namespace in {"prim", "higher_order"}:  # the first asks a fake tensor for its device
            return func(*args, **(kwargs or {}))
        tokens: list[Token] = []
        # before it runs, for it may change them
        taken = self._described((args, kwargs), tokens, made=False)
        result = func(*args, **(kwargs or {}))
        made = self._described(result, tokens, made=True)
        self.operations.append(Logged((func, torch.is_grad_enabled(), taken, made), tuple(tokens)))
        return result

    def _described(self, value: Any, tokens: list[Token], *, made: bool) -> Any:
        if isinstance(value, Tensor):
            tokens.append(self._token(value, made=made))
            return _description(value)
        if isinstance(value, (list, tuple)):
            return tuple([self._described(item, tokens, made=made) for item in value])
        if isinstance(value, dict):
            return tuple([(key, self._described(item, tokens, made=made)) for key, item in value.items()])
        return value

    def _token(self, tensor: Tensor, *, made: bool) -> Token:
        key = storage_key(tensor)
        if key is None:
            return object()
        if key not in self._tokens:
            if not made:
                return f"outside {key}"
            storage = tensor.untyped_storage()
            self._tokens[key] = self._num_made
            self._num_made += 1
            self._live_bytes += storage.nbytes()
            weakref.finalize(storage, self._freed, key, storage.nbytes()).atexit = False
        return self._tokens[key]

    def _freed(self, key: int, num_bytes: int) -> None:
        del self._tokens[key]  # another storage may get it
        self._live_bytes -= num_bytes


def _description(tensor: Tensor) -> tuple[Any, ...]:
    node = tensor.grad_fn
    return (
        tensor.shape,
        tensor.stride() if tensor.layout is torch.strided else None,
        tensor.dtype,
        tensor.requires_grad,
        None if node is None else (node.name(), tensor.retains_grad, bool(tensor._backward_hooks)),
    )
