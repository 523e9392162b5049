"""`Features`: what is between the two operators of a pair, where each rank has some features of all ranks' samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from typing_extensions import Self, override

from lightning_osdp.errors import ConfigurationError
from lightning_osdp.stationary.exchanges import Call

_ALSO_ELEMENTWISE = frozenset(
    {
        "_prelu_kernel", "_to_copy", "_unsafe_view", "alias", "bernoulli", "bernoulli_", "clone", "copy_", "detach",
        "detach_", "empty_like", "fill_", "full_like", "lift_fresh", "native_dropout", "normal_", "ones_like",
        "rand_like", "randn_like", "uniform_", "view", "zeros_like",
    }
)  # fmt: skip
"""Operations of torch that treat all elements alike, and are not marked so."""
_MOST_KNOWN = 1000
"""Number of functions, each with its arguments, that a pair remembers."""


@dataclass(eq=False)
class Pair:
    """Two operators, of which the first gives features and the second takes them.

    Attributes:
        first, second: qualified names, for errors.
    """

    first: str
    second: str
    known: dict[Any, bool] = field(default_factory=dict, init=False)
    """Functions with their arguments that were found to be elementwise, and whether they draw random numbers."""


class Features(Tensor):
    """Tensor (..., rows of all ranks, features of this rank) that only elementwise functions can be applied to.

    Any other function would compute something else here than on the features of one rank's samples: it raises a
    `ConfigurationError`, on all ranks alike. So does a function of another tensor with several elements. Functions that
    draw random numbers, as dropout does, draw others on each rank, and as reproducibly: ranks have other features, and
    where all ranks have one seed they would get one mask.
    """

    pair: Pair
    call: Call
    lead: torch.Size
    """Shape of the input of the first operator on this rank, without its features."""

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
            for each in leaves:
                if isinstance(each, Tensor) and not isinstance(each, Features) and each.numel() > 1:
                    _refuse(pair, func, f"of another tensor, of shape {tuple(each.shape)}")
            key = _key(func, args, kwargs)
            is_random = pair.known.get(key)
            if is_random is None:
                found = _Elementwise()

                def checked() -> Any:
                    with found:
                        return func(*args, **kwargs)

                result = _drawn(checked, call, own.device, lambda: found.is_random)
                if found.other:
                    _refuse(pair, func, f"which runs {found.other}")
                if key is not None and len(pair.known) < _MOST_KNOWN:
                    pair.known[key] = found.is_random
            elif is_random:
                result = _drawn(lambda: func(*args, **kwargs), call, own.device, lambda: True)
            else:
                result = func(*args, **kwargs)

            def wrapped(value: Any) -> Any:
                if not isinstance(value, Tensor) or isinstance(value, Features):
                    return value
                if value.shape != shape:
                    _refuse(pair, func, f"which makes shape {tuple(value.shape)} of {tuple(shape)}")
                return cls.of(value, pair, call, lead)

            return tree_map(wrapped, result)


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
        if torch.Tag.pointwise not in func.tags and name not in _ALSO_ELEMENTWISE:
            self.other = self.other or name
        self.is_random |= torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


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


def _drawn(run: Callable[[], Any], call: Call, device: torch.device, is_random: Callable[[], bool]) -> Any:
    """Runs a function with random numbers of this rank; where it drew none, the state of before is there again.

    The state goes on in the same way on all ranks, and where a block runs again, whatever the function drew.
    """
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        seed = int(torch.randint(2**62, (), device="cpu")) + call.rank
        torch.default_generator.manual_seed(seed)
        if device.type == "cuda":
            torch.cuda.default_generators[device.index].manual_seed(seed)
        result = run()
    if is_random():
        torch.randint(2**62, (), device="cpu")
    return result


def _refuse(pair: Pair, func: Any, why: str) -> NoReturn:
    name = getattr(func, "__name__", str(func))
    raise ConfigurationError(
        f"Expected only elementwise functions of one tensor between {pair.first!r} and {pair.second!r}, which move"
        f" activations as a pair, got {name}, {why}. Each rank has some features of all ranks' samples there. Plan anew"
        " by leaving out `plan=`, or have the two move weights."
    )
