"""`Features`: what is between the operators of a pair, where each rank has some features of all ranks' samples."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from numbers import Number
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch._C import DisableTorchFunctionSubclass
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from typing_extensions import Self, override

from lightning_osdp.errors import ConfigurationError
from lightning_osdp.operations.stationary.exchanges import MOVE_WEIGHTS, Call

_ALSO_ELEMENTWISE = frozenset(
    {
        "_prelu_kernel", "_to_copy", "alias", "bernoulli", "bernoulli_", "clone", "copy_", "detach", "detach_",
        "empty_like", "fill_", "full_like", "native_dropout", "normal_", "ones_like", "rand_like", "randn_like",
        "uniform_", "zeros_like",
    }
)  # fmt: skip
"""Operations of torch that treat all elements alike, and are not marked so."""
_VIEWS = frozenset({"_unsafe_view", "lift_fresh", "view"})
"""Operations inside of elementwise functions that give the same elements. As functions of their own they are not looked
for in pairs: ranks would have other shapes."""
_ALIKE = frozenset(
    {
        "device", "dim", "dtype", "element_size", "get_device", "is_complex", "is_cpu", "is_cuda", "is_floating_point",
        "is_inference", "is_leaf", "is_meta", "is_mps", "is_nested", "is_quantized", "is_signed", "is_sparse", "is_xpu",
        "itemsize", "layout", "ndim", "ndimension", "requires_grad", "untyped_storage",
    }
)  # fmt: skip
"""Functions and attributes of tensors that give no tensor, and the same on all ranks."""
_OF_GRADIENTS = (Tensor.register_hook, Tensor.register_post_accumulate_grad_hook, Tensor.retain_grad)
_TO_DEVICES = frozenset({"cuda", "to", "xpu"})
"""Functions to which devices are given as numbers or texts."""
_NUM_CHECKED = 2
"""Number of rows on which a function is checked."""
_MOST_KNOWN = 1000
"""Number of functions, each with its arguments, that a pair remembers."""


@dataclass(eq=False)
class Pair:
    """One or two operators that give features, and one that takes them.

    Attributes:
        operators: qualified names in forward order, for errors.
    """

    operators: tuple[str, ...]
    known: dict[Any, bool] = field(default_factory=dict, init=False)
    """Functions with their arguments that were found to be elementwise, and whether they draw random numbers."""

    @property
    def firsts(self) -> str:
        """Names of the operators that give features, for errors."""
        return ", ".join(map(repr, self.operators[:-1]))


class Features(Tensor):
    """Tensor (..., rows of all ranks, features of this rank) that only elementwise functions can be applied to.

    Any other function would compute something else here than on the features of one rank's samples: it raises a
    `ConfigurationError`, on all ranks alike. So does a function of another tensor, which may differ
    between ranks, unless that is a parameter of one element, or of features of the same call of the pair, and a
    function that gives sizes. Each function, with the numbers and texts that it is given, is told to the call, so that
    ranks find that they have applied others. Functions that draw random numbers, as dropout does, draw others on each
    rank, and as reproducibly: ranks have other features, and where all ranks have one seed they would get one mask.
    """

    pair: Pair
    call: Call
    lead: torch.Size
    """Shape of the input of the first operators on this rank, without its features."""

    @classmethod
    def of(cls, values: Tensor, pair: Pair, call: Call, lead: torch.Size) -> Self:
        """Features with these values."""
        with DisableTorchFunctionSubclass():
            made: Self = values.as_subclass(cls)
        made.pair, made.call, made.lead = pair, call, lead
        return made

    def plain(self) -> Tensor:
        """The values as a plain tensor."""
        with DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor)

    @classmethod
    @override
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        own = next((each for each in leaves if isinstance(each, Features)), None)
        if own is None:
            with DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        pair, call, lead = own.pair, own.call, own.lead
        with DisableTorchFunctionSubclass():
            shape = own.shape
            if func in _OF_GRADIENTS:
                _refuse(pair, func, "of gradients")
            for each in leaves:
                if isinstance(each, Features):
                    if each.call is not call:
                        _refuse(pair, func, "of features that were made of another input")
                elif isinstance(each, Tensor) and not is_number_of_all(each):
                    why = f"of another tensor, of shape {tuple(each.shape)} and no parameter of one element"
                    _refuse(pair, func, why)
            # Autograd saves plain tensors: backward, where other modes may be in between, meets no `Features`.
            run = partial(func, *tree_map(_plain, args), **tree_map(_plain, kwargs))
            key = _key(func, args, kwargs)
            is_random = pair.known.get(key)
            if is_random is None:
                is_random = _checked(pair, func, args, kwargs)
                if key is not None and len(pair.known) < _MOST_KNOWN:
                    pair.known[key] = is_random
            result = _drawn(run, call, own.device) if is_random else run()

            if is_of_one_rank(func, result):
                _refuse(pair, func, "which gives what only this rank's features have")
            if any(isinstance(each, Tensor) for each in tree_leaves(result)):
                call.on_function(_digest(func, leaves))

            def wrapped(value: Any) -> Any:
                if not isinstance(value, Tensor):
                    return value
                if value.shape != shape:
                    _refuse(pair, func, f"which makes shape {tuple(value.shape)} of {tuple(shape)}")
                return cls.of(value, pair, call, lead)

            return tree_map(wrapped, result)


def is_elementwise(operation: Any) -> bool:
    """Tells if an operation of torch treats all elements alike."""
    return torch.Tag.pointwise in operation.tags or operation.overloadpacket.__name__ in _ALSO_ELEMENTWISE


def is_number_of_all(tensor: Tensor) -> bool:
    """Tells if a tensor is a parameter of one element: no other tensor is known to have the same value on all ranks."""
    return isinstance(tensor, nn.Parameter) and tensor.numel() == 1


def is_of_one_rank(func: Any, result: Any) -> bool:
    """Tells if the result of a function of features has anything but tensors that other ranks may have otherwise."""
    return _name(func) not in _ALIKE and not all(isinstance(each, Tensor) for each in tree_leaves(result))


class _Elementwise(TorchDispatchMode):
    """Notes the operations that run in it.

    Attributes:
        other: name of one that is not elementwise.
        is_random: whether one draws random numbers.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.other, self.is_random = "", False

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if not is_elementwise(func) and name not in _VIEWS:
            self.other = self.other or name
        self.is_random |= torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


