"""`nn.Linear` in slices along its input features."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from lightning_osdp.splitting.features import cut_features
from lightning_osdp.splitting.module import SplitModule


class SplitLinear(SplitModule):
    """y = x_1 W_1^T + x_2 W_2^T + ... + b: OSDP's operator splitting, added up in one output."""

    cuts_along: ClassVar[Mapping[str, int]] = {"weight": 1}
    features = "in_features"

    @override
    def forward(self, x: Tensor) -> Tensor:
        """Output of the whole operator.

        Args:
            x: (*, in_features), any float dtype; autocast holds for the slices as it does for a Linear.

        Returns:
            (*, out_features).
        """
        total: Tensor | None = None
        # torch fuses the bias into the product of a matrix, and not into that of a view with more dimensions.
        rows = x.flatten(0, -2) if x.dim() > 2 else x
        for part, features in zip(self.slices, cut_features(rows, self.sizes), strict=True):
            # In place: products save their inputs for backward, not their results. No name holds on to a partial one.
            total = part(features) if total is None else total.add_(part(features))
        assert total is not None
        if rows is x:
            return total
        # As F.linear does: to autograd no view, which would lose fully_shard's hooks where it is changed in place.
        output: Tensor = torch.ops.aten._unsafe_view(total, [*x.shape[:-1], total.shape[-1]])
        return output
