"""The engines by name, and the function that applies a plan with the one that it names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from lightning_osdp.apply.fsdp1.model import Fsdp1Model
from lightning_osdp.apply.fsdp2.model import Fsdp2Model
from lightning_osdp.apply.sharded import ShardedModel
from lightning_osdp.core.plan import Plan
from lightning_osdp.core.plan_unit import Block


class EngineModel(Protocol):
    """What shards a module: each method changes it in place, and is called on all ranks of the default group."""

    def arguments(self, fsdp_kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Of the arguments for FSDP that a user gave, those that the other methods take.

        Raises:
            ConfigurationError: one means nothing to this engine.
        """

    def planned(self, module: nn.Module, plan: Plan, *, device: torch.device, **kwargs: Any) -> ShardedModel:
        """As a plan says, see `apply_plan`."""

    def unplanned(self, module: nn.Module, *, device: torch.device, **kwargs: Any) -> ShardedModel:
        """Without a plan, for evaluation: `ShardedModel.undo` gives the module back."""

    def separated(
        self, module: nn.Module, blocks: Sequence[Block], *, min_unit_bytes: int, device: torch.device, **kwargs: Any
    ) -> ShardedModel:
        """Without a plan, for steps that run backward between the calls of the module's children."""


ENGINES: dict[str, EngineModel] = {"fsdp1": Fsdp1Model, "fsdp2": Fsdp2Model}


def apply_plan(module: nn.Module, plan: Plan, *, device: torch.device, **fsdp_kwargs: Any) -> Any:
    """The module as the plan says; what to call in its place. Call it on all ranks of the default process group.

    The module is changed in place: its parameters are sharded, operators with several slices are split (see
    `lightning_osdp.splitting`), and blocks get another forward (see `apply_activations`). Under ``fsdp1`` its children
    are replaced by FSDP units and what is returned is the unit around it; under ``fsdp2`` it is the module itself.

    Where any rank has tensors on the meta device, all ranks start with rank 0's values: those that rank 0 has, and what
    ``reset_parameters`` of the modules makes there of the others. Each unit gets storage only when it is to be sharded.

    Args:
        module: the unwrapped model that the plan was made for.
        plan: what to shard how. Under ``fsdp1`` the root unit stays gathered from forward to the end of backward
            whatever its mode.
        device: where the parameters go.
        **fsdp_kwargs: further arguments of ``FullyShardedDataParallel`` (``fsdp1``) or ``mixed_precision``.

    Raises:
        PlanMismatchError: the module of a unit or block is not there or cannot be one, operators' parameters would end
            up in another unit, or the model has parameters that the plan does not know.
        ConfigurationError: the plan asks for what this version or the engine cannot execute.
        ProfileError: a module on the meta device cannot initialise itself, or initialises another unit.
    """
    return ENGINES[plan.engine].planned(module, plan, device=device, **fsdp_kwargs).root
