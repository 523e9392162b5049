"""Buffers of a block whose forward runs twice: updated once, and read the second time as they were the first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensor
from torch.nn.modules.batchnorm import _NormBase

Place = tuple[nn.Module, str]
Values = Mapping[Place, Tensor]


class Buffers:
    """Those buffers of a block that its forward changes, such as running statistics."""

    def __init__(self, block: nn.Module) -> None:
        self._block = block
        self._changing: tuple[Place, ...] | None = None  # unknown before the first forward
        self._learned_in: tuple[bool, ...] = ()

    @contextmanager
    def updated(self, values: dict[Place, Tensor]) -> Iterator[None]:
        """Runs a forward for the first time; ``values`` then has what the buffers that it changed were before."""
        training = tuple(child.training for child in self._block.modules())
        if training != self._learned_in:  # what evaluates may leave alone what training updates
            self._changing, self._learned_in = None, training
        places = self._changing
        if places is None:
            owned = ((owner, *each) for owner in self._block.modules() for each in owner._buffers.items())
            places = tuple((owner, name) for owner, name, buffer in owned if buffer is not None)
        found = {(owner, name): owner.get_buffer(name) for owner, name in places}
        versions = {place: buffer._version for place, buffer in found.items()}
        values.update((place, buffer.clone()) for place, buffer in found.items())
        yield
        if self._changing is None:
            self._changing = tuple(
                (owner, name)
                for (owner, name), buffer in found.items()
                if isinstance(owner, _NormBase)  # it may be frozen now and trained later
                or owner._buffers[name] is not buffer
                or buffer._version != versions[owner, name]
                # not every operation counts versions
                or not (isinstance(buffer, FakeTensor) or torch.equal(buffer, values[owner, name]))
            )
            for place in places:
                if place not in self._changing:
                    del values[place]

    @contextmanager
    def as_they_were(self, values: Values) -> Iterator[None]:
        """Runs a forward once more; what it does to the buffers is forgotten."""
        updated = {(owner, name): owner._buffers[name] for owner, name in values}
        for (owner, name), value in values.items():
            owner._buffers[name] = value.clone()
        try:
            yield
        finally:
            for (owner, name), buffer in updated.items():
                owner._buffers[name] = buffer
