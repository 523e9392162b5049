"""Follows a step through the segments of forward and backward: where memory and time are booked."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import nn

from lightning_osdp.profiler.tracing.calls import Calls, floating_tensors


class Position:
    """The segment that a step is in.

    A segment of forward begins with the call of an operator, its backward with the gradient of what a call returned
    in it. The last segment is the loss: what follows the last operator's last call.

    Args:
        calls: what forward does, as recorded before; it must do the same again.
        on_leave: called whenever the step goes on to another segment, while the position is still the old one.
    """

    def __init__(self, calls: Calls, on_leave: Callable[[], None]) -> None:
        self._calls, self._on_leave = calls, on_leave
        self.num_segments = len(calls.sequence) + 1
        self.now = 0
        self.in_backward = False
        self._next = 0
        self._run_again: set[int] = set()  # in backward, by checkpointing
        self.is_running_again = False
        """Whether a block is, so that what is live is not of its backward."""
        self._own: dict[str, list[int]] = {}
        for index, name in enumerate(calls.sequence):
            self._own.setdefault(name, []).append(index)

    def start_backward(self) -> None:
        """Forward is over, and backward begins with the loss."""
        self.enter(self.num_segments - 1)
        self._on_leave()
        self.in_backward = True

    def end(self) -> None:
        """Backward is over."""
        self._on_leave()

    def enter(self, segment: int) -> None:
        """The step goes on to this segment."""
        if segment != self.now:
            self._on_leave()
            self.now = segment

    def call(self, name: str) -> None:
        """An operator is called: in forward the next segment begins, in backward a block is run again."""
        if self.in_backward:
            self.enter(self._again(name))
            self._run_again.add(self.now)
            self.is_running_again = True
        else:
            # A path that differs from the recorded one ends in the last operator's segment.
            self.enter(min(self._next, self.num_segments - 2))
            self._next += 1

    def _again(self, name: str) -> int:
        """Of the operator's calls the one that follows what was just run again, else the last not yet run again."""
        own = self._own[name]
        if self.is_running_again and self.now + 1 in own:
            return self.now + 1
        passed = [index for index in own if index <= self.now]
        return max([index for index in passed if index not in self._run_again] or passed or own[:1])

    def leave(self, name: str) -> None:
        """An operator returns: after the last call that recorded forward made, the loss begins."""
        if name == self._calls.last and not self.in_backward and self._next == self.num_segments - 1:
            self.enter(self.num_segments - 1)

    def gradient(self, segment: int) -> None:
        """The gradient of what this segment returned is there."""
        self.is_running_again = False
        self.enter(segment)


@contextmanager
def followed(modules: Mapping[str, nn.Module], position: Position, calls: Calls) -> Iterator[None]:
    """Keeps the position up to date while the model runs.

    Args:
        modules: the model's, by name.
        position: told where the step is.
        calls: what forward does.
    """
    with ExitStack() as cleanup:

        def before(name: str, *_: object) -> None:
            position.call(name)

        def after(name: str, _: nn.Module, __: Any, output: Any) -> None:
            segment = position.now
            position.leave(name)
            tensor = next((t for t in floating_tensors(output) if t.requires_grad), None)
            if tensor is not None:
                # Removed at the end, for a module may return its parameter.
                cleanup.callback(tensor.register_hook(lambda _: position.gradient(segment)).remove)

        for name in dict.fromkeys(calls.sequence):
            module = modules[name]
            cleanup.callback(module.register_forward_pre_hook(partial(before, name)).remove)
            cleanup.callback(module.register_forward_hook(partial(after, name)).remove)
        yield
