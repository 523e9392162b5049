"""Seconds of a step that is not run, from its operations one by one, on this device or by the rates of another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import cycle
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.flop_counter import flop_registry

from lightning_osdp.core.cluster import DeviceRates
from lightning_osdp.errors import ConfigurationError, UntraceableError
from lightning_osdp.profiler.machine.memory import is_out_of_memory, raise_if_fatal
from lightning_osdp.profiler.machine.stopwatch import fastest_s
from lightning_osdp.profiler.step.run_step import StepRunner, loss_in
from lightning_osdp.profiler.step.snapshot import storage_key
from lightning_osdp.profiler.timing.step_time import Seconds
from lightning_osdp.profiler.tracing.calls import Position, followed
from lightning_osdp.profiler.tracing.short_model import ShortModel

aten = torch.ops.aten

_ALLOCATES = {aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided}
_OVERWRITES = {aten.copy_, aten.zero_, aten.fill_, aten.bernoulli_, aten.uniform_, aten.normal_, aten.random_}
_GATHERS = {aten.embedding, aten.gather, aten.index, aten.index_select, aten.nll_loss_forward}
"""Operations that read about as much of their first operand as they return."""
_SAME_FLOPS = {
    aten._scaled_dot_product_flash_attention_for_cpu: aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: aten._scaled_dot_product_flash_attention_backward,
}
_ATTENTION = {
    *(aten._scaled_dot_product_flash_attention, aten._scaled_dot_product_flash_attention_for_cpu),
    *(aten._scaled_dot_product_efficient_attention, aten._scaled_dot_product_cudnn_attention),
}
_ATTENTION_BACKWARD = {
    *(aten._scaled_dot_product_flash_attention_backward, aten._scaled_dot_product_flash_attention_for_cpu_backward),
    *(aten._scaled_dot_product_efficient_attention_backward, aten._scaled_dot_product_cudnn_attention_backward),
}
_TILE = 128
"""Queries of a tile, with which kernels of attention compute all keys of which one of these queries needs one."""
_FORWARD_FILL, _BACKWARD_FILL = 100, 300
"""Keys that take as long as what a query takes however many keys there are: filling and emptying pipelines, and in
backward what runs before and behind the products. [``docs/research/gpus/published.md``]"""

_INDEXED: Mapping[Any, tuple[str, Callable[[Mapping[str, Any]], int]]] = {
    aten.embedding: ("indices", lambda given: given["weight"].shape[0]),
    aten.embedding_dense_backward: ("indices", lambda given: given["num_weights"]),
    aten.nll_loss_forward: ("target", lambda given: given["self"].shape[-1]),
    aten.nll_loss_backward: ("target", lambda given: given["self"].shape[-1]),
}
"""Operation -> its argument of indices of rows, or classes, and the number of these rows."""
_INDEXED_ALONG_DIM = {
    *(aten.gather, aten.index_select, aten.index_add, aten.index_add_, aten.index_copy, aten.index_copy_),
    *(aten.scatter, aten.scatter_, aten.scatter_add, aten.scatter_add_),
}
"""Operations with indices in ``index``, along ``dim`` of ``self``."""
_INDEXED_BY_PLACE = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_}
"""Operations with indices in each of ``indices``, along the dimension of ``self`` at the same place."""
_INDEX_DTYPES = (torch.int32, torch.int64)

_REPEATS = 3
_REPEAT_BUDGET_S = 0.5
"""Runs that together take longer than this are not repeated further."""
_CALLS_IN_FLIGHT = 10
"""Calls between two synchronizations of a device that queues them: in a step launches hide behind kernels."""
_MOST_ROTATED_BYTES = 512 * 2**20
"""Most bytes of operands that calls take in turns: several times the largest cache of a GPU."""


@dataclass(frozen=True)
class Operand:
    """Tensor that an operation takes or makes, without values."""

    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    """Strides in elements; None where contiguous."""
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def describe(cls, tensor: Tensor) -> Operand:
        """Description of a strided tensor.

        Raises:
            UntraceableError: the tensor is not strided.
        """
        if tensor.layout is not torch.strided:
            raise UntraceableError(
                f"Expected operations on strided tensors, whose cost their shapes tell, got one on a {tensor.layout}"
                " tensor. Profile it with real parameters."
            )
        strides = None if tensor.is_contiguous() else tuple(tensor.stride())
        return cls(tuple(tensor.shape), strides, tensor.dtype, tensor.device)

    @property
    def num_elements_spanned(self) -> int:
        """Elements of memory from the first element to the last, gaps included."""
        if self.strides is None or 0 in self.shape:
            return prod(self.shape)
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True))

    @property
    def num_bytes(self) -> int:
        """Bytes that the tensor addresses, without gaps, and each once where it is expanded."""
        return min(prod(self.shape), self.num_elements_spanned) * self.dtype.itemsize


@dataclass(frozen=True)
class Operation:
    """One call of an operator of torch; calls of equal cost are equal."""

    function: torch._ops.OpOverload
    arguments: tuple[Any, ...]
    """Positional arguments, with an `Operand` for each tensor, and tuples for lists."""
    keywords: tuple[tuple[str, Any], ...]
    results: tuple[Operand, ...]
    """Tensors that the call makes; tensors that it writes to in place are among the arguments."""
    flops: int
    """Floating-point operations by the formulas of ``torch.utils.flop_counter``: matrix products, convolutions and
    attention (causal attention as if it were whole). Other operations have 0 and are taken to be bound by memory."""

    @property
    def given(self) -> dict[str, Any]:
        """Arguments by name, without those that are left to their defaults."""
        names = [argument.name for argument in self.function._schema.arguments]
        return dict(zip(names, self.arguments, strict=False)) | dict(self.keywords)

    @property
    def operands(self) -> tuple[Operand, ...]:
        """Tensors that the call takes."""
        return _operands_in((self.arguments, self.keywords))

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
            # fused optimizers may write to gradients, and do where they unscale them
            if argument.alias_info is not None and argument.alias_info.is_write and argument.name != "grads":
                written += [operand.num_bytes for operand in _operands_in(value)]
        return sum(read) + sum(written)


class OperationRecorder(TorchDispatchMode):
    """Counts the operations of a step by segment, inside `faked`; views and mere allocations cost nothing.

    Example:
        >>> from torch._subclasses.fake_tensor import FakeTensorMode
        >>> with FakeTensorMode(), OperationRecorder() as recorder:
        ...     x = torch.ones(2, 3)
        ...     y = x @ x.T @ x
        >>> [(str(operation.function), operation.flops) for operation in recorder.operations[0]]
        [('aten.ones.default', 0), ('aten.mm.default', 24), ('aten.mm.default', 24)]
    """

    def __init__(self, segment: Callable[[], int] = lambda: 0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._segment = segment
        self.operations: dict[int, Counter[Operation]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs, packet = kwargs or {}, func.overloadpacket
        result = func(*args, **kwargs)
        made = _new_tensors(result, (args, kwargs))
        writes = func._schema.is_mutable and torch.Tag.inplace_view not in func.tags
        if (made or writes) and packet not in _ALLOCATES:
            formula: Callable[..., int] | None = flop_registry.get(_SAME_FLOPS.get(packet, packet))
            operation = Operation(
                function=func,
                arguments=_described(args),
                keywords=tuple((name, _described(value)) for name, value in kwargs.items()),
                results=tuple(Operand.describe(tensor) for tensor in made),
                flops=0 if formula is None else int(formula(*args, **kwargs, out_val=result)),
            )
            self.note(self._segment(), operation, args, kwargs)
        return result

    def note(self, segment: int, operation: Operation, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Counts one call, which took these arguments."""
        self.operations.setdefault(segment, Counter())[operation] += 1


