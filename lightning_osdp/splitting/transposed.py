"""Linear operators whose weight is (in, out), as ``Conv1D`` of the GPT-2 in transformers, in slices."""

from __future__ import annotations

from functools import cache
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import override

from lightning_osdp.splitting.linear import SplitLinear


class SplitConv1D(SplitLinear):
    """y = x_1 W_1 + x_2 W_2 + ... + b."""

    cuts_along: ClassVar = {"weight": 0}
    features = "nx"

    @classmethod
    @override
    def _slice_type(cls, whole_type: type[nn.Module]) -> type[nn.Module]:
        return _without_bias_too(whole_type)  # type: ignore[arg-type]


@cache
def _without_bias_too(whole_type: Any) -> type[nn.Module]:
    """The class with a forward that needs no bias; its own adds one always."""

    def forward(self: Any, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.t(), self.bias)

    return type(whole_type.__name__, (whole_type,), {"forward": forward})
