"""Operations of blocks: how much of a block's forward checkpointing runs again, and which results are worth keeping.

torch's non-reentrant checkpoint runs forward again as far as the last tensor that forward has saved. All that follows
runs once, such as a block's last matrix product and its sum with the residual, which save nothing of their results.

References:
    torch/utils/checkpoint.py (``_recomputation_hook``, ``_StopRecomputationError``). [Counted in torch 2.13.]
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from lightning_osdp.core.cluster import DeviceRates
from lightning_osdp.core.profile import Span
from lightning_osdp.operations.recomputation import KeptResults, is_heavy
from lightning_osdp.profiler.machine.stopwatch import fastest_s
from lightning_osdp.profiler.step.run_step import StepRunner
from lightning_osdp.profiler.timing.operation_time import Operation, OperationRecorder
from lightning_osdp.profiler.tracing.calls import Position, followed
from lightning_osdp.profiler.tracing.saved_tensors import saved_tensors_hooks
from lightning_osdp.profiler.tracing.trace import Trace, find_blocks

_NUM_PRODUCTS, _NUM_BETWEEN = 7, 5
"""Products of a block whose overhead is measured, and operations after each: about those of a Llama block."""
_REPEATS, _BUDGET_S = 50, 0.5


class HeavyResult(NamedTuple):
    """Result of a heavy operation that runs again where its block recomputes."""

    segment: int
    """Segment of the operation, counted from the block's first."""
    share: float
    """Fraction of the segment's forward seconds that the operation takes."""
    num_bytes: int


class Again(NamedTuple):
    """Work of a block that recomputes."""

    kind: Hashable
    """Equal for blocks that do the same; None where nobody asks."""
    shares: tuple[float, ...]
    """Fractions of the forward seconds of each segment of the block that running again takes."""
    results: tuple[HeavyResult, ...]
    """By position: the first heavy operations of the block. Others, behind its last saved tensor, do not run again."""
    num_operations: int
    """Operations of a forward of the block."""


class LevelOverhead(NamedTuple):
    """Seconds of the host for each operation of a block's forward, with its second run and its backward."""

    plain_s: float
    """Seconds where the block recomputes everything."""
    more_s: float
    """Seconds beyond those for finding kept results and handing them back."""

    def seconds(self, num_operations: int, computing_s: float = 0.0) -> float:
        """Seconds by which a block with so many operations is slower for keeping some results.

        The host works while a device computes for ``computing_s``; where the host computes itself, that is 0.
        """
        hidden_s = max(0.0, computing_s - self.plain_s * num_operations)
        return max(0.0, self.more_s * num_operations - hidden_s)


_OF_A_HOST = LevelOverhead(plain_s=35e-6, more_s=28e-6)
"""`level_overhead` of a core of an AMD EPYC, torch 2.13.0, 2026-11-26: for machines that are only described."""


def stated_overhead(rates: DeviceRates) -> LevelOverhead:
    """Overhead of a host whose device has these rates; none where the device is the host itself."""
    return _OF_A_HOST if rates.is_cuda else LevelOverhead(0.0, 0.0)


def level_overhead() -> LevelOverhead:
    """Overhead on this machine, of products and functions between them on tensors of a few elements."""
    weight, given = torch.full((2, 2), 0.5), torch.ones(2, 2, requires_grad=True)

    def run(x: Tensor) -> Tensor:
        for _ in range(_NUM_PRODUCTS):
            x = x @ weight
            for _ in range(_NUM_BETWEEN):
                x = torch.tanh(x)
        return x

    def step(contexts: Mapping[str, Any]) -> None:
        torch.autograd.grad(checkpoint(run, given, use_reentrant=False, **contexts).sum(), given)

    kept = {"context_fn": KeptResults(range(_NUM_PRODUCTS)).contexts}
    with torch.enable_grad():
        plain_s, level_s = (
            fastest_s(partial(step, contexts), torch.device("cpu"), repeats=_REPEATS, num_calls=1, budget_s=_BUDGET_S)
            for contexts in ({}, kept)
        )
    num_operations = _NUM_PRODUCTS * (1 + _NUM_BETWEEN)
    return LevelOverhead(plain_s / num_operations, max(0.0, level_s - plain_s) / num_operations)


