"""Time as a function of the micro-batch: affine, from two sizes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only


@dataclass(frozen=True)
class Affine:
    """``fixed + size * per_sample``, both in seconds and neither negative."""

    fixed_s: float = 0.0
    per_sample_s: float = 0.0

    @classmethod
    def through(cls, size: int, seconds: float, other_size: int, other_seconds: float) -> Affine:
        """Exact at ``size``, and as close to the other point as neither part being negative allows.

        Example:
            >>> Affine.through(8, 10.0, 4, 6.0)
            Affine(fixed_s=2.0, per_sample_s=1.0)
            >>> Affine.through(8, 10.0, 4, 11.0)
            Affine(fixed_s=10.0, per_sample_s=0.0)
            >>> Affine.through(8, 8.0, 4, 1.0)
            Affine(fixed_s=0.0, per_sample_s=1.0)
        """
        slope = (seconds - other_seconds) / (size - other_size)
        slope = min(max(slope, 0.0), seconds / size)
        return cls(fixed_s=seconds - size * slope, per_sample_s=slope)

    @classmethod
    def proportional(cls, size: int, seconds: float) -> Affine:
        """Through the origin, where only one size could be measured."""
        return cls(per_sample_s=seconds / size)


def another_size(batch_size: int) -> int:
    """A second micro-batch to measure: half of the first, which fits wherever that one does; two where it is one."""
    return batch_size // 2 if batch_size > 1 else 2


def resized(batch: Any, batch_size: int, new_size: int) -> Any | None:
    """The batch with its first samples, or repeated ones, in every tensor whose first dimension is the batch size.

    Returns:
        None where no tensor has that dimension, so that the batch cannot be resized.
    """
    found = False

    def resize(tensor: Tensor) -> Tensor:
        nonlocal found
        if tensor.dim() == 0 or tensor.shape[0] != batch_size:
            return tensor
        found = True
        return tensor[torch.arange(new_size, device=tensor.device) % batch_size]

    changed = tree_map_only(Tensor, resize, batch)
    return changed if found else None