def _plain(value: Any) -> Any:
    return value.plain() if isinstance(value, Features) else value


def _key(func: Any, args: Any, kwargs: Any) -> Any:
    """Function with its arguments, tensors as their places; None where they cannot be remembered."""
    key = (func, tree_map(_without_values, args), tuple(tree_map(_without_values, kwargs).items()))
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _without_values(value: Any) -> Any:
    return Tensor if isinstance(value, Tensor) else value


def _checked(pair: Pair, func: Any, args: Any, kwargs: Any) -> bool:
    """Tells if a function draws random numbers; refuses it if it is not elementwise. It is run on a few rows."""

    def few(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if not isinstance(value, Features):
            return value.detach()
        rows = value.plain().detach()[..., :_NUM_CHECKED, :]
        # Of an empty tensor, dropout draws nothing on CPU.
        return rows.clone() if rows.numel() else rows.new_ones([max(1, size) for size in rows.shape])

    given = tree_map(few, (args, kwargs))
    with torch.no_grad(), torch.random.fork_rng(_devices_in(given)), _Elementwise() as found:
        func(*given[0], **given[1])
    if found.other:
        _refuse(pair, func, f"which runs {found.other}")
    return bool(found.is_random)


def _drawn(run: Callable[[], Any], call: Call, device: torch.device) -> Any:
    """Runs a function with random numbers of this rank.

    Generators go on in the same way on all ranks, and where a block runs again.
    """
    seed = int(torch.randint(2**62, (), device="cpu")) + call.rank
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.default_generator.manual_seed(seed)
        if device.type == "cuda":
            torch.cuda.default_generators[device.index].manual_seed(seed)
        return run()


def _digest(func: Any, leaves: Iterable[Any]) -> int:
    """Number below 2^32 of a function and the numbers and texts that it is given, the same in all processes.

    Devices are left out, which each rank has of its own.
    """
    name = _name(func)
    told = [each for each in leaves if isinstance(each, (Number, str)) and name not in _TO_DEVICES]
    return zlib.crc32(repr((name, told)).encode())


def _devices_in(values: Any) -> list[torch.device]:
    return list({each.device for each in tree_leaves(values) if isinstance(each, Tensor) and each.is_cuda})


def _name(func: Any) -> str:
    """Name of a function, or of the attribute that it reads."""
    name = getattr(func, "__name__", str(func))
    return str(getattr(func.__self__, "__name__", name)) if name == "__get__" else str(name)


def _refuse(pair: Pair, func: Any, why: str) -> NoReturn:
    raise ConfigurationError(
        f"Expected only elementwise functions of one tensor between {pair.firsts} and {pair.operators[-1]!r}, which"
        f" move activations as a pair, got {_name(func)}, {why}. Each rank has some features of all ranks' samples"
        f" there. {MOVE_WEIGHTS}"
    )
