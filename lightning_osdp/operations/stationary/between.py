"""Tensors between operators that feed each other while activations move, and what all kinds of these have in common."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from numbers import Number
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass
from torch.utils._pytree import tree_leaves, tree_map
from typing_extensions import override

from lightning_osdp.errors import ConfigurationError
from lightning_osdp.operations.stationary.blocks import Followed
from lightning_osdp.operations.stationary.elementwise import name_of
from lightning_osdp.operations.stationary.exchanges import MOVE_WEIGHTS, Call

_ALIKE = frozenset(
    {
        "device", "dim", "dtype", "element_size", "get_device", "is_complex", "is_cpu", "is_cuda", "is_floating_point",
        "is_inference", "is_leaf", "is_meta", "is_mps", "is_nested", "is_quantized", "is_signed", "is_sparse", "is_xpu",
        "itemsize", "layout", "ndim", "ndimension", "requires_grad", "untyped_storage",
    }
)  # fmt: skip
"""Functions and attributes of tensors that give no tensor, and the same on all ranks."""
OF_GRADIENTS = (Tensor.register_hook, Tensor.register_post_accumulate_grad_hook, Tensor.retain_grad)
_TOLD = (Number, str, slice, torch.dtype)
"""Kinds of arguments that ranks tell each other."""
_TO_DEVICES = frozenset({"cuda", "to", "xpu"})
"""Functions to which devices are given as numbers or texts."""
_MOST_KNOWN = 1000
"""Number of functions, each with its arguments, that a pair remembers."""


@dataclass(eq=False)
class Pair:
    """Operators that feed each other, a pair or those of attention: the last one takes what the others make.

    Attributes:
        operators: qualified names in forward order, for errors.
        by_itself: call in which samples differ in shape between ranks, so that attention has all heads of each rank's
            own samples; None while ranks have some heads of the samples of all.
    """

    operators: tuple[str, ...]
    by_itself: Call | None = field(default=None, init=False)
    _known: dict[Any, Any] = field(default_factory=dict, init=False)

    @property
    def firsts(self) -> str:
        """Names of all but the last operator, for errors."""
        return ", ".join(map(repr, self.operators[:-1]))

    def known(self, key: Any, find: Callable[[], Any]) -> Any:
        """Finding about a function with its arguments, see `key_of`: from before, or made now, which may raise."""
        found = self._known.get(key)
        if found is None:
            found = find()
            if key is not None and len(self._known) < _MOST_KNOWN:
                self._known[key] = found
        return found


class Between(Tensor):
    """Tensor that only some functions can be applied to; its subclasses say which, and refuse others.

    Each function, with the numbers and texts that it is given, is told to the call, so that
    ranks find that they have applied others. Functions that draw random numbers, as dropout does, draw others on each
    rank, and as reproducibly: ranks have other features, and where all ranks have one seed they would get one mask.
    """

    pair: Pair
    call: Call
    contents: str
    """Word for what this rank has of all samples, for errors; the next two are, too."""
    may_be_applied: str
    moves_as: str

    def plain(self) -> Tensor:
        """The values as a plain tensor."""
        with DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor)

    @classmethod
    @override
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        leaves = tree_leaves((args, kwargs))
        own = next((each for each in leaves if isinstance(each, Between)), None)
        with DisableTorchFunctionSubclass():
            return func(*args, **kwargs) if own is None else own._apply(func, args, kwargs, leaves)

    def _apply(self, func: Any, args: Any, kwargs: Any, leaves: Sequence[Any]) -> Any:
        """Result of a function that is given this tensor, and possibly others."""
        call = self.call
        if func in OF_GRADIENTS:
            self._refuse(func, "of gradients")
        if any(isinstance(each, Between) and each.call is not call for each in leaves):
            self._refuse(func, f"of {self.contents} that were made of another input")
        run = partial(func, *tree_map(plain, args), **tree_map(plain, kwargs))
        if self._gives_alike(func):
            return run()
        others = [each for each in leaves if isinstance(each, Tensor) and not isinstance(each, Between)]
        numbers = self._numbers_of(func, others)
        key = key_of(func, args, kwargs, self._layout)
        followed: Followed = self.pair.known(key, partial(self._followed, func, args, kwargs))
        result = drawn(run, call, self.device) if followed.is_random else run()
        if is_of_one_rank(func, result):
            self._refuse(func, f"which gives what only this rank's {self.contents} have")
        tensors = [each for each in tree_leaves(result) if isinstance(each, Tensor)]
        if not tensors:
            return result
        for number in (digest(func, leaves, kwargs), *numbers):
            call.on_function(number)
        made = iter(self._wrapped(func, tensors, followed))
        return tree_map(lambda each: next(made) if isinstance(each, Tensor) else each, result)

    def _gives_alike(self, func: Any) -> bool:
        """Tells if a function gives what it gives on all ranks, and no tensor."""
        return False

    def _numbers_of(self, func: Any, others: Sequence[Tensor]) -> Sequence[int]:
        """Numbers by which ranks tell other tensors that a function is given; raises where it may not be given them."""
        raise NotImplementedError

    def _layout(self, tensor: Tensor) -> Any:
        """Properties of a tensor by which a function that is given it is remembered."""
        raise NotImplementedError

    def _followed(self, func: Any, args: Any, kwargs: Any) -> Followed:
        """Finding about a function with arguments like these, which it raises for if it may not be applied."""
        raise NotImplementedError

    def _wrapped(self, func: Any, tensors: Sequence[Tensor], followed: Followed) -> list[Tensor]:
        """Results of a function as such tensors."""
        raise NotImplementedError

    def _refuse(self, func: Any, why: str) -> NoReturn:
        """Raises the `ConfigurationError` for a function."""
        raise ConfigurationError(
            f"Expected {self.may_be_applied} between {self.pair.firsts} and {self.pair.operators[-1]!r}, which move"
            f" activations as {self.moves_as}, got {name_of(func)}, {why}. Each rank has some {self.contents} of all"
            f" ranks' samples there. {MOVE_WEIGHTS}"
        )


def is_of_one_rank(func: Any, result: Any) -> bool:
    """Tells if the result of a function has anything but tensors that other ranks may have otherwise."""
    return name_of(func) not in _ALIKE and not all(isinstance(each, Tensor) for each in tree_leaves(result))


def plain(value: Any) -> Any:
    """A tensor between operators as a plain one; anything else as it is.

    Autograd saves plain tensors: backward, where other modes may be in between, meets no others.
    """
    return value.plain() if isinstance(value, Between) else value


def key_of(func: Any, args: Any, kwargs: Any, of_tensor: Callable[[Tensor], Any]) -> Any:
    """Function with its arguments, tensors as this says, by which it is remembered; None where it cannot be."""
    named = ((name, _in_tuples(value, of_tensor)) for name, value in kwargs.items())
    key = (func, _in_tuples(args, of_tensor), *named)
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _in_tuples(value: Any, of_tensor: Callable[[Tensor], Any]) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value), *(_in_tuples(each, of_tensor) for each in value)
    if isinstance(value, slice):
        return slice, value.start, value.stop, value.step
    return of_tensor(value) if isinstance(value, Tensor) else (type(value), value)


def drawn(run: Callable[[], Any], call: Call, device: torch.device) -> Any:
    """Runs a function with random numbers of this rank.

    Generators go on in the same way on all ranks, and where a block runs again.
    """
    seed = int(torch.randint(2**62, (), device="cpu")) + call.rank
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.default_generator.manual_seed(seed)
        if device.type == "cuda":
            torch.cuda.default_generators[device.index].manual_seed(seed)
        return run()


def digest(func: Any, leaves: Iterable[Any], names: Iterable[str]) -> int:
    """Number below 2^32 of a function and the numbers and texts that it is given, the same in all processes.

    ``names`` are those of arguments. Devices are left out, which each rank has of its own.
    """
    name = name_of(func)
    told = [each for each in leaves if isinstance(each, _TOLD) and name not in _TO_DEVICES]
    return zlib.crc32(repr((name, told, [*names])).encode())
