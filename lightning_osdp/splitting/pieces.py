"""Tensors cut along one dimension and joined again, whole ones and those that are sharded over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata
from torch.distributed._shard.sharded_tensor.shard import Shard


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
        """One tensor of the pieces; the piece itself where there is one.

        Shards of sharded pieces become shards of the whole one, without copies and without communication.
        """
        if len(pieces) == 1:
            return pieces[0]
        if isinstance(pieces[0], ShardedTensor):
            return self._join_shards(pieces)
        return torch.cat(list(pieces), self.dim)

    def cut(self, whole: Tensor) -> list[Tensor]:
        """Pieces of one tensor, as views; of a sharded tensor, one that `join` has put together."""
        if len(self.sizes) == 1:
            return [whole]
        if isinstance(whole, ShardedTensor):
            return self._cut_shards(whole)
        return list(torch.split(whole, list(self.sizes), self.dim))

    def _join_shards(self, pieces: Sequence[Tensor]) -> ShardedTensor:
        local, every = [], []
        start = 0
        for piece, size in zip(pieces, self.sizes, strict=True):
            assert isinstance(piece, ShardedTensor)
            every += [self._moved(metadata, start) for metadata in piece.metadata().shards_metadata]
            local += [Shard(shard.tensor, self._moved(shard.metadata, start)) for shard in piece.local_shards()]
            start += size
        return _sharded(local, every, self.shape, pieces[0])

    def _cut_shards(self, whole: ShardedTensor) -> list[Tensor]:
        pieces: list[Tensor] = []
        start = 0
        for shape, size in zip(self.piece_shapes, self.sizes, strict=True):
            within = range(start, start + size)
            every = [
                self._moved(metadata, -start)
                for metadata in whole.metadata().shards_metadata
                if metadata.shard_offsets[self.dim] in within
            ]
            local = [
                Shard(shard.tensor, self._moved(shard.metadata, -start))
                for shard in whole.local_shards()
                if shard.metadata.shard_offsets[self.dim] in within
            ]
            pieces.append(_sharded(local, every, shape, whole))
            start += size
        return pieces

    def _moved(self, metadata: ShardMetadata, by: int) -> ShardMetadata:
        offsets = list(metadata.shard_offsets)
        offsets[self.dim] += by
        return ShardMetadata(offsets, list(metadata.shard_sizes), metadata.placement)


def _sharded(local: list[Shard], every: list[ShardMetadata], shape: Sequence[int], like: Tensor) -> ShardedTensor:
    assert isinstance(like, ShardedTensor)
    metadata = ShardedTensorMetadata(every, torch.Size(shape), like.metadata().tensor_properties)
    return ShardedTensor._init_from_local_shards_and_global_metadata(local, metadata, process_group=like._process_group)
