"""Stand-ins for a whole parameter of a split operator, where this rank has shards of its slices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.tensor import DTensor, Shard
from typing_extensions import Self, override

from lightning_osdp.errors import ShardedParameterError
from lightning_osdp.operations.gloo import all_gather


class ShardedParameter(Tensor):
    """Tensor with the shape, dtype and device of the whole parameter; it raises wherever values are needed."""

    remedy: ClassVar[str] = (
        "Read it from trainer.strategy.whole_state_dict(); give an optimizer the module's parameters() instead."
    )
    """Advice how to read the values, for the error."""
    _name: str

    def __new__(cls, shape: Sequence[int], piece: Tensor, name: str) -> Self:
        """Makes one, which takes no memory."""
        made: Self = Tensor._make_wrapper_subclass(
            cls, torch.Size(shape), dtype=piece.dtype, device=piece.device, requires_grad=piece.requires_grad
        )
        made._name = name
        return made

    @override
    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self._name!r}, shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    @override
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> NoReturn:
        """Raises a `ShardedParameterError`: there are no values here."""
        name = next((arg._name for arg in args if isinstance(arg, cls)), "weight")
        raise ShardedParameterError(
            f"Expected the whole {name!r} of a split operator for {func}, but it is cut into slices that are sharded"
            f" over ranks. {cls.remedy}"
        )


class JoinedShards(ShardedParameter):
    """DTensors beside or below each other, as one tensor of which this rank has a shard in each.

    One DTensor cannot describe them: rows below each other are no one chunk of rows. ``torch.distributed.checkpoint``
    writes and reads each rank's shards where they lie, without a copy and without communication, for any other
    sharding.

    Args:
        pieces: DTensors of one dtype, with equal shapes but for ``dim``.
        dim: dimension along which they are joined.
        name: name of the parameter, for the error where values are needed.
    """

    remedy: ClassVar[str] = (
        "Call its full_tensor() on all ranks, or read trainer.strategy.whole_state_dict(); give an optimizer the"
        " module's parameters() instead."
    )
    pieces: tuple[Any, ...]
    """DTensors, as Any: annotations of torch do not know their methods."""
    _dim: int
    _sizes: list[int]
    _starts: list[int]

    def __new__(cls, pieces: Sequence[Any], dim: int, name: str) -> Self:
        """Makes one, which takes no memory."""
        shape, sizes = list(pieces[0].shape), [piece.shape[dim] for piece in pieces]
        shape[dim] = sum(sizes)
        made = super().__new__(cls, shape, pieces[0], name)
        made.pieces, made._dim, made._sizes = tuple(pieces), dim, sizes
        made._starts = [sum(sizes[:index]) for index in range(len(sizes))]
        return made

    def full_tensor(self) -> Tensor:
        """Gathers the whole tensor on every rank; all must call it."""
        whole = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        for place, piece in zip(whole.split(self._sizes, self._dim), self.pieces, strict=True):
            place.copy_(gathered(piece.detach()))
        return whole

    def empty_like(self, dtype: torch.dtype) -> JoinedShards:
        """Joined shards with this layout and another dtype, without values."""
        return JoinedShards([torch.empty_like(piece, dtype=dtype) for piece in self.pieces], self._dim, self._name)

    # Methods that torch.distributed.checkpoint calls on tensors that know their shards, such as DTensors.

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        items = []
        for start, piece in zip(self._starts, self.pieces, strict=True):
            for item in piece.__create_write_items__(fqn, piece):
                chunk = self._moved(item.tensor_data.chunk, start)
                if 0 not in chunk.sizes:
                    data = replace(item.tensor_data, chunk=chunk, size=self.shape)
                    items.append(replace(item, index=MetadataIndex(fqn, chunk.offsets), tensor_data=data))
        return items

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [chunk for chunk, _ in self._shards()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return next(local for chunk, local in self._shards() if chunk.offsets == index.offset)

    def _shards(self) -> list[tuple[ChunkStorageMetadata, Tensor]]:
        """Shards of this rank that are not empty, and where they lie."""
        shards = []
        for start, piece in zip(self._starts, self.pieces, strict=True):
            local = piece.detach().to_local()
            if local.numel():
                shards += [(self._moved(chunk, start), local) for chunk in piece.__create_chunk_list__()]
        return shards

    def _moved(self, chunk: ChunkStorageMetadata, start: int) -> ChunkStorageMetadata:
        offsets = list(chunk.offsets)
        offsets[self._dim] += start
        return replace(chunk, offsets=torch.Size(offsets))


def gathered(shards: Any) -> Tensor:
    """Gathers the whole tensor of a DTensor on every rank; all must call it.

    Rows are gathered into one buffer, of which the result may be a view; ``full_tensor`` holds up to three such
    buffers.
    """
    whole: Tensor
    mesh = shards.device_mesh
    if shards.device.type != mesh.device_type:  # a state on the host
        rows, shape, stride = shards.to_local(), shards.shape, shards.stride()
        shards = DTensor.from_local(rows, mesh, shards.placements, shape=shape, stride=stride)
    cut = cut_of(shards)
    if cut is None or cut[1]:
        whole = shards.full_tensor().clone()  # full_tensor() may be a view of the shard
        return whole
    group = cut[0]
    local = shards.to_local()
    num_rows = -(-len(shards) // group.size())
    buffer = local.new_empty(num_rows * group.size(), *local.shape[1:])
    own = buffer.narrow(0, group.rank() * num_rows, num_rows)
    own[: len(local)].copy_(local)
    all_gather(buffer, own, group)
    whole = buffer[: len(shards)]
    return whole


def cut_of(shards: DTensor) -> tuple[dist.ProcessGroup, int] | None:
    """Process group over which a DTensor is cut, and the dimension along which; None where each rank has all of it.

    Ranks outside of the group may have the same part, as those of other nodes do.
    """
    for mesh_dim, placement in enumerate(shards.placements):
        if isinstance(placement, Shard):
            return shards.device_mesh.get_group(mesh_dim), placement.dim
    return None
