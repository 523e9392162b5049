"""Equal blocks in a row, of which a few stand for all, so that following a step takes as long at any depth.

A *short model* is the module with most of its repeated blocks taken out of their container. The bytes of the full model
are read off a step of the short one. The blocks to take out are found by comparing operations, in three steps:

- A forward of the full model is logged. The operations from the beginning of a block to the beginning of the next must
  be those of the block before, on the same tensors as seen from the block, and leave no tensor alive.
- A forward of the short model must be that of the full one with the operations of these blocks left out.
- Two of the blocks that stay must be equal in all that is measured. The blocks taken out are assumed to equal them.
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
"""Name of a storage: the number under which it was made, a text where it was there before, or an object that equals no
other."""
_log = logging.getLogger(__name__)

_NUM_FIRST = 3
"""Equal blocks that stay at the beginning, of which the last two are compared; one block stays at the end."""
_LEAST_CUT = 4
"""Least number of blocks that are taken out."""


@dataclass(frozen=True)
class _Cut:
    """Blocks of one container that are taken out."""

    container: nn.Module
    prefix: str
    """Prefix of the names of the container's blocks."""
    kept: dict[str, str]
    """Key of a block that stays -> its key in the short model."""
    start: Mark
    """Beginning of the first block that is taken out."""
    end: Mark
    """Beginning of the first block behind them."""
    period: int
    """Segments of a block."""

    def renamed(self, name: str) -> str:
        """Name in the short model of a module or tensor of the full one."""
        if not name.startswith(self.prefix):
            return name
        key, dot, rest = name.removeprefix(self.prefix).partition(".")
        return f"{self.prefix}{self.kept.get(key, f'({key} left out)')}{dot}{rest}"


@dataclass(frozen=True)
class ShortModel:
    """Model with some blocks taken out, which stands for the full model; the full model itself where none can be."""

    calls: Calls
    """Forward of the short model."""
    places: Sequence[int]
    """Segment of the short model that is, or stands for, each segment of the full model."""
    cuts: tuple[_Cut, ...] = ()

    def applied(self) -> AbstractContextManager[None]:
        """Makes the model the short one for a while."""
        return _without(self.cuts)

    def has_equal_blocks(self, parts: Sequence[object]) -> bool:
        """Tells if blocks that stand for others have equal ``parts``, one for each segment of the short model."""
        places = [(self.places[cut.start.num_segments], cut.period) for cut in self.cuts]
        return all(parts[place : place + period] == parts[place - period : place] for place, period in places)

    def unfolded(self, parts: Sequence[T]) -> list[T]:
        """Parts of all segments of the full model, from the parts of the short model's."""
        return [parts[place] for place in self.places]


def short_model(step: StepRunner) -> tuple[Calls, ShortModel] | None:
    """Calls of a model, and the shortest model that stands for it; None where its blocks cannot be compared.

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
        full = _log_forward(step, blocks)
    except UntraceableError as error:
        if isinstance(error.__cause__, NeedsSavedError):
            return None
        raise
    cuts = _cuts(module, full)
    if cuts:
        try:
            with _without(cuts):
                short = _log_forward(step, {})
        except Exception as error:  # a model may count on all of its blocks
            raise_if_fatal(error)
            _log.info("OSDP: every block is traced, for without some of them the model fails: %r", error)
        else:
            if _is_without_cuts(short, full, cuts):
                return full.calls, ShortModel(short.calls, _places(full.calls, cuts), cuts)
    return full.calls, ShortModel(full.calls, _places(full.calls, ()))


def _log_forward(step: StepRunner, blocks: Mapping[str, nn.Module]) -> ForwardLog:
    """Logs a forward of the module with the blocks that it has now."""
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
    """Containers with enough children, each with the prefix of their names."""
    least = _NUM_FIRST + _LEAST_CUT + 2
    for name, child in module.named_modules():
        if isinstance(child, (nn.ModuleList, nn.Sequential)) and len(child) >= least:
            yield f"{name}." if name else "", child


def _cuts(module: nn.Module, full: ForwardLog) -> tuple[_Cut, ...]:
    """Cuts in the order of forward; blocks inside of blocks that are taken out go with them."""
    places = Counter(id(child) for _, child in module.named_modules(remove_duplicate=False))
    places.update(id(parameter) for _, parameter in module.named_parameters(remove_duplicate=False))
    cuts: list[_Cut] = []
    for prefix, container in _containers(module):
        if not any(prefix.startswith(cut.prefix) for cut in cuts):
            cut = _cut(prefix, container, full)
            if cut is not None and all(places[id(part)] == 1 for part in _parts_taken_out(cut)):
                cuts.append(cut)
    return tuple(sorted(cuts, key=lambda cut: cut.start))


def _parts_taken_out(cut: _Cut) -> Iterator[object]:
    for key, block in cut.container._modules.items():
        if key not in cut.kept and block is not None:
            yield from block.modules()
            yield from block.parameters()


def _cut(prefix: str, container: nn.Module, full: ForwardLog) -> _Cut | None:
    """Longest run of equal blocks of a container, without those that stay; None where the run is too short."""
    keys = list(container._modules)
    blocks = [prefix + key for key in keys]
    begins = [full.marks[block].num_operations for block in blocks if len(full.calls.spans.get(block, ())) == 1]
    if len(begins) < len(blocks) or begins != sorted(begins):
        return None
    repeats = [is_repeated(full, *blocks[index : index + 3]) for index in range(len(blocks) - 2)]
    runs = [[*run] for are_equal, run in groupby(range(len(repeats)), repeats.__getitem__) if are_equal]
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


def _is_without_cuts(short: ForwardLog, full: ForwardLog, cuts: Sequence[_Cut]) -> bool:
    """Tells if the short model's forward is the full one's without the blocks that are taken out."""

    def renamed(name: str) -> str:
        for cut in cuts:
            name = cut.renamed(name)
        return name

    def is_same_tensor(token: Token, other: Token) -> bool:
        if isinstance(token, int):
            return other == token - sum(c.end.num_made - c.start.num_made for c in cuts if c.start.num_made <= token)
        return isinstance(token, str) and other == renamed(token)

    operations = _outside(full.operations, [(cut.start.num_operations, cut.end.num_operations) for cut in cuts])
    sequence = _outside(full.calls.sequence, _segments(cuts))
    return (
        [renamed(name) for name in sequence] == short.calls.sequence
        and renamed(full.calls.last) == short.calls.last
        and are_equal_operations(operations, short.operations, is_same_tensor)
    )


def _places(calls: Calls, cuts: Sequence[_Cut]) -> list[int]:
    """`ShortModel.places` of a full model with these calls."""
    segments = range(len(calls.sequence) + 1)
    place = {segment: index for index, segment in enumerate(_outside(segments, _segments(cuts)))}
    for cut in cuts:
        for segment in range(cut.start.num_segments, cut.end.num_segments):
            place[segment] = place[segment - cut.period]
    return [place[segment] for segment in segments]


def _segments(cuts: Sequence[_Cut]) -> list[tuple[int, int]]:
    return [(cut.start.num_segments, cut.end.num_segments) for cut in cuts]


def _outside(items: Sequence[T], cuts: Sequence[tuple[int, int]]) -> list[T]:
    remaining = list(items)
    for start, end in reversed(cuts):
        del remaining[start:end]
    return remaining


class Logged(NamedTuple):
    """Operation of the model, as it was logged."""

    description: tuple[Any, ...]
    """Function, numbers, and shapes, strides, dtypes and autograd's marks of tensors."""
    tokens: tuple[Token, ...]
    """Storages of tensors that the operation takes, then of those that it returns."""


