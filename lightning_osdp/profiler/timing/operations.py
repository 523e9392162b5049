"""What a training step is made of: every operation of one run on fake tensors, with the shapes that it works on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from lightning_osdp.errors import UntraceableError

aten = torch.ops.aten

_ALLOCATES = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided}
_OVERWRITES = {aten.copy_, aten.zero_, aten.fill_, aten.bernoulli_, aten.uniform_, aten.normal_, aten.random_}
_GATHERS = {aten.embedding, aten.gather, aten.index, aten.index_select, aten.nll_loss_forward}
"""Of their first operand they read about as much as they return."""
_SAME_FLOPS = {
    aten._scaled_dot_product_flash_attention_for_cpu: aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: aten._scaled_dot_product_flash_attention_backward,
}


@dataclass(frozen=True)
class Operand:
    """A tensor that an operation takes or makes, without its values."""

    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    """In elements; None where contiguous."""
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> Operand:
        """A strided tensor's description."""
        if tensor.layout is not torch.strided:
            raise UntraceableError(
                f"Expected operations on strided tensors, whose cost their shapes tell, got one on a {tensor.layout}"
                " tensor. Profile it with real parameters."
            )
        strides = None if tensor.is_contiguous() else tuple(tensor.stride())
        return cls(tuple(tensor.shape), strides, tensor.dtype, tensor.device)

    @property
    def num_elements_spanned(self) -> int:
        """Elements of memory from its first to its last, gaps included."""
        if self.strides is None or 0 in self.shape:
            return prod(self.shape)
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))

    @property
    def num_bytes(self) -> int:
        """Bytes that it addresses: each once where it is expanded, no gaps."""
        return min(prod(self.shape), self.num_elements_spanned) * self.dtype.itemsize


@dataclass(frozen=True)
class Operation:
    """One call of an operator of torch; calls that cost the same are equal."""

    function: torch._ops.OpOverload
    arguments: tuple[Any, ...]
    """With an `Operand` for each tensor, and tuples for lists."""
    keywords: tuple[tuple[str, Any], ...]
    results: tuple[Operand, ...]
    """Tensors that it makes; what is written in place is among the arguments."""
    flops: int
    """Floating-point operations by the formulas of ``torch.utils.flop_counter``: matrix products, convolutions and
    attention (a causal one as if it were whole). Others have none and are taken to be bound by memory."""

    @property
    def operands(self) -> tuple[Operand, ...]:
        """Tensors that it takes."""
        return (*_operands_in(self.arguments), *_operands_in(tuple(value for _, value in self.keywords)))

    @property
    def moved_bytes(self) -> int:
        """Bytes read and written once each, as if nothing were cached and nothing read twice."""
        packet = self.function.overloadpacket
        read = [operand.num_bytes for operand in self.operands]
        if packet in _OVERWRITES:
            read[:1] = []
        elif packet in _GATHERS:
            read[:1] = [min(read[0], sum(result.num_bytes for result in self.results[:1]))]
        written = [result.num_bytes for result in self.results]
        for argument, value in zip(self.function._schema.arguments, self.arguments, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                written += [operand.num_bytes for operand in _operands_in(value)]
        return sum(read) + sum(written)


class OperationRecorder(TorchDispatchMode):
    """Notes the operations of a step by segment, as often as they run; views and mere allocations cost nothing.

    To be entered inside `faked`. Segments are the caller's: it sets ``segment`` to the number of what runs next, in
    forward and in backward.

    Example:
        >>> from torch._subclasses.fake_tensor import FakeTensorMode
        >>> with FakeTensorMode(), OperationRecorder() as recorder:
        ...     x = torch.ones(2, 3)
        ...     recorder.segment = 1
        ...     y = x @ x.T @ x
        >>> [(str(operation.function), operation.flops) for operation in recorder.operations[1]]
        [('aten.mm.default', 24), ('aten.mm.default', 24)]
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.segment = 0
        self.operations: dict[int, Counter[Operation]] = {}

    def __enter__(self) -> OperationRecorder:
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Runs the operation and notes it."""
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        made = _made(result, (args, kwargs))
        writes = func._schema.is_mutable and torch.Tag.inplace_view not in func.tags
        if (made or writes) and func.overloadpacket not in _ALLOCATES:
            operation = Operation(
                function=func,
                arguments=_described(args),
                keywords=tuple((name, _described(value)) for name, value in kwargs.items()),
                results=tuple(Operand.of(tensor) for tensor in made),
                flops=_flops(func.overloadpacket, args, kwargs, result),
            )
            self.operations.setdefault(self.segment, Counter())[operation] += 1
        return result


def _made(result: Any, inputs: Any) -> list[Tensor]:
    """Tensors among the results that are no view of an input."""
    taken = {_storage(leaf) for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)}
    return [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and _storage(leaf) not in taken]


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata) if tensor.layout is torch.strided else id(tensor)


def _described(value: Any) -> Any:
    if isinstance(value, Tensor):
        return Operand.of(value)
    if isinstance(value, (list, tuple)):
        return tuple(_described(item) for item in value)
    return None if isinstance(value, torch.Generator) else value


def _operands_in(value: Any) -> Iterator[Operand]:
    if isinstance(value, Operand):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from _operands_in(item)


def _flops(packet: Any, args: Any, kwargs: Any, result: Any) -> int:
    formula: Callable[..., int] | None = flop_registry.get(_SAME_FLOPS.get(packet, packet))
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=result))
