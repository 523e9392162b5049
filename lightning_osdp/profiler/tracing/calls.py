"""What one forward does: which module runs inside which and when, where each parameter is read, the inputs' shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_osdp.core.profile import Span

Stack = tuple[str, ...]
"""Names of the modules that are running, innermost first, always ending with the root ``""``."""


class Flow(NamedTuple):
    """Bytes that go into and come out of a module."""

    input_bytes: int
    """As saved for backward: in the dtype of what comes out, where it is floating-point."""
    input_gradient_bytes: int
    output_bytes: int


@dataclass
class Calls:
    """One forward by names; the order of ``signatures`` is that of the first calls."""

    signatures: dict[str, str] = field(default_factory=dict)
    """Module -> equal for modules that cost the same: class, configuration, parameters, inputs of the first call."""
    stacks: dict[str, set[Stack]] = field(default_factory=dict)
    """What was running at a module's calls, itself included."""
    reads: dict[str, set[Stack]] = field(default_factory=dict)
    """Parameter -> what was running when an operation took it: also where its owner was never called."""
    sequence: list[str] = field(default_factory=list)
    """Modules that own parameters, once for each of their calls, in order: each call begins a segment."""
    spans: dict[str, list[Span]] = field(default_factory=dict)
    """Module -> the segments of each of its calls."""
    flows: dict[str, Flow] = field(default_factory=dict)
    """Module that owns parameters -> what its first call takes and returns."""
    last: str = ""
    """The module that owns parameters whose call ended last."""
    outlasting: set[str] = field(default_factory=set)
    """Modules that computed something after that, before their own call ended: the loss, in models that return it."""

    def spans_of(self, name: str) -> tuple[Span, ...]:
        """Segments of each call of a module: where its last one computes in the loss, that is its last segment."""
        *others, (first, last) = self.spans[name]
        return *others, (first, len(self.sequence) if name in self.outlasting else last)


@contextmanager
def recorded_calls(module: nn.Module) -> Iterator[Calls]:
    """Records every module call and every read of a parameter while it is active."""
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

    def leave(inputs: Any, outputs: Any) -> None:
        name, first = stack.pop(), entered.pop()
        last = max(0, len(calls.sequence) - 1)
        # a call in which no operator runs lies within a segment
        calls.spans.setdefault(name, []).append((min(first, last), last))
        if name in owners:
            calls.last = name
            calls.outlasting.clear()
            reads.has_computed = False
            if name not in calls.flows:
                calls.flows[name] = _flow(inputs, outputs)
        elif reads.has_computed:
            calls.outlasting.add(name)

    def read(parameter: str) -> None:
        calls.reads.setdefault(parameter, set()).add(tuple(reversed(stack)))

    reads = _Reads(module, read)
    with ExitStack() as cleanup:
        for name, child in module.named_modules():
            if name:

                def before(m: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
                    enter(name, m, args, kwargs)

                cleanup.callback(child.register_forward_pre_hook(before, with_kwargs=True, prepend=True).remove)

                def after(_: nn.Module, args: Any, output: Any) -> None:
                    leave(args, output)

                cleanup.callback(child.register_forward_hook(after, always_call=True).remove)
        # Autocast keeps casts of parameters: a second read would take the cast, unseen.
        cleanup.callback(torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled())
        torch.set_autocast_cache_enabled(False)
        cleanup.enter_context(reads)
        yield calls


class _Reads(TorchDispatchMode):
    """Reports every operation that takes a parameter's memory; asking for its shape or dtype is none."""

    def __init__(self, module: nn.Module, report: Callable[[str], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._report = report
        self.has_computed = False
        """Whether an operation has made something new, and not a view, since this was set to False."""
        self._by_storage: dict[int, list[str]] = {}
        for name, parameter in module.named_parameters():
            self._by_storage.setdefault(_storage(parameter), []).append(name)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs the operation."""
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor) and leaf.layout is torch.strided:
                for parameter in self._by_storage.get(_storage(leaf), ()):
                    self._report(parameter)
        self.has_computed = self.has_computed or any(each.alias_info is None for each in func._schema.returns)
        return func(*args, **(kwargs or {}))


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


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
