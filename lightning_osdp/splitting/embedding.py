"""`nn.Embedding` in slices along the embedding dimension."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_osdp.splitting.module import SplitModule


class SplitEmbedding(SplitModule):
    """The embeddings of all slices, side by side."""

    cuts_along: ClassVar = {"weight": 1}
    features = "embedding_dim"

    @classmethod
    @override
    def accepts(cls, module: nn.Module) -> bool:
        """Not where ``max_norm`` asks for the norm of whole rows."""
        return getattr(module, "max_norm", None) is None

    @override
    def forward(self, indices: Tensor) -> Tensor:
        """Output of the whole operator.

        Args:
            indices: (*), integers.

        Returns:
            (*, embedding_dim).
        """
        return torch.cat([part(indices) for part in self.slices], dim=-1)
