"""The training step, run for its cost alone: on real tensors or on fake ones, with as many samples as one likes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn

from lightning_osdp.errors import ProfileError
from lightning_osdp.profiler.fake import faked
from lightning_osdp.profiler.resize import resized
from lightning_osdp.profiler.snapshot import untouched

Rehearsal: TypeAlias = "AbstractContextManager[tuple[Callable[[], Any], Any]]"
"""Gives what runs forward once, and its batch; on exit everything is as before."""


@dataclass(frozen=True)
class Step:
    """A training step and the batch that it is profiled on.

    Every rehearsal starts from the same state, random numbers included, and so takes the same path through the model.
    """

    module: nn.Module
    batch: Any
    batch_size: int
    run: Callable[[Any], Any]
    """Forward: takes a batch, returns the loss or a mapping with it."""
    device: torch.device
    """Where the model trains."""
    blocks: frozenset[nn.Module] | None = None
    """Modules that may be blocks; None: repeated ones."""

    @property
    def is_meta(self) -> bool:
        """Whether some parameter has no values."""
        return any(parameter.is_meta for parameter in self.module.parameters())

    @contextmanager
    def on_real_tensors(self, size: int) -> Iterator[tuple[Callable[[], Any], Any]]:
        """A rehearsal with so many samples."""
        with untouched(self.module), torch.enable_grad():
            batch = self._sized(self.batch, size)
            yield lambda: self.run(batch), batch

    @contextmanager
    def on_fake_tensors(self, size: int) -> Iterator[tuple[Callable[[], Any], Any]]:
        """A rehearsal that allocates and computes nothing.

        What a step reads of a model on the meta device, such as a loss that it logs, is taken as one.
        """
        with faked(self.module, self.batch, self.device, assumes_ones=self.is_meta) as fake_batch:
            batch = self._sized(fake_batch, size)
            yield lambda: self.run(batch), batch

    def _sized(self, batch: Any, size: int) -> Any:
        if size == self.batch_size:
            return batch
        changed = resized(batch, self.batch_size, size)
        if changed is None:
            raise ProfileError(f"no tensor of the batch has {self.batch_size} samples first")
        return changed
