"""A forward as a list of operations that can be compared: with itself one block on, and with another forward."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_osdp.profiler.step.snapshot import storage_key, tensors_in
from lightning_osdp.profiler.tracing.calls import Calls, recorded_calls

Token = int | str | object
"""A storage: the number under which it was made, a name where it was there before, or what equals no other."""


class Logged(NamedTuple):
    """One operation."""

    what: tuple[Any, ...]
    """Function, numbers, and of tensors all but which ones they are."""
    tokens: tuple[Token, ...]
    """Which tensors: first those that it takes, then those that it returns."""


class Mark(NamedTuple):
    """A moment of the forward."""

    num_operations: int
    num_segments: int
    """That have begun."""
    num_made: int
    """Storages made so far."""
    live_bytes: int
    """Of those that are alive."""


class NeedsSavedError(Exception):
    """Forward runs a backward of its own, and so needs what autograd saves."""


@contextmanager
def logged_forward(module: nn.Module, batch: Any, blocks: Mapping[str, nn.Module]) -> Iterator[ForwardLog]:
    """Logs a forward on fake tensors; what autograd saves is dropped, so that only what the model keeps stays alive.

    Raises:
        NeedsSavedError: inside, where a tensor is asked for that was dropped.
    """

    def needed(_: object) -> Tensor:
        raise NeedsSavedError

    with ExitStack() as cleanup:
        log = ForwardLog(module, batch, cleanup.enter_context(recorded_calls(module)))
        for name, block in blocks.items():
            cleanup.callback(block.register_forward_pre_hook(partial(log.mark, name), prepend=True).remove)
        cleanup.enter_context(torch.autograd.graph.saved_tensors_hooks(lambda _: None, needed))
        cleanup.enter_context(log)
        yield log


def goes_on(full: ForwardLog, before: str, block: str, after: str) -> bool:
    """Whether from the beginning of a block to that of the one after it the same is done as from the one before it."""
    start, middle, end = (full.marks[name] for name in (before, block, after))
    operators, signatures = full.calls.sequence[start.num_segments : middle.num_segments], full.calls.signatures
    shift = middle.num_made - start.num_made

    def moved(name: str) -> str:
        return block + name.removeprefix(before) if name == before or name.startswith(f"{before}.") else name

    def is_same(token: Token, other: Token) -> bool:
        if isinstance(token, int):
            return other == token + shift or (other == token and token < start.num_made)
        return isinstance(token, str) and other in (token, moved(token))

    return (
        start.live_bytes == middle.live_bytes == end.live_bytes
        and bool(operators)
        and [moved(name) for name in operators] == full.calls.sequence[middle.num_segments : end.num_segments]
        and all(signatures[name] == signatures[moved(name)] for name in (before, *operators))
        and are_same(
            full.operations[start.num_operations : middle.num_operations],
            full.operations[middle.num_operations : end.num_operations],
            is_same,
        )
    )


def are_same(some: Sequence[Logged], others: Sequence[Logged], is_same: Callable[[Token, Token], bool]) -> bool:
    """Whether operations are the same on the same tensors, as ``is_same`` says of two."""
    return len(some) == len(others) and all(
        one.what == other.what and len(one.tokens) == len(other.tokens) and all(map(is_same, one.tokens, other.tokens))
        for one, other in zip(some, others, strict=True)
    )


class ForwardLog(TorchDispatchMode):
    """Every operation of a forward, and on which tensors it works."""

    def __init__(self, module: nn.Module, batch: Any, calls: Calls) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls = calls
        self.operations: list[Logged] = []
        self.marks: dict[str, Mark] = {}
        """Block -> where its first call begins."""
        self._num_made = 0
        self._live_bytes = 0
        # storages that are there before; names of a module's, its attributes included, begin with its own
        self._tokens: dict[int, Token] = {}
        held = [(f"{name}.", vars(child)) for name, child in module.named_modules()]
        for prefix, holder in [*held, ("", batch)]:
            for index, tensor in enumerate(tensors_in(holder)):
                if (key := storage_key(tensor)) is not None:
                    self._tokens.setdefault(key, f"{prefix}{index}")

    def mark(self, block: str, *_: object) -> None:
        """Hook before the forward of a block."""
        mark = Mark(len(self.operations), len(self.calls.sequence), self._num_made, self._live_bytes)
        self.marks.setdefault(block, mark)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
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
        key = storage_key(tensor)
        if key is None:
            return object()
        if key not in self._tokens:
            if not made:
                return f"outside {key}"
            storage = tensor.untyped_storage()
            self._tokens[key] = self._num_made
            self._num_made += 1
            self._live_bytes += storage.nbytes()
            weakref.finalize(storage, self._freed, key, storage.nbytes()).atexit = False
        return self._tokens[key]

    def _freed(self, key: int, num_bytes: int) -> None:
        del self._tokens[key]  # another storage may get it
        self._live_bytes -= num_bytes


def _description(tensor: Tensor) -> tuple[Any, ...]:
    node = tensor.grad_fn
    return (
        tensor.shape,
        tensor.stride() if tensor.layout is torch.strided else None,
        tensor.dtype,
        tensor.requires_grad,
        None if node is None else (node.name(), tensor.retains_grad, bool(tensor._backward_hooks)),
    )
