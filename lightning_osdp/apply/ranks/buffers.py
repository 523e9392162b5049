"""Buffers of a module in training, which all ranks take from rank 0, as under DDP."""

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
"""Size up to which buffers are copied together, to be broadcast at once."""
_LARGEST = 2**31 - 1
_NUM_LOOKED = 2
"""Number of steps in which values are compared."""


class Buffers:
    """Buffers of a module; changed ones are copied from rank 0.

    A buffer that is not saved stays each rank's own while its size differs between ranks: a cache may grow to the
    longest sequence that a rank has seen.

    The version of a tensor counts changes in place, but not ``buffer.data.mul_()``. Values are compared in the first
    steps, and a buffer that has changed without a new version counts as changed in all steps from then on.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._places: list[_Place] = []
        self._num_steps = 0

    def begin(self) -> None:
        """Begins training: all buffers that are there count as changed."""
        places = {
            id(buffer): _Place(f"{path}.{name}".lstrip("."), child, name)
            for path, child in self._root.named_modules()
            for name, buffer in child._buffers.items()
            if type(buffer) is Tensor and buffer.layout is torch.strided and not buffer.is_meta
        }
        self._places = list(places.values())
        self._num_steps = 0

    def __len__(self) -> int:
        return len(self._places)

    @property
    def _is_looking(self) -> bool:
        return self._num_steps <= _NUM_LOOKED  # the first comparison is when training begins

    def reports(self) -> list[int]:
        """Numbers of which ranks take the largest; for each buffer whether it has changed, its bytes, and -bytes."""
        reports: list[int] = []
        for place in self._places:
            reports += [place.has_changed(is_looking=self._is_looking), place.num_bytes, -place.num_bytes]
        return reports

    def take(self, reports: Sequence[int], hosts: dist.ProcessGroup) -> None:
        """Copies buffers from rank 0 that have changed on any rank.

        Args:
            reports: the largest of all ranks' reports.
            hosts: all ranks, where those of the default group cannot reach each other's host memory.

        Raises:
            RanksApartError: a buffer that is saved has another size on another rank.
        """
        changed: list[_Place] = []
        for place, has_changed, most, negated_least in zip(
            self._places, *(reports[i::3] for i in range(3)), strict=True
        ):
            if most + negated_least == 0:
                changed += [place] if has_changed else []
            elif place.is_persistent:
                raise apart(repr(place.name))
        self._num_steps += 1
        _copy_from_rank_zero([place.buffer for place in changed if place.buffer is not None], hosts)
        for place in changed:
            place.note(is_looking=self._is_looking)


class _Place:
    """Place of a buffer in its module, and the state of the buffer when ranks last agreed on it."""

    def __init__(self, name: str, module: nn.Module, key: str) -> None:
        self.name, self._buffers, self._key = name, module._buffers, key
        self.is_persistent = key not in module._non_persistent_buffers_set
        self._seen: weakref.ref[Tensor] | None = None
        self._version = self._hash = 0
        self._has_hidden_changes = False

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
            self._has_hidden_changes = True
        return self._has_hidden_changes

    def note(self, *, is_looking: bool) -> None:
        buffer = self.buffer
        if buffer is not None:
            self._seen, self._version = weakref.ref(buffer), version_of(buffer)
            self._hash = dtensors.hash_of(_without_repeats(buffer)) if is_looking else 0


def apart(which: str) -> RanksApartError:
    """Error about buffers that differ between ranks."""
    return RanksApartError(
        f"Expected the same buffers of the same sizes on every rank, for all take over rank 0's as under DDP, but"
        f" {which} differs. Keep what is a rank's own in an attribute, self.name = tensor, instead of register_buffer."
    )


def version_of(buffer: Tensor) -> int:
    """Version of a tensor; always 0 for one of inference mode, which has none."""
    return 0 if buffer.is_inference() else buffer._version


def _without_repeats(buffer: Tensor) -> Tensor:
    """View of a buffer that has each element of an expanded dimension once."""
    for dim, stride in enumerate(buffer.stride()):
        if stride == 0 and buffer.shape[dim] > 0:
            buffer = buffer.select(dim, 0).unsqueeze(dim)
    return buffer.detach()


@torch.inference_mode()  # evaluations leave tensors of inference mode, which change in that mode alone
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
