"""Results that a block keeps for backward where it runs its forward again: those of heavy operations.

Most seconds of a forward go into few operations. A block that recomputes may keep what some of these return, and hand
it back when its forward runs again. A level of recomputation is the positions of the operations whose results are kept,
from 0, among the heavy operations of one forward of the block in the order in which they are dispatched.

torch's own selective checkpointing is not sound for any module: it counts every operation, so that it fails where
autocast has cached a cast, and at a second backward; it is silently wrong where random results are kept; and it takes
several times as long for each operation. Here only heavy operations are counted, and only in calls that have kept
results.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from typing_extensions import Self, override

_NAMES = (
    *("mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_grouped_mm", "convolution"),
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
    "_flash_attention_forward",
    "_efficient_attention_forward",
)


def _place_of_dropout(operation: torch._ops.OpOverload) -> int | None:
    """Index of the argument that makes the results random; None if there is none."""
    names = [argument.name for argument in operation._schema.arguments]
    return names.index("dropout_p") if "dropout_p" in names else None


_HEAVY: Mapping[Any, int | None] = {
    operation: _place_of_dropout(operation)
    for name in _NAMES
    if (packet := getattr(torch.ops.aten, name, None)) is not None
    for operation in (getattr(packet, overload) for overload in packet.overloads())
    if not operation._schema.is_mutable  # an overload that writes to `out` returns no tensor of its own
}
"""Overloads of aten -> place of ``dropout_p`` among their arguments; results of all have storages of their own."""

# A getter is made anew each time, and equal to the others.
_HIDING: frozenset[Any] = frozenset(
    {Tensor.data.__get__, Tensor.numpy, Tensor.__array__, Tensor.__dlpack__}  # type: ignore[attr-defined]
)
"""Functions that return another view of a tensor's memory, to which writes do not count as new versions of it."""