def _new_tensors(result: Any, inputs: Any) -> list[Tensor]:
    """Tensors among the results that are not views of inputs."""
    given, made = ([leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)] for tree in (inputs, result))
    taken = {storage_key(tensor) or id(tensor) for tensor in given}
    return [tensor for tensor in made if (storage_key(tensor) or id(tensor)) not in taken]


def _described(value: Any) -> Any:
    if isinstance(value, Tensor):
        return Operand.describe(value)
    if isinstance(value, (list, tuple)):
        return tuple(_described(item) for item in value)
    return None if isinstance(value, torch.Generator) else value


def _operands_in(value: Any) -> tuple[Operand, ...]:
    return tuple(leaf for leaf in tree_leaves(value) if isinstance(leaf, Operand))


def estimate_step(step: StepRunner, short: ShortModel, size: int, seconds_of: Callable[[Operation], float]) -> Seconds:
    """Seconds of segments of a micro-batch of ``size`` samples, as sums over their operations.

    The model may be on the meta device: only the operands of one operation are alive at a time.
    """
    position = Position(short.calls, lambda: None)
    num = position.num_segments
    recorder = OperationRecorder(lambda: position.now + position.in_backward * num)
    with short.applied(), step.on_fake_tensors(size) as (run, _), recorder, followed(step.module, position):
        loss = loss_in(run())
        position.start_backward()
        loss.backward()
        del loss
    seconds = segment_seconds(recorder.operations, seconds_of)
    return Seconds(
        forward_s=tuple(short.unfolded([seconds.get(index, 0.0) for index in range(num)])),
        backward_s=tuple(short.unfolded([seconds.get(num + index, 0.0) for index in range(num)])),
    )


