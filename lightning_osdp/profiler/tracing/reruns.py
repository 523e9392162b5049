"""What activation checkpointing runs again in backward, the model's own included: units are gathered for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import takewhile
from typing import Any, NamedTuple

from torch import nn

from lightning_osdp.profiler.tracing.calls import Position, floating_tensors


class Again(NamedTuple):
    """One segment of those that backward runs again at once; equal for segments of equal blocks."""

    num_before: int
    num_behind: int
    is_early: bool
    """Whether backward had not come to what the last one's operator returned."""
    num_modules: int
    """The operator and modules around it, as many as are called again before backward has come to their outputs."""


class Reruns:
    """Takes notes of the segments that backward runs again, and of the modules that are called for it."""

    def __init__(self, position: Position) -> None:
        self._position = position
        self._running: list[str] = []
        self._reached: dict[str, int] = {}
        """Module -> the last segment of its call to whose outputs backward has come."""
        self._found: dict[int, dict[int, int]] = {}
        """For each time, the segments that are run again, with their `Again.num_modules`."""

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
        self._found.setdefault(len(position.came_from), {})[position.now] = len([*anew])

    def leave(self, name: str, _: nn.Module, __: Any, output: Any) -> None:
        """Hook behind a module, also where checkpointing has stopped it early."""
        position = self._position
        if position.in_backward:
            self._running.pop()
        last = min(position.now, position.num_segments - 2)
        tensor = next((tensor for tensor in floating_tensors(output) if tensor.requires_grad), None)
        if tensor is not None:
            tensor.register_hook(lambda _: self._reached.update({name: last}))

    def by_segment(self) -> dict[int, Again]:
        """The segments that are run again, each the first time only: what runs inside of that gathers nothing."""
        found: dict[int, Again] = {}
        for came_from, num_modules in zip(self._position.came_from, self._found.values(), strict=True):
            first, last = min(num_modules), max(num_modules)
            if not found.keys() & num_modules.keys():
                for segment in range(first, last + 1):
                    num = num_modules.get(segment, 0)
                    found[segment] = Again(segment - first, last - segment, came_from != last, num)
        return found


@contextmanager
def followed_again(module: nn.Module, position: Position) -> Iterator[Reruns]:
    """Notes what backward runs again, where the position is followed already."""
    modules, reruns = dict(module.named_modules()), Reruns(position)
    with ExitStack() as cleanup:
        for name in position.calls.spans:
            child = modules[name]
            cleanup.callback(child.register_forward_pre_hook(partial(reruns.enter, name)).remove)
            cleanup.callback(child.register_forward_hook(partial(reruns.leave, name), always_call=True).remove)
        for name in dict.fromkeys(position.calls.sequence):
            cleanup.callback(modules[name].register_forward_pre_hook(reruns.call).remove)
        yield reruns