@dataclass(frozen=True)
class BlockOperations:
    """Operations of one forward of a block, in the order of dispatch; without views and allocations."""

    operations: tuple[tuple[int, Operation], ...]
    """Each with its segment."""
    num_again: int
    """Number of the first operations that checkpointing runs again."""
    heavy: tuple[int, ...]
    """Places of heavy operations, see `operations.recomputation.is_heavy`."""
    span: Span
    """Segments of the block, of the model that was followed."""
    by_segment: Mapping[int, Counter[Operation]]
    """All operations of the model's forward, those outside of the block included."""

    @property
    def kind(self) -> Hashable:
        """Equal for blocks that do the same."""
        operations = tuple((segment - self.span[0], operation) for segment, operation in self.operations)
        return operations, self.num_again, self.heavy

    def again(self, seconds_of: Callable[[Operation], float], *, with_results: bool = False) -> Again:
        """Fractions of forward that the block runs again, and results of heavy operations only where they are asked."""
        heavy = [place for place in self.heavy if place < self.num_again] if with_results else []
        results = (self.operations[place] for place in heavy)
        return Again(
            self.kind if with_results else None,
            self._shares(seconds_of),
            tuple(
                HeavyResult(
                    max(0, segment - self.span[0]),
                    seconds_of(operation) / _total_s(self.by_segment[segment], seconds_of),
                    sum(result.num_bytes for result in operation.results),
                )
                for segment, operation in results
            ),
            len(self.operations),
        )

    def _shares(self, seconds_of: Callable[[Operation], float]) -> tuple[float, ...]:
        """`Again.shares`."""
        again: dict[int, Counter[Operation]] = {}
        for segment, operation in self.operations[: self.num_again]:
            again.setdefault(segment, Counter())[operation] += 1
        first, last = self.span

        def share(segment: int) -> float:
            every, part = (of.get(segment, Counter[Operation]()) for of in (self.by_segment, again))
            if part == every:
                return 1.0
            every_s = _total_s(every, seconds_of)
            return _total_s(part, seconds_of) / every_s if every_s > 0 else 1.0

        return tuple(map(share, range(first, last + 1)))


def work_of_blocks(
    step: StepRunner, trace: Trace, size: int, seconds_of: Callable[[Operation], float], *, with_results: bool
) -> dict[str, Again]:
    """Work of each block of a trace where it recomputes ``size`` samples."""
    operations = block_operations(step, trace, size)
    once = {id(each): each for each in operations.values()}  # of many equal blocks a few are followed
    works = {key: each.again(seconds_of, with_results=with_results) for key, each in once.items()}
    return {name: works[id(each)] for name, each in operations.items()}


def block_operations(step: StepRunner, trace: Trace, size: int) -> dict[str, BlockOperations]:
    """Operations of each block of a trace in a forward of ``size`` samples."""
    module, calls, places = step.module, trace.short.calls, trace.short.places
    position = Position(calls, lambda: None)
    recorder = _BlockRecorder(position)
    with trace.short.applied(), ExitStack() as cleanup:
        followed_blocks = find_blocks(module, calls, step.blocks)
        for name in followed_blocks:
            block = module.get_submodule(name)
            before = block.register_forward_pre_hook(partial(recorder.enter, name), prepend=True)
            cleanup.callback(before.remove)
            cleanup.callback(block.register_forward_hook(recorder.leave).remove)
        run, _ = cleanup.enter_context(trace.trial(size))
        cleanup.enter_context(recorder)
        cleanup.enter_context(followed(module, position))
        with saved_tensors_hooks(recorder.keep, lambda packed: packed):
            run()
    found = {
        span[0]: BlockOperations(
            operations=tuple(recorder.of_blocks[name]),
            num_again=recorder.num_again[name],
            heavy=tuple(recorder.heavy[name]),
            span=span,
            by_segment=recorder.operations,
        )
        for name, span in followed_blocks.items()
    }
    return {name: found[places[first]] for name, (first, _) in trace.blocks.items()}


class _BlockRecorder(OperationRecorder):
    """Records operations by segment, and those of each block in their order."""

    def __init__(self, position: Position) -> None:
        super().__init__(lambda: position.now)
        self._inside: str | None = None
        self.of_blocks: dict[str, list[tuple[int, Operation]]] = {}
        self.num_again: dict[str, int] = {}
        """Block -> number of its operations before it saved its last tensor."""
        self.heavy: dict[str, list[int]] = {}

    def enter(self, name: str, *_: object) -> None:
        """Hook before a block."""
        self._inside = name
        self.of_blocks[name], self.num_again[name], self.heavy[name] = [], 0, []

    def leave(self, *_: object) -> None:
        """Hook behind a block."""
        self._inside = None

    def keep(self, tensor: Tensor) -> Tensor:
        """Hook on every tensor that autograd saves: of an operation's inputs before the operation is dispatched."""
        if self._inside is not None:
            self.num_again[self._inside] = len(self.of_blocks[self._inside])
        return tensor.detach()

    @override
    def note(self, segment: int, operation: Operation, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        super().note(segment, operation, args, kwargs)
        if self._inside is not None:
            if is_heavy(operation.function, args, kwargs):
                self.heavy[self._inside].append(len(self.of_blocks[self._inside]))
            self.of_blocks[self._inside].append((segment, operation))


def _total_s(operations: Mapping[Operation, int], seconds_of: Callable[[Operation], float]) -> float:
    return sum(count * seconds_of(each) for each, count in operations.items())
