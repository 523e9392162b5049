"""The training step, run for its cost alone: on real tensors or on fake ones, with as many samples as one likes."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, MutableMapping, MutableSequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.utils._pytree import tree_map

from lightning_osdp.errors import ProfileError
from lightning_osdp.profiler.fake_tensors.fake_model import faked
from lightning_osdp.profiler.step.resize import resized
from lightning_osdp.profiler.step.snapshot import untouched

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
    notes: list[str] = field(default_factory=list)
    """What people should know of the profile; gets what is found."""
    changed: set[nn.Parameter] = field(default_factory=set)
    """Parameters that a rehearsal on fake tensors has seen the step write to."""

    @property
    def is_meta(self) -> bool:
        """Whether some parameter has no values."""
        return any(parameter.is_meta for parameter in self.module.parameters())

    @contextmanager
    def on_real_tensors(self, size: int) -> Iterator[tuple[Callable[[], Any], Any]]:
        """A rehearsal with so many samples."""
        with untouched(self.module, changed=self.changed), torch.enable_grad():
            batch = self._sized(self.batch, size)
            yield lambda: self.run(_fresh(batch)), batch

    @contextmanager
    def on_fake_tensors(self, size: int) -> Iterator[tuple[Callable[[], Any], Any]]:
        """A rehearsal that allocates and computes nothing.

        What a step reads of a model on the meta device, such as a loss that it logs, is taken as one.
        """
        faking = faked(self.module, self.batch, self.device, assumes_ones=self.is_meta, changed=self.changed)
        with faking as fake_batch:
            batch = self._sized(fake_batch, size)
            yield lambda: self.run(_fresh(batch)), batch

    def _sized(self, batch: Any, size: int) -> Any:
        if size == self.batch_size:
            return batch
        changed = resized(batch, self.batch_size, size)
        if changed is None:
            raise ProfileError(f"no tensor of the batch has {self.batch_size} samples first")
        return changed


def _fresh(batch: Any) -> Any:
    """The same tensors in containers of their own, from which a step may take them."""
    return tree_map(
        lambda leaf: copy.copy(leaf) if isinstance(leaf, (MutableMapping, MutableSequence)) else leaf, batch
    )
