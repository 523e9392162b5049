"""One forward of a model, to be compared: with itself one block further on, or with the forward of another model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import nn

from lightning_osdp.profiler.equal_blocks.operation_log import (
    Logged,
    Mark,
    OperationLog,
    Token,
    named_storages,
    saves_nothing,
)
from lightning_osdp.profiler.tracing.calls import Calls, recorded_calls


@dataclass
class Forward:
    """One forward of a module."""

    calls: Calls
    operations: list[Logged]
    marks: dict[str, Mark] = field(default_factory=dict)
    """Block -> where its first call begins."""

    def first_segment(self, block: str) -> int:
        """In which its first call begins."""
        return self.calls.spans[block][0][0]

    def operators(self, block: str, after: str) -> list[str]:
        """Called from the beginning of one block to that of another."""
        return self.calls.sequence[self.first_segment(block) : self.first_segment(after)]


@contextmanager
def recorded_forward(module: nn.Module, batch: Any, blocks: Mapping[str, nn.Module]) -> Iterator[Forward]:
    """Records a forward; what autograd saves is dropped, so that what stays alive is what the model keeps.

    Args:
        module: the model, of fake tensors.
        batch: what it will run on.
        blocks: modules whose beginnings are marked, by their names.
    """
    log = OperationLog(named_storages(module, batch))
    with ExitStack() as cleanup:
        forward = Forward(cleanup.enter_context(recorded_calls(module)), log.operations)

        def begin(name: str, *_: object) -> None:
            forward.marks.setdefault(name, log.mark())

        for name, block in blocks.items():
            cleanup.callback(block.register_forward_pre_hook(partial(begin, name), prepend=True).remove)
        cleanup.enter_context(saves_nothing())
        cleanup.enter_context(log)
        yield forward


def goes_on(full: Forward, before: str, block: str, after: str) -> bool:
    """Whether from the beginning of a block to that of the one after it the same is done as from the one before it."""
    start, middle, end = (full.marks[name] for name in (before, block, after))
    shift = middle.num_made - start.num_made
    operators = full.operators(before, block)

    def moved(name: str) -> str:
        return block + name.removeprefix(before) if name == before or name.startswith(f"{before}.") else name

    def is_same(token: Token, other: Token) -> bool:
        if isinstance(token, int):
            return other == token + shift or (other == token and token < start.num_made)
        return isinstance(token, str) and other in (token, moved(token))

    signatures = full.calls.signatures
    return (
        start.live_bytes == middle.live_bytes == end.live_bytes
        and bool(operators)
        and [moved(name) for name in operators] == full.operators(block, after)
        and all(signatures[name] == signatures[moved(name)] for name in (before, *operators))
        and are_same(_between(full, start, middle), _between(full, middle, end), is_same)
    )


def _between(forward: Forward, start: Mark, end: Mark) -> list[Logged]:
    return forward.operations[start.num_operations : end.num_operations]


def are_same(some: Sequence[Logged], others: Sequence[Logged], is_same: Callable[[Token, Token], bool]) -> bool:
    """Whether operations are the same on the same tensors, as ``is_same`` says of two."""
    return len(some) == len(others) and all(
        one.what == other.what and len(one.tokens) == len(other.tokens) and all(map(is_same, one.tokens, other.tokens))
        for one, other in zip(some, others, strict=True)
    )
