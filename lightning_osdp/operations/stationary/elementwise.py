"""Operations of torch that treat all elements alike."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from typing_extensions import override

_ALSO_ELEMENTWISE = frozenset(
    {
        "_prelu_kernel", "_to_copy", "alias", "bernoulli", "bernoulli_", "clone", "copy_", "detach", "detach_",
        "empty_like", "fill_", "full_like", "native_dropout", "normal_", "ones_like", "rand_like", "randn_like",
        "uniform_", "zeros_like",
    }
)  # fmt: skip
"""Operations of torch that treat all elements alike, and are not marked so."""
_VIEWS = frozenset({"_unsafe_view", "lift_fresh", "view"})
"""Operations inside of elementwise functions that give the same elements, in the same shape unless it is one element:
others may have gone to another dimension, as the weight of ``prelu`` does."""


class Elementwise(TorchDispatchMode):
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
        name, result = func.overloadpacket.__name__, func(*args, **(kwargs or {}))
        is_same = name in _VIEWS and (result.shape == args[0].shape or result.numel() == 1)
        if not is_elementwise(func) and not is_same:
            self.other = self.other or name
        self.is_random |= torch.Tag.nondeterministic_seeded in func.tags
        return result


def is_elementwise(operation: Any) -> bool:
    """Tells if an operation of torch treats all elements alike."""
    return torch.Tag.pointwise in operation.tags or operation.overloadpacket.__name__ in _ALSO_ELEMENTWISE


def is_number_of_all(tensor: Tensor) -> bool:
    """Tells if a tensor is a parameter of one element: no other tensor is known to have the same value on all ranks."""
    return isinstance(tensor, nn.Parameter) and tensor.numel() == 1


def preserved_generators(given: Any) -> AbstractContextManager[None]:
    """Context behind which generators are as before, those of the devices of tensors among these, too."""
    devices = {each.device for each in tree_leaves(given) if isinstance(each, Tensor) and each.is_cuda}
    return torch.random.fork_rng([*devices])


def name_of(func: Any) -> str:
    """Name of a function of torch, or of the attribute that it reads."""
    name = getattr(func, "__name__", str(func))
    return str(getattr(func.__self__, "__name__", name)) if name == "__get__" else str(name)
