"""Buffers of a module in training, which are rank 0's on all ranks, as under DDP."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_osdp.apply.internals import dtensors
from lightning_osdp.errors import RanksApartError

_BATCH_BYTES = 2**24
"""What is broadcast at once, but for larger buffers; it is copied for that."""
_LARGEST = 2**31 - 1
_NUM_LOOKED = 2
"""Steps in which values are compared."""


class Buffers:
    """The buffers of a module, of which those that have changed are copied from rank 0.

    What is not saved stays each rank's own as long as ranks have other sizes of it, as of caches that grow to the
    longest sequence that a rank has seen.

    The version of a tensor tells of what changes it in place, but not of ``buffer.data.mul_()``: values are compared in
    the first steps, and what has changed so counts as changed in all steps from then on.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._places: list[_Place] = []
        self._num_steps = 0

    def begin(self) -> None:
        """Training begins: all buffers that there are count as changed."""
        found = {
            id(buffer): _Place(f"{path}.{name}".lstrip("."), child, name)
            for path, child in self._root.named_modules()
            for name, buffer in child._buffers.items()
            if type(buffer) is Tensor and buffer.layout is torch.strided and not buffer.is_meta
        }
        self._places = list(found.values())
        self._num_steps = 0

    def __len__(self) -> int:
        return len(self._places)

    @property
    def _is_looking(self) -> bool:
        return self._num_steps <= _NUM_LOOKED  # the first time is when training begins

    def told(self) -> list[int]:
        """What ranks tell each other the largest of: of each buffer whether it has changed, its bytes, and -bytes."""
        told: list[int] = []
        for place in self._places:
            told += [place.has_changed(is_looking=self._is_looking), place.num_bytes, -place.num_bytes]
        return told

    def take(self, told: Sequence[int], hosts: dist.ProcessGroup) -> None:
        """Takes over from rank 0 what has changed on any rank.

        Args:
            told: the largest of what ranks have told.
            hosts: all ranks, where those of the default group cannot reach each other's host memory.

        Raises:
            RanksApartError: a buffer that is saved has another size on another rank.
        """
        changed: list[_Place] = []
        for place, has_changed, most, negated_least in zip(self._places, *(told[i::3] for i in range(3)), strict=True):
            if most + negated_least == 0:
                changed += [place] if has_changed else []
            elif place.is_persistent:
                raise apart(repr(place.name))
        self._num_steps += 1
        _copy_from_rank_zero([place.buffer for place in changed if place.buffer is not None], hosts)
        for place in changed:
            place.note(is_looking=self._is_looking)


class _Place:
    """Where a module has a buffer, and what that was when ranks last had the same."""

    def __init__(self, name: str, module: nn.Module, key: str) -> None:
        self.name, self._buffers, self._key = name, module._buffers, key
        self.is_persistent = key not in module._non_persistent_buffers_set
        self._seen: weakref.ref[Tensor] | None = None
        self._version = self._hash = 0
        self._is_untold = False

    @property
    def buffer(self) -> Tensor | None:
        return self._buffers.get(self._key)

    @property
    def num_bytes(self) -> int:
        return 0 if self.buffer is None else self.buffer.nbytes % _LARGEST

    def has_changed(self, *, is_looking: bool) -> bool:
        buffer, seen = self.buffer, None if self._seen is None else self._seen()
        if buffer is None:
            return False
        if buffer is not seen or version_of(buffer) != self._version:
            return True
        if is_looking and dtensors.hash_of(_without_repeats(buffer)) != self._hash:
            self._is_untold = True
        return self._is_untold

    def note(self, *, is_looking: bool) -> None:
        buffer = self.buffer
        if buffer is not None:
            self._seen, self._version = weakref.ref(buffer), version_of(buffer)
            self._hash = dtensors.hash_of(_without_repeats(buffer)) if is_looking else 0


def apart(which: str) -> RanksApartError:
    """Of buffers that ranks do not have in common."""
    return RanksApartError(
        f"Expected the same buffers of the same sizes on every rank, for all take over rank 0's as under DDP, but"
        f" {which} differs. Keep what is a rank's own in an attribute, self.name = tensor, instead of register_buffer."
    )


def version_of(buffer: Tensor) -> int:
    """How often operations in place have changed a tensor, of which nothing counts it in inference mode."""
    return 0 if buffer.is_inference() else buffer._version


def _without_repeats(buffer: Tensor) -> Tensor:
    """Each element once, of a buffer that is expanded."""
    for dim, stride in enumerate(buffer.stride()):
        if stride == 0 and buffer.shape[dim] > 0:
            buffer = buffer.select(dim, 0).unsqueeze(dim)
    return buffer.detach()


@torch.inference_mode()  # in which tensors of that mode may be changed, as an evaluation leaves them
def _copy_from_rank_zero(buffers: Sequence[Tensor], hosts: dist.ProcessGroup) -> None:
    kinds: dict[Any, list[list[Tensor]]] = defaultdict(lambda: [[]])
    for buffer in map(_without_repeats, buffers):
        batches = kinds[buffer.dtype, buffer.device]
        if batches[-1] and sum(each.nbytes for each in batches[-1]) + buffer.nbytes > _BATCH_BYTES:
            batches.append([])
        batches[-1].append(buffer)
    for (_, device), batches in kinds.items():
        for batch in batches:
            flat = torch.cat([buffer.reshape(-1) for buffer in batch])
            dist.broadcast(flat.view(torch.uint8), src=0, group=hosts if device.type == "cpu" else None)
            if dist.get_rank() > 0:
                for buffer, values in zip(batch, flat.split([each.numel() for each in batch]), strict=True):
                    buffer.copy_(values.view_as(buffer))
