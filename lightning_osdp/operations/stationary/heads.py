"""`Heads`: what is between projections and the output of attention, where each rank has some heads of all samples."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from math import gcd
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import DisableTorchFunctionSubclass
from torch.utils.weak import WeakIdKeyDictionary
from typing_extensions import Self, override

from lightning_osdp.operations.stationary.between import Between, Pair
from lightning_osdp.operations.stationary.blocks import Blocks, Followed, MixedError, follow, gives_sizes
from lightning_osdp.operations.stationary.exchanges import Call


class Heads(Between):
    """Tensor that has a block for each rank along one dimension: this rank's heads of that rank's samples.

    It has the sizes that it has where each rank has all heads of its own samples. Functions have to do the same to
    each block, see `blocks`; any other raises a `ConfigurationError`, on all ranks alike. Other tensors that they are
    given have to be the same on all ranks, and for each head: their values are told to the call, unless they are
    parameters.
    """

    contents = "heads"
    may_be_applied = "functions that do the same to each head of each sample"
    moves_as = "attention"
    blocks: Blocks
    """Dimension of the blocks, of which there is one for each rank."""

    @classmethod
    def of(cls, values: Tensor, pair: Pair, call: Call, blocks: Blocks) -> Self:
        """Heads with these values."""
        with DisableTorchFunctionSubclass():
            made: Self = values.as_subclass(cls)
        made.pair, made.call, made.blocks = pair, call, blocks
        return made

    @classmethod
    def from_rows(cls, parts: Sequence[Tensor], pair: Pair, call: Call, lead: Sequence[int]) -> Self:
        """Heads of shape (*lead, features of all ranks and parts) from this rank's features of each of equal parts.

        These are (rows of all ranks, features). Ranks have as many rows each, of which ``lead`` is the shape.
        """
        num_ranks, num_rows = len(call.rows), call.rows[call.rank]
        by_row = [part.view(num_ranks, num_rows, -1).transpose(0, 1) for part in parts]
        values = torch.stack(by_row, 1) if len(parts) > 1 else by_row[0]
        num_features = sum(num_ranks * part.shape[1] for part in parts)
        return cls.of(values.reshape(*lead, num_features), pair, call, Blocks(-1, num_ranks, len(parts)))

    def rows(self) -> Tensor:
        """This rank's features of the rows of all ranks, (rows of all ranks, features), where blocks are of features.

        Raises:
            ConfigurationError: they are along another dimension, or of queries, keys and values together.
        """
        num_ranks, values = len(self.call.rows), self.plain()
        if not self.blocks.are_features:
            self._refuse("heads", "in another dimension than the last, or queries, keys and values together")
        by_row = values.reshape(-1, num_ranks, values.shape[-1] // num_ranks)
        return by_row.transpose(0, 1).reshape(-1, by_row.shape[-1])

    @override
    def _gives_alike(self, func: Any) -> bool:
        return gives_sizes(func)

    @override
    def _numbers_of(self, func: Any, others: Sequence[Tensor]) -> Sequence[int]:
        return [_number_of(each) for each in others if not isinstance(each, nn.Parameter)]

    @override
    def _layout(self, tensor: Tensor) -> Any:
        blocks = tensor.blocks if isinstance(tensor, Heads) else None
        return tuple(tensor.shape), tensor.stride(), tensor.dtype, blocks

    @override
    def _followed(self, func: Any, args: Any, kwargs: Any) -> Followed:
        num_ranks = len(self.call.rows)

        def blocks_of(tensor: Tensor) -> Blocks | None:
            return tensor.blocks if isinstance(tensor, Heads) else None

        try:
            found = follow(func, args, kwargs, blocks_of)
        except MixedError as error:
            self._refuse(func, str(error))
        if any(gcd(each.number, num_ranks) < num_ranks for each in found.blocks):
            self._refuse(func, f"which makes heads that {num_ranks} ranks do not divide")
        return found

    @override
    def _wrapped(self, func: Any, tensors: Sequence[Tensor], followed: Followed) -> list[Tensor]:
        pairs = zip(tensors, followed.blocks, strict=True)
        return [Heads.of(each, self.pair, self.call, blocks) for each, blocks in pairs]


_told = WeakIdKeyDictionary()
"""Tensors, with what part of each was told last, its version, and the number that it was told by."""


def _number_of(tensor: Tensor) -> int:
    """Number below 2^32 of the values of a tensor, which is read once as long as nobody writes to it.

    The device is waited for once then. Views of a tensor, as each layer may make of cosines, are the same to this.
    """
    base = tensor if tensor._base is None else tensor._base
    version = None if tensor.is_inference() else tensor._version
    layout = [each for each in zip(tensor.shape, tensor.stride(), strict=True) if each[0] != 1]
    part = (version, tensor.storage_offset(), layout, tensor.dtype)
    known = _told.get(base)
    if known is not None and known[0] == part and version is not None:
        return int(known[1])
    values = tensor.detach().resolve_conj().resolve_neg().to("cpu").contiguous()
    number = zlib.crc32(values.reshape(-1).view(torch.uint8).numpy().tobytes())
    _told[base] = part, number
    return number
