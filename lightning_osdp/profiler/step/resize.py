"""The profiled batch with another number of samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only


def another_size(batch_size: int) -> int:
    """A second micro-batch to measure: half of the first, which fits wherever that one does; two where it is one."""
    return batch_size // 2 if batch_size > 1 else 2


def resized(batch: Any, batch_size: int, new_size: int) -> Any | None:
    """The batch with its first samples, or repeated ones, in every tensor whose first dimension is the batch size.

    Returns:
        None where no tensor has that dimension, so that the batch cannot be resized.
    """
    return samples_of(batch, batch_size, [index % batch_size for index in range(new_size)])


def samples_of(batch: Any, batch_size: int, samples: Sequence[int]) -> Any | None:
    """The batch with these of its samples, in every tensor whose first dimension is the batch size.

    Returns:
        None where no tensor has that dimension.
    """
    found = False

    def resize(tensor: Tensor) -> Tensor:
        nonlocal found
        if tensor.dim() == 0 or tensor.shape[0] != batch_size:
            return tensor
        found = True
        return tensor[torch.tensor(samples, device=tensor.device)]

    changed = tree_map_only(Tensor, resize, batch)
    return changed if found else None