def segment_seconds(
    operations: Mapping[int, Counter[Operation]], seconds_of: Callable[[Operation], float]
) -> dict[int, float]:
    """Seconds of all operations of each segment; ``seconds_of`` is called once for each distinct operation."""
    seconds_of = cache(seconds_of)
    return {
        segment: sum(count * seconds_of(operation) for operation, count in counter.items())
        for segment, counter in operations.items()
    }


def replayed_s(operation: Operation, device: torch.device) -> float:
    """Seconds of one call: the fastest of a few on tensors made for it, after one to warm up.

    Floating-point operands are random in [0, 1). Indices are spread evenly over the rows that they may name, in no
    order. All other operands are zero. Only the operands and results of this operation are alive meanwhile, with the
    gaps of slices; random number generators are as before.

    On CUDA calls follow each other, each on operands of its own as far as `_MOST_ROTATED_BYTES` go: the call before
    leaves other operands in the cache. On CPU operands may be in a cache that holds other tensors in a step.

    Raises:
        UntraceableError: the operation cannot run on such values, such as a factorisation of a singular matrix.
    """
    devices = [device] if device.type == "cuda" else []
    num_calls = 1 if device.type == "cpu" else _CALLS_IN_FLIGHT
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=devices):
            sets = cycle([_operands_of(operation) for _ in range(num_rotated(operation, num_calls))])

            def call() -> None:
                arguments, keywords = next(sets)
                operation.function(*arguments, **keywords)

            return fastest_s(call, device, repeats=_REPEATS, num_calls=num_calls, budget_s=_REPEAT_BUDGET_S)
    except Exception as error:  # an operation may do anything with values that it does not expect
        raise_if_fatal(error)
        if is_out_of_memory(error):
            raise
        raise UntraceableError(
            f"Expected {operation.function} to run on random numbers and zeros of the shapes that the step gives it,"
            f" but it failed: {error!r}. Profile it with real parameters."
        ) from error


