"""`ShardedModel`: what an engine makes of a module, and all that the strategy may ask of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_osdp.core.plan import Plan

T = TypeVar("T")


class ShardedModel(ABC):
    """A module whose parameters are sharded over all ranks. Methods are called on all ranks unless they say otherwise.

    Attributes:
        module: the user's, under whose names states are.
        root: what the Trainer trains; the module itself where nothing is wrapped around it.
        plan: of its units; None where there is none.
        recomputed: names of modules that recompute whatever the plan says.
        check_options: raises where a plan contradicts what else was asked for.
    """

    def __init__(self, module: nn.Module, root: nn.Module, plan: Plan | None) -> None:
        self.module, self.root, self.plan = module, root, plan
        self.recomputed: Sequence[str] = ()
        self.check_options: Callable[[Plan], None] = _no_options

    @property
    @abstractmethod
    def num_units(self) -> int:
        """How many units are gathered, each at once."""

    @property
    @abstractmethod
    def is_whole(self) -> bool:
        """Whether it was sharded for want of a plan, and not for manual optimization: `undo` makes it plain again."""

    @property
    @abstractmethod
    def shares_world(self) -> bool:
        """Whether it is sharded over the process group that there is now."""

    @property
    @abstractmethod
    def is_opened(self) -> bool:
        """Whether ``state_dict()`` of the module would give whole tensors now, or what somebody wants to be shards."""

    @abstractmethod
    def undo(self) -> None:
        """Gives the module whole parameters of its own again."""

    # in a step

    def run(self, step: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Runs one of the user's steps, with what the root unit holds unsharded."""
        return step(*args, **kwargs)

    @abstractmethod
    def before_backward(self) -> None:
        """Forward is over, and backward comes."""

    @abstractmethod
    def before_optimizer_step(self, optimizer: Optimizer) -> None:
        """The gradients of an optimizer step are complete.

        Raises:
            RanksApartError: ranks have not run the same units.
        """

    def stepping(self, optimizer: Optimizer) -> AbstractContextManager[None]:
        """To call ``step()`` of an optimizer in, with or without a closure."""
        del optimizer
        return nullcontext()

    @abstractmethod
    def after_optimizer_step(self) -> None:
        """Weights have changed."""

    @abstractmethod
    def check_optimizers(self, optimizers: Sequence[Optimizer]) -> None:
        """Returns if these can update the shards.

        Raises:
            ConfigurationError: one cannot.
        """

    @abstractmethod
    def accumulating(self) -> AbstractContextManager[None]:
        """Within it, units that the plan reduces in the last micro-batch only leave their gradients whole."""

    @abstractmethod
    def reshard(self) -> None:
        """Has every parameter be this rank's shard, and nothing be left of an all-gather; gradients stay."""

    @abstractmethod
    def use(self, plan: Plan, *, may_divide: bool = False) -> None:
        """Goes on under another plan, between two steps; on an error, under the one before, on all ranks.

        Args:
            plan: the same on all ranks; it differs from the one in use in nothing but `Engine.flips`.
            may_divide: whether its optimizer steps may have other micro-batches: those are whoever's who drives steps.

        Raises:
            PlanMismatchError: it differs in something else, names a block that is not there, or is not the same on all
                ranks.
            PlanFormatError: it says something nonsensical.
            ConfigurationError: there is no plan in use, or a step is going on.
        """

    @abstractmethod
    def place_in_step(self) -> str:
        """Where in a step this rank is: ``forward of 'layers.2'``, or nothing outside of one; for errors."""

    # a step without the other ranks

    @abstractmethod
    def alone(self) -> AbstractContextManager[None]:
        """Within it, no collective reaches another rank; afterwards all is as before, errors or not."""

    @abstractmethod
    def kept_shards(self) -> AbstractContextManager[None]:
        """Puts back this rank's shards of trainable weights when it ends; within `alone`."""

    @abstractmethod
    def shard_gradients(self) -> None:
        """Gives trainable parameters gradients of zero, such as a step leaves behind; within `alone`."""

    @property
    @abstractmethod
    def shards(self) -> Sequence[Tensor]:
        """What this rank holds of the parameters."""

    # states

    @abstractmethod
    def whole_state(self, *, on_all_ranks: bool) -> dict[str, Any] | None:
        """Whole state dict in memory of its own, on rank 0 or on all ranks; None on the others."""

    @abstractmethod
    def model_state(self, state_dict_type: str) -> dict[str, Any]:
        """State dict for a checkpoint: whole tensors on rank 0 (``"full"``), or each rank's shards (``"sharded"``)."""

    @abstractmethod
    def optimizer_state(self, optimizer: Optimizer, state_dict_type: str) -> dict[str, Any]:
        """State of one optimizer, likewise; whole states are keyed by parameter index, as a plain optimizer's are."""

    @abstractmethod
    def load_model(self, state_dict: Mapping[str, Any], *, strict: bool) -> None:
        """Loads a whole state dict, which every rank has."""

    @abstractmethod
    def taking(self, state_dict: dict[str, Any]) -> AbstractContextManager[object]:
        """Within it, the module's own ``load_state_dict`` can load this, which has whole tensors on all ranks."""

    @abstractmethod
    def load_optimizer(self, optimizer: Optimizer, state_dict: Mapping[str, Any]) -> None:
        """Loads a whole state by name or by number.

        Raises:
            PlanMismatchError: its parameter groups are not the optimizer's.
        """

    @abstractmethod
    def load_sharded(self, path: Path, optimizers: Sequence[Optimizer], *, strict: bool) -> None:
        """Loads weights, and states of optimizers where there are any, from the folder of a sharded checkpoint."""

    @property
    def device(self) -> torch.device:
        """Where the shards are."""
        return next(self.module.parameters()).device


def _no_options(_: Plan) -> None:
    """Nothing else was asked for."""
