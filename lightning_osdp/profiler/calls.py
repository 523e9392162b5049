"""What one forward does: which module runs inside which, where each parameter is read, and the inputs' shapes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Stack = tuple[str, ...]
"""Names of the modules that are running, innermost first, always ending with the root ``""``."""


@dataclass(frozen=True)
class FirstCall:
    """How a module was called the first time."""

    signature: str
    """Equal for modules that cost the same: class, configuration, parameters, inputs."""
    grad_inputs: list[bool]
    """For each floating-point tensor among the inputs, whether it requires a gradient."""
    with_grad: bool
    """False under ``torch.no_grad``."""


@dataclass
class Calls:
    """One forward by module name; the order of ``first`` is that of the first calls."""

    first: dict[str, FirstCall] = field(default_factory=dict)
    stacks: dict[str, set[Stack]] = field(default_factory=dict)
    """What was running at a module's calls, itself included."""
    num_calls: Counter[str] = field(default_factory=Counter)
    reads: dict[nn.Parameter, set[Stack]] = field(default_factory=dict)
    """What was running when an operation took a parameter: also where its owner was never called."""
    ended: dict[str, None] = field(default_factory=dict)
    """Modules in the order in which their last calls ended."""


@contextmanager
def recorded_calls(module: nn.Module) -> Iterator[Calls]:
    """Records every module call and every read of a parameter while it is active."""
    calls, stack = Calls(), [""]

    def enter(name: str, child: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        stack.append(name)
        if name not in calls.first:
            grad_inputs = [tensor.requires_grad for tensor in floating_tensors((args, kwargs))]
            calls.first[name] = FirstCall(_signature(child, (args, kwargs)), grad_inputs, torch.is_grad_enabled())
        calls.stacks.setdefault(name, set()).add(tuple(reversed(stack)))
        calls.num_calls[name] += 1

    def leave() -> None:
        name = stack.pop()
        calls.ended.pop(name, None)
        calls.ended[name] = None

    def read(parameter: nn.Parameter) -> None:
        calls.reads.setdefault(parameter, set()).add(tuple(reversed(stack)))

    with ExitStack() as cleanup:
        for name, child in module.named_modules():
            if name:

                def before(m: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
                    enter(name, m, args, kwargs)

                cleanup.callback(child.register_forward_pre_hook(before, with_kwargs=True, prepend=True).remove)
                cleanup.callback(child.register_forward_hook(lambda *_: leave(), always_call=True).remove)
        # Autocast keeps casts of parameters: a second read would take the cast, unseen.
        cleanup.callback(torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled())
        torch.set_autocast_cache_enabled(False)
        cleanup.enter_context(_Reads(module, read))
        yield calls


class _Reads(TorchDispatchMode):
    """Reports every operation that takes a parameter's memory; asking for its shape or dtype is none."""

    def __init__(self, module: nn.Module, report: Callable[[nn.Parameter], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._report = report
        self._by_storage: dict[int, list[nn.Parameter]] = {}
        for parameter in module.parameters():
            self._by_storage.setdefault(_storage(parameter), []).append(parameter)

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs the operation."""
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, Tensor) and leaf.layout is torch.strided:
                for parameter in self._by_storage.get(_storage(leaf), ()):
                    self._report(parameter)
        return func(*args, **(kwargs or {}))


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def floating_tensors(tree: Any) -> list[Tensor]:
    """Floating-point tensors among the leaves."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _signature(module: nn.Module, inputs: Any) -> str:
    shapes = [
        f"{leaf.dtype}{list(leaf.shape)}{leaf.requires_grad}" if isinstance(leaf, Tensor) else repr(type(leaf))
        for leaf in tree_leaves(inputs)
    ]
    parameters = [f"{n}:{p.dtype}{list(p.shape)}{p.requires_grad}" for n, p in module.named_parameters()]
    grad_mode = "" if torch.is_grad_enabled() else " no_grad"
    return f"{type(module).__qualname__}({module.extra_repr()}) {parameters} <- {shapes}{grad_mode}"
