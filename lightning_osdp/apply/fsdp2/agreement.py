"""What ranks must agree on in a step: which units they gathered, and which parameters have a gradient at all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from lightning_osdp.apply.fsdp2 import internals
from lightning_osdp.errors import RanksApartError

_PRIME = 2**31 - 1


class Agreement:
    """Compares ranks once in an optimizer step, by one small all-reduce.

    - A parameter that no rank used has no gradient, as under DDP with ``find_unused_parameters``: ``fully_shard``
      reduces zeros for it, so that a rank on which it was used finds the others in the same reduce-scatter.
    - Ranks that gathered different units have computed with one another's weights, or would wait for each other.

    Args:
        root: of the units.
        groups: parameters of each unit that has any.
        device: of the parameters.
    """

    def __init__(self, root: nn.Module, groups: Sequence[Any], device: torch.device) -> None:
        self._device = device
        self._gathers = 0  # a hash of the units in the order in which they were gathered
        self._is_paused = False
        self._parameters: list[tuple[nn.Parameter, Any]] = []
        self._starts: list[int] = []
        for index, group in enumerate(groups):
            self._starts.append(len(self._parameters))
            self._parameters += internals.parameters_of(group)
            internals.on_all_gather(group, partial(self._note_gather, index))
        internals.BackwardWatch(root, groups, self._note_gradients)
        self._places = {parameter: place for place, (parameter, _) in enumerate(self._parameters)}
        self._has_gradient = [False] * len(self._places)

    def begin_backward(self) -> None:
        """Gradients that were dropped since the last backward do not count."""
        for place, (parameter, owner) in enumerate(self._parameters):
            if parameter.grad is None and not internals.has_whole_gradient(owner):
                self._has_gradient[place] = False

    def settle(self, optimizer: Optimizer) -> None:
        """Before a step of an optimizer: drops gradients of what no rank has used. Call it on all ranks.

        Raises:
            RanksApartError: ranks have gathered different units since the last step.
        """
        used = self._has_gradient if dist.get_world_size() == 1 else self._agreed()
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter in self._places and not used[self._places[parameter]]:
                    parameter.grad = None

    def _agreed(self) -> list[int]:
        """For each parameter, whether any rank has a gradient of it."""
        found = torch.tensor([self._gathers, -self._gathers, *self._has_gradient], dtype=torch.int32)
        told = found.to(self._device)
        dist.all_reduce(told, dist.ReduceOp.MAX)
        found = told.cpu()
        if found[0] != -found[1]:
            raise RanksApartError(
                "Expected every rank to run the same modules in the same order, but they ran different units in this"
                " step, so that weights of one were gathered as another's. Call all modules on every rank, with inputs"
                " that do not count if need be, or use SearchSpace(modes=('DP',)) with one unit around all that is"
                " chosen by rank."
            )
        self._gathers = 0
        return found[2:].tolist()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Within it, nothing is noted: this rank runs alone."""
        kept = list(self._has_gradient)
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused, self._has_gradient[:] = False, kept

    def _note_gather(self, unit: int) -> None:
        if not self._is_paused:
            self._gathers = (self._gathers * 31 + unit + 1) % _PRIME

    def _note_gradients(self, unit: int, have: Sequence[bool]) -> None:
        for place, has in enumerate(have, self._starts[unit]):
            self._has_gradient[place] |= has
