"""What stands for a whole parameter where this rank has a shard of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor
from typing_extensions import Self, override

from lightning_osdp.errors import ShardedParameterError


class ShardedParameter(Tensor):
    """Has the shape, dtype and device of the whole parameter, and raises wherever its values are needed.

    Args:
        shape: of the whole parameter.
        piece: any part of it.
        name: of the parameter in its module, for the error.
    """

    remedy: ClassVar[str] = (
        "Read it from trainer.strategy.whole_state_dict(); give an optimizer the module's parameters() instead."
    )
    """How to read the values, for the error."""
    _name: str

    def __new__(cls, shape: Sequence[int], piece: Tensor, name: str) -> Self:
        """Takes no memory."""
        made: Self = Tensor._make_wrapper_subclass(
            cls, torch.Size(shape), dtype=piece.dtype, device=piece.device, requires_grad=piece.requires_grad
        )
        made._name = name
        return made

    def __init__(self, shape: Sequence[int], piece: Tensor, name: str) -> None:
        """All is done in ``__new__``."""

    @override
    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self._name!r}, shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    @override
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> NoReturn:
        """Raises: there are no values here.

        Raises:
            ShardedParameterError: always.
        """
        name = next((arg._name for arg in args if isinstance(arg, cls)), "weight")
        raise ShardedParameterError(
            f"Expected the whole {name!r} of a split operator for {func}, but it is cut into slices that are sharded"
            f" over ranks. {cls.remedy}"
        )
