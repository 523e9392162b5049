"""Records of one forward, and the segments of a later step that repeats it.

A record has the order and nesting of module calls, the places at which each parameter is read, and shapes of inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._C import DisableTorchFunction
from torch._ops import HigherOrderOperator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_osdp.core.profile import Span
from lightning_osdp.errors import ProfileError
from lightning_osdp.operations.stationary.exchanges import is_in_torch_func
from lightning_osdp.profiler.step.snapshot import storage_key

Stack = tuple[str, ...]
"""Names of the modules that are running, innermost first, always ending with the root ``""``."""


class Flow(NamedTuple):
    """Bytes that go into and come out of a module."""

    input_bytes: int
    """Bytes as saved for backward: floating-point inputs in the dtype of the output."""
    input_gradient_bytes: int
    output_bytes: int


@dataclass
class Calls:
    """Record of one forward by names of modules; the order of ``signatures`` is that of the first calls."""

    signatures: dict[str, str] = field(default_factory=dict)
    """Module -> class, configuration, parameters and inputs of the first call; equal for modules of equal cost."""
    stacks: dict[str, set[Stack]] = field(default_factory=dict)
    """Module -> modules that were running at its calls, itself included."""
    reads: dict[str, set[Stack]] = field(default_factory=dict)
    """Parameter -> modules that were running when an operation took it, even if its owner was never called."""
    sequence: list[str] = field(default_factory=list)
    """Modules that own parameters, once for each of their calls, in order: each call begins a segment."""
    spans: dict[str, list[Span]] = field(default_factory=dict)
    """Module -> the segments of each of its calls."""
    apart: set[str] = field(default_factory=set)
    """Modules that ran without gradients, or were called by what ``torch.func`` transforms."""
    flows: dict[str, Flow] = field(default_factory=dict)
    """Module that owns parameters -> bytes that its first call takes and returns."""
    last: str = ""
    """Module that owns parameters and whose call ended last."""
    outlasting: set[str] = field(default_factory=set)
    """Modules that computed after that call and before their own ended: they compute in the loss segment."""

    def spans_of(self, name: str) -> tuple[Span, ...]:
        """Segments of each call of a module; the loss is the last segment of a module that computes in it."""
        *others, (first, last) = self.spans[name]
        return *others, (first, len(self.sequence) if name in self.outlasting else last)


@contextmanager
def recorded_calls(module: nn.Module) -> Iterator[Calls]:
    """Records every module call and every read of a parameter while it is active; nothing compiled runs.

    Raises:
        ProfileError: raised inside, by an operation that calls functions which it takes, such as flex_attention.
    """
    calls, stack = Calls(), [""]
    entered: list[int] = []
    owners = {name for name, child in module.named_modules() if any(p is not None for p in child._parameters.values())}

    def enter(name: str, child: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        stack.append(name)
        entered.append(len(calls.sequence))
        if name in owners:
            calls.sequence.append(name)
        if name not in calls.signatures:
            calls.signatures[name] = _signature(child, (args, kwargs))
        calls.stacks.setdefault(name, set()).add(tuple(reversed(stack)))
        if not torch.is_grad_enabled() or is_in_torch_func():
            calls.apart.add(name)

    def leave(_: nn.Module, args: Any, kwargs: Any, outputs: Any) -> None:
        name, first = stack.pop(), entered.pop()
        last = max(0, len(calls.sequence) - 1)
        # a call in which no operator runs lies within a segment
        calls.spans.setdefault(name, []).append((min(first, last), last))
        if name in owners:
            calls.last = name
            calls.outlasting.clear()
            reads.has_computed = False
            if name not in calls.flows:
                calls.flows[name] = _flow((args, kwargs), outputs)
        elif reads.has_computed:
            calls.outlasting.add(name)

    reads = _Reads(module, calls, stack)
    with ExitStack() as cleanup:
        for name, child in module.named_modules():
            if name:
                before = child.register_forward_pre_hook(partial(enter, name), with_kwargs=True, prepend=True)
                cleanup.callback(before.remove)
                cleanup.callback(child.register_forward_hook(leave, with_kwargs=True, always_call=True).remove)
        # Autocast keeps casts of parameters: a second read would take the cast, unseen.
        cleanup.callback(torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled())
        torch.set_autocast_cache_enabled(False)
        # torch compiles nothing under a mode, and raises for what is to be compiled whole
        cleanup.enter_context(torch.compiler.set_stance("force_eager"))
        cleanup.enter_context(reads)
        yield calls


class _Reads(TorchDispatchMode):
    """Records which operations read the memory of which parameters; asking for a shape or dtype is no operation."""

    supports_higher_order_operators = True

    def __init__(self, module: nn.Module, calls: Calls, stack: list[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._calls, self._stack = calls, stack
        self.has_computed = False
        """True after an operation has made a new tensor, and not a view; reset when an operator's call ends."""
        self._by_storage: dict[int | None, list[str]] = {}
        for name, parameter in module.named_parameters():
            self._by_storage.setdefault(storage_key(parameter), []).append(name)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        if isinstance(func, HigherOrderOperator):
            raise ProfileError(
                f"Expected a training step of operations whose cost their shapes tell, got {func.name()}, which calls"
                " functions of the model's. Plan with scaled_dot_product_attention or the like in its place and pass"
                " that plan=, or train with Lightning's FSDPStrategy."
            )
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor):
                for parameter in self._by_storage.get(storage_key(leaf), ()):
                    self._calls.reads.setdefault(parameter, set()).add(tuple(reversed(self._stack)))
        self.has_computed = self.has_computed or any(each.alias_info is None for each in func._schema.returns)
        return func(*args, **(kwargs or {}))