def num_rotated(operation: Operation, num_calls: int) -> int:
    """Number of sets of operands that ``num_calls`` calls take in turns: as many as there is room for, at least one.

    Example:
        >>> half = Operand((_MOST_ROTATED_BYTES // 8,), None, torch.float32, torch.device("cpu"))
        >>> operation = Operation(torch.ops.aten.exp.default, (half,), (), (half,), 0)
        >>> num_rotated(operation, 10), num_rotated(operation, 1)
        (2, 1)
    """
    num_bytes = sum(operand.num_elements_spanned * operand.dtype.itemsize for operand in operation.operands)
    return max(1, min(num_calls, _MOST_ROTATED_BYTES // max(1, num_bytes)))


def roofline_s(operation: Operation, rates: DeviceRates) -> float:
    """Seconds of one call by the rates of a device: the longer of computing and moving bytes.

    The dtype of the first floating-point operand is the one that the operation computes in.

    Raises:
        ConfigurationError: there is no rate for the dtype that the operation computes in.

    References:
        Williams, Waterman, Patterson: Roofline, Communications of the ACM 52(4), 2009.
    """
    moving_s = operation.moved_bytes / rates.bytes_per_s
    if operation.flops == 0:
        return moving_s
    dtype = next(operand.dtype for operand in operation.operands if operand.dtype.is_floating_point)
    flops_per_s = {getattr(torch, name): rate for name, rate in rates.flops_per_s.items()}
    if dtype not in flops_per_s:
        raise ConfigurationError(
            f"Expected the rate of {dtype}, in which {operation.function} computes, got rates of {[*flops_per_s]}."
            " Add it to flops_per_s."
        )
    return max(operation.flops * _over_products(operation, rates) / flops_per_s[dtype], moving_s)


def _over_products(operation: Operation, rates: DeviceRates) -> float:
    """Seconds of an operation over those of matrix products with as many floating-point operations.

    Kernels of attention on CUDA leave out tiles of which a causal mask leaves nothing.
    """
    packet = operation.function.overloadpacket
    is_backward = packet in _ATTENTION_BACKWARD
    if not rates.is_cuda or not (is_backward or packet in _ATTENTION):
        return 1.0
    given = operation.given
    queries, keys = (int(given[name].shape[-2]) for name in ("query", "key"))
    computed = min(keys, (queries + _TILE) / 2) if given.get("is_causal", False) else keys
    reached, fill = (
        (rates.attention_backward, _BACKWARD_FILL) if is_backward else (rates.attention_forward, _FORWARD_FILL)
    )
    return (computed + fill) / keys / reached


def _operands_of(operation: Operation) -> Any:
    """Arguments and keywords with tensors for operands."""
    rows, described = _rows_by_operand(operation), (operation.arguments, dict(operation.keywords))
    return tree_map_only(Operand, lambda each: _tensor(each, num_rows=rows.get(id(each), 0)), described)


def _rows_by_operand(operation: Operation) -> Mapping[int, int]:
    """Operands of indices, by ``id`` -> number of the rows that they may name."""
    given, packet = operation.given, operation.function.overloadpacket
    if packet in _INDEXED:
        argument, rows = _INDEXED[packet]
        return {id(given[argument]): int(rows(given))}
    if packet in _INDEXED_ALONG_DIM:
        shape, dim = given["self"].shape, given["dim"]
        return {id(given["index"]): shape[dim] if shape else 1}
    indices = given["indices"] if packet in _INDEXED_BY_PLACE else ()
    if not all(index is None or index.dtype in _INDEX_DTYPES for index in indices):
        return {}  # a mask stands for as many dimensions as it has
    return {id(index): size for index, size in zip(indices, given["self"].shape, strict=False)} if indices else {}


def _tensor(operand: Operand, *, num_rows: int) -> Tensor:
    """Tensor of made-up values; indices are below ``num_rows``, if that is not zero."""
    size, dtype, device = operand.num_elements_spanned, operand.dtype, operand.device
    if num_rows and dtype in _INDEX_DTYPES:
        memory = torch.randint(num_rows, (size,), dtype=dtype, device=device)
    elif (dtype.is_floating_point or dtype.is_complex) and dtype.itemsize > 1:
        memory = torch.rand(size, dtype=dtype, device=device)
    else:  # torch has no random numbers of one byte
        memory = torch.zeros(size, dtype=dtype, device=device)
    return memory.view(operand.shape) if operand.strides is None else memory.as_strided(operand.shape, operand.strides)
