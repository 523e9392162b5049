"""A forward as a list of operations that can be compared: with itself one block on, and with another forward."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_osdp.profiler.step.tensors import tensors_in

Token = int | str | object
"""A storage: the number under which it was made, a name where it was there before, or what equals no other."""


@dataclass(frozen=True)
class Logged:
    """One operation."""

    what: tuple[Any, ...]
    """Function, numbers, and of tensors all but which ones they are."""
    tokens: tuple[Token, ...]
    """Which ones: of those that it takes and then of those that it returns."""


@dataclass(frozen=True)
class Mark:
    """A moment of the forward."""

    num_operations: int
    num_made: int
    """Storages made so far."""
    live_bytes: int
    """Of those that are alive."""


class OperationLog(TorchDispatchMode):
    """Notes every operation on which tensors it works.

    What autograd saves is dropped at once, if `saves_nothing` is entered too, so that a tensor that lives is one that
    the model itself keeps.

    Args:
        names: of storages that are there before, by their keys; see `named_storages`.
    """

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[Logged] = []
        self._tokens: dict[int, Token] = dict(names)
        self._num_made = 0
        self._live_bytes = 0

    def mark(self) -> Mark:
        """The present moment."""
        return Mark(len(self.operations), self._num_made, self._live_bytes)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs the operation and notes it."""
        if func.namespace == "prim":  # asks a fake tensor for its device
            return func(*args, **(kwargs or {}))
        tokens: list[Token] = []
        # before it runs, for it may change them
        taken = self._described((args, kwargs), tokens, made=False)
        result = func(*args, **(kwargs or {}))
        made = self._described(result, tokens, made=True)
        self.operations.append(Logged((func, torch.is_grad_enabled(), taken, made), tuple(tokens)))
        return result

    def _described(self, value: Any, tokens: list[Token], *, made: bool) -> Any:
        if isinstance(value, Tensor):
            tokens.append(self._token(value, made=made))
            return _description(value)
        if isinstance(value, (list, tuple)):
            return tuple([self._described(item, tokens, made=made) for item in value])
        if isinstance(value, dict):
            return tuple([(key, self._described(item, tokens, made=made)) for key, item in value.items()])
        return value

    def _token(self, tensor: Tensor, *, made: bool) -> Token:
        if tensor.layout is not torch.strided:
            return object()
        storage = tensor.untyped_storage()
        key = storage._cdata
        token = self._tokens.get(key)
        if token is None:
            if not made:
                return f"outside {key}"
            token = self._tokens[key] = self._num_made
            self._num_made += 1
            num_bytes = storage.nbytes()
            self._live_bytes += num_bytes
            weakref.finalize(storage, self._freed, key, num_bytes).atexit = False
        return token

    def _freed(self, key: int, num_bytes: int) -> None:
        del self._tokens[key]  # another storage may get it
        self._live_bytes -= num_bytes


class NeedsSavedError(Exception):
    """Forward runs a backward of its own, and so needs what autograd saves."""


def saves_nothing() -> torch.autograd.graph.saved_tensors_hooks:
    """Drops what autograd saves."""

    def needed(_: object) -> Tensor:
        raise NeedsSavedError

    return torch.autograd.graph.saved_tensors_hooks(lambda _: None, needed)


def named_storages(module: nn.Module, batch: Any) -> dict[int, str]:
    """Storages of the tensors of a module, its attributes included, and of a batch: key -> name.

    That of a module's begins with the module's own.
    """
    held = [(f"{name}.", vars(child)) for name, child in module.named_modules()]
    names: dict[int, str] = {}
    for prefix, holder in [*held, ("", batch)]:
        for index, tensor in enumerate(tensors_in(holder)):
            if tensor.layout is torch.strided:
                names.setdefault(tensor.untyped_storage()._cdata, f"{prefix}{index}")
    return names


def _description(tensor: Tensor) -> tuple[Any, ...]:
    node = tensor.grad_fn
    return (
        tensor.shape,
        tensor.stride() if tensor.layout is torch.strided else None,
        tensor.dtype,
        tensor.requires_grad,
        None if node is None else (node.name(), tensor.retains_grad, bool(tensor._backward_hooks)),
    )
