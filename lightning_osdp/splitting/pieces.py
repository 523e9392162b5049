"""Tensors cut along one dimension and joined again, whole ones and those that are sharded over ranks."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata
from torch.distributed._shard.sharded_tensor.shard import Shard
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
        """One tensor of the pieces; the piece itself where there is one.

        Shards are joined on the rank that holds them, without communication: FSDP cuts tensors into rows, so beside
        each other they are one shard, below each other several. Those of FSDP2 stay where they are, as `JoinedShards`.
        """
        if len(pieces) == 1:
            return pieces[0]
        if isinstance(pieces[0], DTensor):
            return JoinedShards(pieces, self.dim, self.whole)
        if not isinstance(pieces[0], ShardedTensor):
            return torch.cat(list(pieces), self.dim)
        return self._join_rows(pieces) if self.dim == 0 else self._join_columns(pieces)

    def cut(self, whole: Tensor) -> list[Tensor]:
        """Pieces of one tensor, as views where they can be; of a sharded one, with the shards that `join` makes."""
        if len(self.sizes) == 1:
            return [whole]
        if isinstance(whole, JoinedShards):
            return list(whole.pieces)
        if not isinstance(whole, ShardedTensor):
            return list(torch.split(whole, list(self.sizes), self.dim))
        starts = [sum(self.sizes[:index]) for index in range(len(self.sizes))]
        cut = self._rows if self.dim == 0 else self._columns
        return [
            cut(whole, start, size, shape)
            for start, size, shape in zip(starts, self.sizes, self.piece_shapes, strict=True)
        ]

    def _join_rows(self, pieces: Sequence[Any]) -> ShardedTensor:
        local, every, start = [], [], 0
        for piece, size in zip(pieces, self.sizes, strict=True):
            every += [_moved(metadata, start) for metadata in piece.metadata().shards_metadata]
            local += [Shard(shard.tensor, _moved(shard.metadata, start)) for shard in piece.local_shards()]
            start += size
        return sharded_like(pieces[0], local, every, self.shape)

    def _join_columns(self, pieces: Sequence[Any]) -> ShardedTensor:
        size = self.shape[self.dim]
        local = [
            Shard(torch.cat([shard.tensor for shard in shards], self.dim), self._resized(shards[0].metadata, size))
            for shards in zip(*(piece.local_shards() for piece in pieces), strict=True)
        ]
        every = [self._resized(metadata, size) for metadata in pieces[0].metadata().shards_metadata]
        return sharded_like(pieces[0], local, every, self.shape)

    def _rows(self, whole: ShardedTensor, start: int, size: int, shape: Sequence[int]) -> Tensor:
        within = range(start, start + size)
        every = [_moved(m, -start) for m in whole.metadata().shards_metadata if m.shard_offsets[0] in within]
        local = [
            Shard(shard.tensor, _moved(shard.metadata, -start))
            for shard in whole.local_shards()
            if shard.metadata.shard_offsets[0] in within
        ]
        return sharded_like(whole, local, every, shape)

    def _columns(self, whole: ShardedTensor, start: int, size: int, shape: Sequence[int]) -> Tensor:
        every = [self._resized(metadata, size) for metadata in whole.metadata().shards_metadata]
        local = [
            Shard(shard.tensor.narrow(self.dim, start, size).contiguous(), self._resized(shard.metadata, size))
            for shard in whole.local_shards()
        ]
        return sharded_like(whole, local, every, shape)

    def _resized(self, metadata: ShardMetadata, size: int) -> ShardMetadata:
        sizes = list(metadata.shard_sizes)
        sizes[self.dim] = size
        return ShardMetadata(list(metadata.shard_offsets), sizes, metadata.placement)


def _moved(metadata: ShardMetadata, num_rows: int) -> ShardMetadata:
    offsets = list(metadata.shard_offsets)
    return ShardMetadata([offsets[0] + num_rows, *offsets[1:]], list(metadata.shard_sizes), metadata.placement)


def sharded_like(
    like: ShardedTensor,
    local: list[Shard],
    every: list[ShardMetadata],
    shape: Sequence[int],
    dtype: torch.dtype | None = None,
) -> ShardedTensor:
    """A sharded tensor of these shards, on the ranks of another one.

    Args:
        like: where the ranks and the properties are taken from.
        local: shards on this rank.
        every: where the shards of all ranks lie.
        shape: of the tensor.
        dtype: of the shards; None: as the other's.
    """
    properties = copy.copy(like.metadata().tensor_properties)
    properties.dtype = dtype or properties.dtype
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        local, ShardedTensorMetadata(every, torch.Size(shape), properties), process_group=like._process_group
    )
