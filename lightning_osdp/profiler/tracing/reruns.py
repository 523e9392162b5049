"""Segments that activation checkpointing runs again in backward, which gathers units for them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import takewhile
from typing import Any, NamedTuple

from torch import nn
from torch._C import DisableTorchFunction

from lightning_osdp.profiler.tracing.calls import Position, floating_tensors


class RerunPlace(NamedTuple):
    """Place of a segment in a part of forward that runs again at once; equal for segments of equal blocks."""

    num_before: int
    """Segments of the part before this one."""
    num_behind: int
    """Segments of the part behind this one."""
    is_early: bool
    """True: the part runs again before backward has come to the output of the part's last operator."""
    num_modules: int
    """Number of modules, the operator and those around it, that are called again before backward has come to their
    outputs."""


class Reruns:
    """Record of the segments that backward runs again, and of the modules that are called for that."""

    def __init__(self, position: Position) -> None:
        self._position = position
        self._running: list[str] = []
        self._reached: dict[str, int] = {}
        """Module -> last segment of its latest call to whose outputs backward has come."""
        self._num_modules: dict[int, dict[int, int]] = {}
        """Number of reruns so far -> the segments of the latest rerun, with their `RerunPlace.num_modules`."""

    def enter(self, name: str, *_: object) -> None:
        """Hook before a module."""
        if self._position.in_backward:
            self._running.append(name)

    def call(self, *_: object) -> None:
        """Hook before an operator, behind those of its position."""
        position = self._position
        if not position.in_backward:
            return
        came_from = position.came_from[-1]
        anew = takewhile(lambda name: self._reached.get(name, came_from + 1) > came_from, reversed(self._running))
        self._num_modules.setdefault(len(position.came_from), {})[position.now] = len([*anew])

    def leave(self, name: str, _: nn.Module, __: Any, output: Any) -> None:
        """Hook behind a module, also where checkpointing has stopped it early."""
        position = self._position
        if position.in_backward:
            self._running.pop()
        last = min(position.now, position.num_segments - 2)
        tensor = next((tensor for tensor in floating_tensors(output) if tensor.requires_grad), None)
        if tensor is not None:
            with DisableTorchFunction():  # no hook of the model's own
                tensor.register_hook(lambda _: self._reached.update({name: last}))

    def by_segment(self) -> dict[int, RerunPlace]:
        """Segments that are run again, each the first time only: reruns inside of reruns gather nothing."""
        again: dict[int, RerunPlace] = {}
        for came_from, num_modules in zip(self._position.came_from, self._num_modules.values(), strict=True):
            first, last = min(num_modules), max(num_modules)
            if not again.keys() & num_modules.keys():
                for segment in range(first, last + 1):
                    num = num_modules.get(segment, 0)
                    again[segment] = RerunPlace(segment - first, last - segment, came_from != last, num)
        return again


@contextmanager
def recorded_reruns(module: nn.Module, position: Position) -> Iterator[Reruns]:
    """Records which segments backward runs again; the position has to be `followed` already."""
    modules, reruns = dict(module.named_modules()), Reruns(position)
    with ExitStack() as cleanup:
        for name in position.calls.spans:
            child = modules[name]
            cleanup.callback(child.register_forward_pre_hook(partial(reruns.enter, name)).remove)
            cleanup.callback(child.register_forward_hook(partial(reruns.leave, name), always_call=True).remove)
        for name in dict.fromkeys(position.calls.sequence):
            cleanup.callback(modules[name].register_forward_pre_hook(reruns.call).remove)
        yield reruns