class Mark(NamedTuple):
    """Moment of a forward."""

    num_operations: int
    """Operations so far."""
    num_segments: int
    """Segments that have begun."""
    num_made: int
    """Storages made so far."""
    live_bytes: int
    """Bytes of storages that were made and are alive."""


class NeedsSavedError(Exception):
    """Raised where forward runs a backward of its own, and so needs tensors that autograd saves."""


@contextmanager
def logged_forward(module: nn.Module, batch: Any, blocks: Mapping[str, nn.Module]) -> Iterator[ForwardLog]:
    """Logs a forward on fake tensors, in which only tensors that the model keeps stay alive: autograd saves none.

    Raises:
        NeedsSavedError: raised inside, where a saved tensor is needed.
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


def is_repeated(full: ForwardLog, before: str, block: str, after: str) -> bool:
    """Tells if the operations from ``before`` to ``block`` repeat from there to ``after``, three blocks in a row."""
    start, middle, end = (full.marks[name] for name in (before, block, after))
    operators, signatures = full.calls.sequence[start.num_segments : middle.num_segments], full.calls.signatures
    shift = middle.num_made - start.num_made

    def moved(name: str) -> str:
        return block + name.removeprefix(before) if name == before or name.startswith(f"{before}.") else name

    def is_same_tensor(token: Token, other: Token) -> bool:
        if isinstance(token, int):
            return other == token + shift or (other == token and token < start.num_made)
        return isinstance(token, str) and other in (token, moved(token))

    return (
        start.live_bytes == middle.live_bytes == end.live_bytes
        and bool(operators)
        and [moved(name) for name in operators] == full.calls.sequence[middle.num_segments : end.num_segments]
        and all(signatures[name] == signatures[moved(name)] for name in (before, *operators))
        and are_equal_operations(
            full.operations[start.num_operations : middle.num_operations],
            full.operations[middle.num_operations : end.num_operations],
            is_same_tensor,
        )
    )


def are_equal_operations(
    first: Sequence[Logged], second: Sequence[Logged], is_same_tensor: Callable[[Token, Token], bool]
) -> bool:
    """Tells if two sequences have the same operations, on tensors that ``is_same_tensor`` takes for the same."""
    return len(first) == len(second) and all(
        one.description == other.description
        and len(one.tokens) == len(other.tokens)
        and all(map(is_same_tensor, one.tokens, other.tokens))
        for one, other in zip(first, second, strict=True)
    )


class ForwardLog(TorchDispatchMode):
    """Log of every operation of a forward and the tensors that it works on, to compare blocks and models by."""

    supports_higher_order_operators = True  # `recorded_calls` refuses them

    def __init__(self, module: nn.Module, batch: Any, calls: Calls) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls = calls
        self.operations: list[Logged] = []
        self.marks: dict[str, Mark] = {}
        """Block -> beginning of its first call."""
        self._num_made = 0
        self._live_bytes = 0
        # storages that are there before; the names of those in attributes of a module begin with the module's name
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
        # described before the operation runs, for it may change its arguments
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
        del self._tokens[key]  # another storage may get the same key
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
