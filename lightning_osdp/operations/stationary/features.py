"""`Features`: what is between the operators of a pair, where each rank has some features of all ranks' samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import DisableTorchFunctionSubclass
from torch.utils._pytree import tree_map
from typing_extensions import Self, override

from lightning_osdp.operations.stationary.between import Between, Pair
from lightning_osdp.operations.stationary.blocks import Followed
from lightning_osdp.operations.stationary.elementwise import (
    Elementwise,
    is_number_of_all,
    preserved_generators,
)
from lightning_osdp.operations.stationary.exchanges import Call

_NUM_CHECKED = 2
"""Number of rows on which a function is checked."""


class Features(Between):
    """Tensor (..., rows of all ranks, features of this rank) that only elementwise functions can be applied to.

    Any other function would compute something else here than on the features of one rank's samples: it raises a
    `ConfigurationError`, on all ranks alike. So does a function of another tensor, which may differ
    between ranks, unless that is a parameter of one element, or of features of the same call of the pair, and a
    function that gives sizes.
    """

    contents = "features"
    may_be_applied = "only elementwise functions of one tensor"
    moves_as = "a pair"
    lead: torch.Size
    """Shape of the input of the first operators on this rank, without its features."""

    @classmethod
    def of(cls, values: Tensor, pair: Pair, call: Call, lead: torch.Size) -> Self:
        """Features with these values."""
        with DisableTorchFunctionSubclass():
            made: Self = values.as_subclass(cls)
        made.pair, made.call, made.lead = pair, call, lead
        return made

    @override
    def _numbers_of(self, func: Any, others: Sequence[Tensor]) -> Sequence[int]:
        for each in others:
            if not is_number_of_all(each):
                self._refuse(func, f"of another tensor, of shape {tuple(each.shape)} and no parameter of one element")
        return ()

    @override
    def _layout(self, tensor: Tensor) -> Any:
        return Tensor

    @override
    def _followed(self, func: Any, args: Any, kwargs: Any) -> Followed:
        given = tree_map(_few, (args, kwargs))
        with torch.no_grad(), preserved_generators(given), Elementwise() as found:
            func(*given[0], **given[1])
        if found.other:
            self._refuse(func, f"which runs {found.other}")
        return Followed((), found.is_random)

    @override
    def _wrapped(self, func: Any, tensors: Sequence[Tensor], followed: Followed) -> list[Tensor]:
        for each in tensors:
            if each.shape != self.shape:
                self._refuse(func, f"which makes shape {tuple(each.shape)} of {tuple(self.shape)}")
        return [Features.of(each, self.pair, self.call, self.lead) for each in tensors]


def _few(value: Any) -> Any:
    """Few rows of features, on which a function is checked; another tensor as it is."""
    if not isinstance(value, Tensor):
        return value
    if not isinstance(value, Features):
        return value.detach()
    rows = value.plain().detach()[..., :_NUM_CHECKED, :]
    # Of an empty tensor, dropout draws nothing on CPU.
    return rows.clone() if rows.numel() else rows.new_ones([max(1, size) for size in rows.shape])
