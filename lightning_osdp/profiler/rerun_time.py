"""Operations of blocks, and how much of a block's forward checkpointing runs again in backward.

torch's non-reentrant checkpoint runs forward again as far as the last tensor that forward has saved. All that follows
runs once, such as a block's last matrix product and its sum with the residual, which save nothing of their results.

References:
    torch/utils/checkpoint.py (``_recomputation_hook``, ``_StopRecomputationError``). [Counted in torch 2.13.]
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

from torch import Tensor
from typing_extensions import override

from lightning_osdp.core.profile import Span
from lightning_osdp.profiler.operation_time import Operation, OperationRecorder
from lightning_osdp.profiler.step.run_step import StepRunner
from lightning_osdp.profiler.tracing.calls import Position, followed
from lightning_osdp.profiler.tracing.saved_tensors import saved_tensors_hooks
from lightning_osdp.profiler.tracing.trace import Trace, find_blocks


@dataclass(frozen=True)
class BlockOperations:
    """Operations of one forward of a block, in the order of dispatch; without views and allocations."""

    operations: tuple[tuple[int, Operation], ...]
    """Each with its segment."""
    num_again: int
    """Number of the first operations that checkpointing runs again."""
    span: Span
    """Segments of the block, of the model that was followed."""
    by_segment: Mapping[int, Counter[Operation]]
    """All operations of the model's forward, those outside of the block included."""

    def shares_again(self, seconds_of: Callable[[Operation], float]) -> tuple[float, ...]:
        """Fractions of the forward seconds of each segment of the block that its running again takes."""
        again: dict[int, Counter[Operation]] = {}
        for segment, operation in self.operations[: self.num_again]:
            again.setdefault(segment, Counter())[operation] += 1
        first, last = self.span

        def share(segment: int) -> float:
            every, part = (of.get(segment, Counter[Operation]()) for of in (self.by_segment, again))
            if part == every:
                return 1.0
            part_s, every_s = (sum(count * seconds_of(each) for each, count in of.items()) for of in (part, every))
            return part_s / every_s if every_s > 0 else 1.0

        return tuple(map(share, range(first, last + 1)))


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
        span[0]: BlockOperations(tuple(recorder.of_blocks[name]), recorder.num_again[name], span, recorder.operations)
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

    def enter(self, name: str, *_: object) -> None:
        """Hook before a block."""
        self._inside = name
        self.of_blocks[name], self.num_again[name] = [], 0

    def leave(self, *_: object) -> None:
        """Hook behind a block."""
        self._inside = None

    def keep(self, tensor: Tensor) -> Tensor:
        """Hook on every tensor that autograd saves: of an operation's inputs before the operation is dispatched."""
        if self._inside is not None:
            self.num_again[self._inside] = len(self.of_blocks[self._inside])
        return tensor.detach()

    @override
    def note(self, segment: int, operation: Operation) -> None:
        super().note(segment, operation)
        if self._inside is not None:
            self.of_blocks[self._inside].append((segment, operation))
