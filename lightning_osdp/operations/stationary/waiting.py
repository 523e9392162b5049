"""Outputs that backward may come to, and a loss from which it comes to the same ones on all ranks.

Operators that move activations exchange gradients in backward, too. Autograd runs the backward of what a loss depends
on, so that ranks whose losses depend on other operators would exchange other things at a time, or wait for ever. It
runs the node that was made last, of those whose gradients are there: so ranks that come to the same outputs come to
them in one order, the reverse of forward's.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

NUM_GATHERS = 15
"""Numbers of gathers, which are counted round and round: no more are waiting to be found again at a time."""


class WaitingOutputs:
    """Outputs of calls of units and of exchanges, numbered in forward order, which is the same on all ranks.

    Each output has a tap: a tensor without elements that depends on it, and keeps its graph alive. So backward can come
    to it on a rank whose loss ignores it, too, with a gradient of zero.
    """

    def __init__(self) -> None:
        self._number = self._num_gathers = 0
        self._outputs: dict[int, _Output] = {}
        self._agreed: Collection[int] = ()
        self._has_slopes = False  # exchanges in a backward whose own gradients may be asked for, which have no number

    def add(self, tensors: Iterable[Tensor]) -> int | None:
        """Adds tensors that one call returns; returns their number, None in backward and where there is no gradient."""
        if not torch.is_grad_enabled():
            return None
        if torch._C._current_graph_task_id() != -1:
            self._has_slopes = True
            return None
        self._number += 1
        taps = tuple(_tap(each) for each in tensors if type(each) is Tensor and each.grad_fn is not None)
        if taps:
            # A checkpoint has such hooks. What it has saved is there again once backward has come to its end.
            stack: Any = torch._C._autograd
            self._outputs[self._number] = _Output(taps, stack._top_saved_tensors_default_hooks(True) is not None)
        return self._number

    def next_gather(self) -> int:
        """Number of a gather that others may find again, the same on all ranks; one of `NUM_GATHERS`, from 1 on."""
        self._num_gathers = self._num_gathers % NUM_GATHERS + 1
        return self._num_gathers

    def release(self) -> None:
        """Lets go of the graphs of outputs that no backward has come to."""
        self._outputs.clear()
        self._has_slopes = False

    def forget(self) -> None:
        """Begins anew, on all ranks."""
        self.release()
        self._number = self._num_gathers = 0

    def reach(self, loss: Tensor) -> Reach:
        """Outputs to which backward of a loss comes."""
        return Reach(loss, self._outputs, has_slopes=self._has_slopes)

    @contextmanager
    def agreed(self, numbers: Collection[int]) -> Iterator[None]:
        """Context of a backward that comes to the outputs of these numbers on all ranks."""
        self._agreed = numbers
        self.release()
        try:
            yield
        finally:
            self._agreed = ()

    @property
    def is_any_agreed(self) -> bool:
        """True within a backward that comes to the same outputs on all ranks."""
        return bool(self._agreed)

    def is_agreed(self, number: int | None) -> bool:
        """Tells if this backward comes to the output of a number on all ranks."""
        return number in self._agreed


class Reach:
    """Outputs to which backward comes from a loss on this rank.

    Attributes:
        numbers: of these outputs.
        is_cut_off: True if backward cannot come to an output that it was to come to.
        has_slopes: True if backward may come to exchanges of an earlier backward, on any rank, which have no numbers.
    """

    def __init__(self, loss: Tensor, outputs: Mapping[int, _Output], *, has_slopes: bool = False) -> None:
        self._loss, self._outputs, self.has_slopes = loss, dict(outputs), has_slopes
        self._numbers_at: dict[Any, list[int]] = defaultdict(list)  # units may return what a unit inside returns
        for number, output in outputs.items():
            for tap in output.taps:
                self._numbers_at[_node_before(tap)].append(number)
        self._seen: set[Any] = set()
        self._taps: list[Tensor] = []
        self.numbers: set[int] = set()
        self.is_cut_off = False
        self._walk(loss.grad_fn)

    @property
    def digest(self) -> int:
        """Number below 2^31 of the outputs, the same on all ranks."""
        return zlib.crc32(repr((sorted(self.numbers), self.has_slopes)).encode()) % (2**31 - 1)

    @property
    def loss(self) -> Tensor:
        """Loss of the same value from which backward comes to all of them."""
        return _Joined.apply(self._loss, *self._taps) if self._taps else self._loss  # type: ignore[no-untyped-call]

    def come_to(self, numbers: Iterable[int]) -> None:
        """Has backward come to outputs of these numbers, too, with gradients of zero."""
        for number in sorted({*numbers} - self.numbers, reverse=True):
            if number in self.numbers:
                continue  # on the way to a later one
            output = self._outputs.get(number)
            if output is None or output.is_packed:
                self.is_cut_off = True
                continue
            self._taps += output.taps
            for tap in output.taps:
                self._walk(tap.grad_fn)

    def _walk(self, start: Any) -> None:
        left = [start]
        while left and len(self.numbers) < len(self._outputs):
            node = left.pop()
            if node is None or node in self._seen:
                continue
            self._seen.add(node)
            self.numbers.update(self._numbers_at.get(node, ()))
            left += [before for before, _ in node.next_functions]


class _Output(NamedTuple):
    taps: tuple[Tensor, ...]
    is_packed: bool
    """True if the call has packed what it has saved, as a checkpoint does: backward must come from further outside."""


class _Tap(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        ctx.shape = tensor.shape
        return tensor.new_empty(0)

    @staticmethod
    @override
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.new_zeros(ctx.shape)


class _Joined(torch.autograd.Function):
    @staticmethod
    @override
    def forward(ctx: Any, loss: Tensor, *taps: Tensor) -> Tensor:
        ctx.zeros = [tap.detach() for tap in taps]
        return loss.clone()

    @staticmethod
    @override
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        return gradient, *ctx.zeros


def _tap(tensor: Tensor) -> Tensor:
    return _Tap.apply(tensor)  # type: ignore[no-untyped-call,no-any-return]


def _node_before(tap: Tensor) -> Any:
    assert tap.grad_fn is not None
    return tap.grad_fn.next_functions[0][0]
