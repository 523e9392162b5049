"""Tensors cut along one dimension and joined again, whole ones and those that are sharded over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_osdp.splitting.joined import JoinedShards


@dataclass(frozen=True, kw_only=True)
class Cut:
    """How one parameter of a whole operator lies in slices."""

    whole: str
    """Its qualified name in the model that is not split."""
    pieces: tuple[str, ...]
    """Names of what it is cut into; a single one where it is moved, not cut."""
    dim: int
    sizes: tuple[int, ...]
    """Lengths of the pieces along ``dim``."""
    shape: tuple[int, ...]
    """Of the whole parameter."""

    @property
    def piece_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the pieces."""
        return tuple((*self.shape[: self.dim], size, *self.shape[self.dim + 1 :]) for size in self.sizes)

    def join(self, pieces: Sequence[Tensor]) -> Tensor:
        """One tensor of the pieces, the piece itself where there is one; shards stay where they are, `JoinedShards`."""
        if len(pieces) == 1:
            return pieces[0]
        if isinstance(pieces[0], DTensor):
            return JoinedShards(pieces, self.dim, self.whole)
        return torch.cat(list(pieces), self.dim)

    def cut(self, whole: Tensor) -> list[Tensor]:
        """Pieces of one tensor, as views; of `JoinedShards`, those that it was joined of."""
        if len(self.sizes) == 1:
            return [whole]
        if isinstance(whole, JoinedShards):
            return list(whole.pieces)
        return list(torch.split(whole, list(self.sizes), self.dim))