def floating_tensors(tree: Any) -> list[Tensor]:
    """Floating-point tensors among the leaves."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _flow(inputs: Any, outputs: Any) -> Flow:
    given = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
    returned = floating_tensors(outputs)
    itemsize = returned[0].element_size() if returned else 0
    return Flow(
        sum(t.numel() * (itemsize if t.is_floating_point() else t.element_size()) for t in given),
        sum(t.numel() * t.element_size() for t in given if t.requires_grad),
        sum(t.numel() * t.element_size() for t in returned),
    )


def _signature(module: nn.Module, inputs: Any) -> str:
    shapes = [
        f"{leaf.dtype}{list(leaf.shape)}{leaf.requires_grad}" if isinstance(leaf, Tensor) else repr(type(leaf))
        for leaf in tree_leaves(inputs)
    ]
    parameters = [f"{n}:{p.dtype}{list(p.shape)}{p.requires_grad}" for n, p in module.named_parameters()]
    grad_mode = "" if torch.is_grad_enabled() else " no_grad"
    return f"{type(module).__qualname__}({module.extra_repr()}) {parameters} <- {shapes}{grad_mode}"


class Position:
    """Segment that a step is in.

    A segment of forward begins with the call of an operator. Its backward begins with the gradient of a tensor that a
    call returned in the segment. The last segment is the loss, from the last operator's last call on.

    Args:
        calls: record of a forward, which the step must repeat.
        on_leave: called whenever the step goes on to another segment, while the position is still the old one.
    """

    def __init__(self, calls: Calls, on_leave: Callable[[], None]) -> None:
        self.calls, self._on_leave = calls, on_leave
        self.num_segments = len(calls.sequence) + 1
        self.now = 0
        self.in_backward = False
        self._next = 0
        self._run_again: set[int] = set()  # segments that checkpointing has run again in backward
        self.came_from: list[int] = []
        """Segments that backward had come to, one for each rerun in backward."""
        self.is_running_again = False
        """True while checkpointing runs forward again, whose live tensors are not of the segment's backward."""
        self._segments_of: dict[str, list[int]] = {}
        for index, name in enumerate(calls.sequence):
            self._segments_of.setdefault(name, []).append(index)

    def start_backward(self) -> None:
        """Ends forward; backward begins with the loss."""
        self.enter(self.num_segments - 1)
        self._on_leave()
        self.in_backward = True

    def end(self) -> None:
        """Ends backward."""
        self._on_leave()

    def enter(self, segment: int) -> None:
        """Goes on to a segment."""
        if segment != self.now:
            self._on_leave()
            self.now = segment

    def call(self, name: str, *_: object) -> None:
        """Hook before an operator: in forward the next segment begins, in backward a segment runs again."""
        if self.in_backward:
            if not self.is_running_again:
                self.came_from.append(self.now)
            self.enter(self._rerun_segment(name))
            self._run_again.add(self.now)
            self.is_running_again = True
        else:
            # A path that differs from the recorded one ends in the last operator's segment.
            self.enter(min(self._next, self.num_segments - 2))
            self._next += 1

    def _rerun_segment(self, name: str) -> int:
        """Segment of the operator's call that runs again: the next one in a rerun, else the last not yet run again."""
        segments = self._segments_of[name]
        if self.is_running_again and self.now + 1 in segments:
            return self.now + 1
        passed = [index for index in segments if index <= self.now]
        return max([index for index in passed if index not in self._run_again] or passed or segments[:1])

    def leave(self, name: str) -> None:
        """Hook behind an operator: after the last call of the recorded forward, the loss begins."""
        if name == self.calls.last and not self.in_backward and self._next == self.num_segments - 1:
            self.enter(self.num_segments - 1)

    def gradient(self, segment: int) -> None:
        """Hook on the gradient of a tensor that the segment returned: backward comes to the segment."""
        self.is_running_again = False
        self.enter(segment)


@contextmanager
def followed(module: nn.Module, position: Position) -> Iterator[None]:
    """Keeps the position up to date while the model runs."""
    modules = dict(module.named_modules())
    with ExitStack() as cleanup:

        def after(name: str, _: nn.Module, __: Any, output: Any) -> None:
            segment = position.now
            position.leave(name)
            tensor = next((t for t in floating_tensors(output) if t.requires_grad), None)
            if tensor is not None:
                # Removed at the end, for a module may return its parameter.
                with DisableTorchFunction():  # no hook of the model's own
                    cleanup.callback(tensor.register_hook(lambda _: position.gradient(segment)).remove)

        for name in dict.fromkeys(position.calls.sequence):
            cleanup.callback(modules[name].register_forward_pre_hook(partial(position.call, name)).remove)
            cleanup.callback(modules[name].register_forward_hook(partial(after, name)).remove)
        yield