def is_heavy(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Tells if the results of an operation that is dispatched may be kept.

    Heavy are matrix products, convolutions and attention without dropout: deterministic operations, without side
    effects, whose results are no views. Tensors of subclasses with operations of their own (such as DTensors) are left
    alone, and so are sparse ones and those of inference mode, whose versions nobody counts.

    Args:
        func: overload of aten, as a dispatch mode gets it.
        args: its positional arguments.
        kwargs: its others.
    """
    if func not in _HEAVY or torch.is_inference_mode_enabled():
        return False
    place = _HEAVY[func]
    if place is not None and kwargs.get("dropout_p", args[place] if place < len(args) else 0.0) != 0:
        return False
    tensors = (arg for arg in args if isinstance(arg, Tensor))
    return all(each.layout is torch.strided and not is_traceable_wrapper_subclass(each) for each in tensors)


class _Place(NamedTuple):
    """Place of a heavy operation in a forward; it does not depend on which calls are watched."""

    function: Any
    """Function of torch that the block calls."""
    call: int
    """Number of calls of this function before."""
    operation: int
    """Number of heavy operations of this call before."""


_Called = tuple[_Place, int]
"""Place, with a number for what the calls of its function until then were given."""

_Chosen = Mapping[Any, Mapping[int, frozenset[int]]]
"""Function -> number of its call -> numbers of the operations of it whose results are kept."""


class KeptResults:
    """Choice of the results that a block keeps, and what was learned of the block.

    The first forward watches all calls, and learns which of them dispatch the operations at these positions; later ones
    watch those alone.

    Args:
        positions: the level, see above.
        on_difference: called where a result that was kept is not what running the operation again returns, as where
            the block writes to it past torch's version counters. Each is compared the first time that it would be
            handed back, and the new one is taken. None: nothing is compared.
        on_keep: called with each tensor that is kept, when it is made.

    Attributes:
        is_refused: True to keep nothing any more, and to hand nothing back that was kept.
    """

    def __init__(
        self,
        positions: Sequence[int],
        on_difference: Callable[[], None] | None = None,
        on_keep: Callable[[Tensor], object] | None = None,
    ) -> None:
        self.positions = frozenset(positions)
        self.on_keep = on_keep
        self.is_refused = False
        self._on_difference = on_difference
        self._chosen: dict[bool, _Chosen] = {}
        self._compared: set[_Place] = set()
        self._changed: set[_Place] = set()

    def contexts(
        self, *, is_training: bool = True
    ) -> tuple[AbstractContextManager[object], AbstractContextManager[object]]:
        """Contexts of one forward and of running it again, such as ``checkpoint`` of torch takes as ``context_fn``.

        The second one may be entered several times. Results live as long as either.

        Args:
            is_training: whether the block is in training; what is learned holds for one of both.
        """
        call = _Call(self, is_training)
        return _Keeping(call), _Again(call)

    def chosen(self, is_training: bool) -> _Chosen | None:
        """Calls that dispatch the chosen operations; None before the first forward has ended."""
        return self._chosen.get(is_training)

    def learn(self, is_training: bool, places: Sequence[_Place]) -> None:
        """Takes the places of the chosen operations from a whole forward."""
        found: dict[Any, dict[int, frozenset[int]]] = {}
        for function, call, operation in places:
            calls = found.setdefault(function, {})
            calls[call] = calls.get(call, frozenset()) | {operation}
        self._chosen[is_training] = found

    def is_kept(self, place: _Place) -> bool:
        """Tells if a result at a chosen place is worth keeping: not if it was written to before."""
        return not self.is_refused and place not in self._changed

    def compare(self, place: _Place, kept: Tensor, run: Callable[[], Any]) -> Any:
        """Runs an operation again whose result was not compared yet; None if there is no need."""
        if self._on_difference is None or place in self._compared:
            return None
        found = run()
        self._compared.add(place)
        if not _are_equal(kept, _first(found)):
            self._on_difference()
        return found

    def note_changed(self, place: _Place) -> None:
        """Takes a place for one whose result the block writes to."""
        self._changed.add(place)


class _Call:
    """One forward of a block, with the results that it keeps."""

    def __init__(self, owner: KeptResults, is_training: bool) -> None:
        self.owner, self.is_training = owner, is_training
        self.results: dict[_Called, _Result] = {}
        self.running: list[_Watch] = []
        """Modes that are active: backward inside of forward makes this run again meanwhile. Only the last one counts
        operations."""

    def forget(self, tensor: Any) -> None:
        """Drops results in a storage that may change unseen."""
        if self.results and not is_traceable_wrapper_subclass(tensor):
            storage = tensor.untyped_storage()._cdata
            for called in [called for called, result in self.results.items() if storage in result.storages]:
                del self.results[called]


@dataclass(frozen=True, eq=False)
class _Result:
    """Result of one operation."""

    operation: Any
    operands: tuple[Any, ...]
    """Shapes and dtypes of what it took: it stands for an operation on such alone."""
    values: tuple[Any, ...]
    """Tensors that share memory and version counter with what was returned; other values as they are."""
    versions: tuple[int | None, ...]
    is_tuple: bool

    @classmethod
    def of(cls, operation: Any, args: Sequence[Any], returned: Any) -> _Result:
        """Result to keep of what an operation has returned."""
        is_tuple = isinstance(returned, (tuple, list))
        values = tuple(_alias(value) for value in (returned if is_tuple else (returned,)))
        return cls(operation, _operands(args), values, tuple(_version(value) for value in values), is_tuple)

    @property
    def storages(self) -> set[int]:
        """Keys of the storages of its tensors."""
        return {value.untyped_storage()._cdata for value in self.values if isinstance(value, Tensor)}

    @property
    def is_as_returned(self) -> bool:
        """True unless somebody has written to it."""
        return self.versions == tuple(_version(value) for value in self.values)

    def stands_for(self, operation: Any, args: Sequence[Any]) -> bool:
        """Tells if it can be of this operation."""
        return operation is self.operation and self.operands == _operands(args)

    def handed_back(self) -> Any:
        """Returns it as the operation did."""
        values = tuple(_alias(value) for value in self.values)
        return values if self.is_tuple else values[0]


def _operands(args: Sequence[Any]) -> tuple[Any, ...]:
    return tuple((arg.shape, arg.dtype) if isinstance(arg, Tensor) else None for arg in args)


def _version(value: Any) -> int | None:
    return value._version if isinstance(value, Tensor) else None


def _alias(value: Any) -> Any:
    """Tensor outside of any graph that shares memory and version counter with another; other values as they are."""
    if not isinstance(value, Tensor):
        return value
    # The version counter is shared by the kernel of this key, which is left out inside of a dispatch mode.
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return value.detach()


def _first(returned: Any) -> Tensor:
    """First tensor of a result. Attention returns more, of which kernels leave parts unwritten that nobody reads."""
    found: Tensor = returned[0] if isinstance(returned, (tuple, list)) else returned
    return found


def _are_equal(one: Tensor, other: Tensor) -> bool:
    """Tells if tensors are equal bit by bit but for the sign of zeros and kinds of NaN."""
    return torch.equal(one, other) or bool(((one == other) | (one.isnan() & other.isnan())).all())


class _Watch(TorchFunctionMode):
    """Mode that finds heavy operations: dispatch modes see all operations, and cost each, so it is on in few calls."""

    def __init__(self, call: _Call) -> None:
        super().__init__()
        self.call = call
        self._calls: dict[Any, tuple[int, int]] = {}
        """Function -> number of its calls, and `_Called` of the last one: a call that forward alone has made, as for a
        table that the block then keeps, must not shift all that follow."""

    @property
    def is_innermost(self) -> bool:
        """True unless the forward is run again inside of this one."""
        return self.call.running[-1] is self

    @override
    def __enter__(self) -> Self:
        self.call.running.append(self)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    @override
    def __exit__(self, *exc_info: object) -> None:
        super().__exit__(*exc_info)  # type: ignore[no-untyped-call]
        self.call.running.pop()

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # Code that is compiled stays as it is: it dispatches no operations that could be found.
        if torch.compiler.is_dynamo_compiling() or not self.is_innermost:
            return func(*args, **kwargs)
        if func in _HIDING:
            self.call.forget(args[0])
        chosen = self.chosen()
        if chosen is not None and func not in chosen:
            return func(*args, **kwargs)
        number, before = self._calls.get(func, (0, 0))
        # what has no gradient is told from what has one: torch's checkpointing counts only what saves tensors
        gradients = (torch.is_grad_enabled(), *(isinstance(arg, Tensor) and arg.requires_grad for arg in args))
        now = hash((before, gradients, _operands(args)))
        self._calls[func] = number + 1, now
        if chosen is not None and number not in chosen[func]:
            return func(*args, **kwargs)
        with _Operations(self, func, number, now):
            return func(*args, **kwargs)

    def chosen(self) -> _Chosen | None:
        """Calls to look into; None: all of them."""
        return self.call.owner.chosen(self.call.is_training)

    def run(self, called: _Called, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs a heavy operation, or does without."""
        raise NotImplementedError


class _Operations(TorchDispatchMode):
    """Heavy operations of one call."""

    supports_higher_order_operators = True

    def __init__(self, watch: _Watch, function: Any, number: int, given: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._watch, self._function, self._number, self._given, self._index = watch, function, number, given, 0

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._watch.is_innermost or not is_heavy(func, args, kwargs):
            return func(*args, **kwargs)
        place = _Place(self._function, self._number, self._index)
        self._index += 1
        return self._watch.run((place, self._given), func, args, kwargs)


class _Keeping(_Watch):
    """Mode of a forward that keeps results."""

    def __init__(self, call: _Call) -> None:
        super().__init__(call)
        self._num_heavy = 0
        self._found: list[_Place] = []
        self._chosen = super().chosen()

    @override
    def __exit__(self, *exc_info: object) -> None:
        super().__exit__(*exc_info)
        if self._chosen is None and exc_info[0] is None:
            self.call.owner.learn(self.call.is_training, self._found)

    @override
    def chosen(self) -> _Chosen | None:
        return self._chosen

    @override
    def run(self, called: _Called, func: Any, args: Any, kwargs: Any) -> Any:
        returned, (place, _) = func(*args, **kwargs), called
        if self._is_chosen(place) and self.call.owner.is_kept(place):
            result = self.call.results[called] = _Result.of(func, args, returned)
            on_keep = self.call.owner.on_keep
            for value in result.values:
                if on_keep is not None and isinstance(value, Tensor):
                    on_keep(value)
        return returned

    def _is_chosen(self, place: _Place) -> bool:
        if self._chosen is not None:
            return place.operation in self._chosen[place.function][place.call]
        position = self._num_heavy
        self._num_heavy += 1
        if position not in self.call.owner.positions:
            return False
        self._found.append(place)
        return True


class _HandingBack(_Watch):
    """Mode of a forward that runs again with the results that are there."""

    @override
    def run(self, called: _Called, func: Any, args: Any, kwargs: Any) -> Any:
        results, owner, (place, _) = self.call.results, self.call.owner, called
        result = results.get(called)
        if result is None or owner.is_refused or not result.stands_for(func, args):
            return func(*args, **kwargs)
        if not result.is_as_returned:
            owner.note_changed(place)
            del results[called]
            return func(*args, **kwargs)
        found = owner.compare(place, _first(result.values), lambda: func(*args, **kwargs))
        if found is not None:
            del results[called]
            return found
        return result.handed_back()


class _Again(AbstractContextManager[None]):
    """Context in which a forward runs again; each time, and also inside of itself, it counts from the first call."""

    def __init__(self, call: _Call) -> None:
        self._call = call
        self._entered: list[_HandingBack] = []

    @override
    def __enter__(self) -> None:
        mode = _HandingBack(self._call)
        mode.__enter__()
        self._entered.append(mode)

    @override
    def __exit__(self, *exc_info: object) -> None:
        self._entered.pop().__exit__(*exc_info)
