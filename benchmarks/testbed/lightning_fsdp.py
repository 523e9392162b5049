"""What OSDP is compared with: Lightning's own FSDP strategy, one unit for each block, as it accumulates gradients."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Literal, TypeAlias

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import FSDPStrategy
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from typing_extensions import override

from benchmarks.families import Family
from benchmarks.testbed.plans import plan_of
from benchmarks.testbed.step import Step
from benchmarks.testbed.training import StartedRanks
from examples.mingpt.model import Block
from lightning_osdp.core.plan import Plan

Sharding: TypeAlias = Literal["FULL_SHARD", "SHARD_GRAD_OP"]
_MODES = {"FULL_SHARD": "ZDP", "SHARD_GRAD_OP": "DP"}


class LightningFSDP(FSDPStrategy):
    """Lightning's strategy with the one change that CPU needs: FSDP1 gets the device instead of its index.

    Args:
        sharding: of all units.
    """

    # Lightning's accelerator connector refuses CPU for the names in FSDPStrategy's own list.
    _registered_strategies: list[str] = []  # noqa: RUF012 (Lightning's declaration)

    def __init__(self, sharding: Sharding, **kwargs: Any) -> None:
        super().__init__(sharding_strategy=sharding, auto_wrap_policy={Block}, **kwargs)

    @override
    def _setup_model(self, model: nn.Module) -> FullyShardedDataParallel:
        return FullyShardedDataParallel(
            module=model,
            cpu_offload=self.cpu_offload,
            mixed_precision=self.mixed_precision_config,
            sharding_strategy=self.sharding_strategy,
            device_id=self.root_device,
            **self.kwargs,
        )


def lightning_plan(
    module: Family, sharding: Sharding, *, world_size: int, micro_batch_size: int, num_micro_batches: int
) -> Plan:
    """What the strategy does, as a plan, so that it can be predicted: all gradients are reduced once, at the end.

    (The root of FULL_SHARD is gathered in every micro-batch, the plan's only in the first one.)
    """
    blocks = {name: _MODES[sharding] for name, child in module.named_modules() if isinstance(child, Block)}
    plan = plan_of(
        module, blocks, world_size=world_size, micro_batch_size=micro_batch_size, num_micro_batches=num_micro_batches
    )
    return replace(plan, units=tuple(replace(unit, sync="last") for unit in plan.units))


class LightningStep(Step):
    """A `Step` as Lightning takes it with its own strategy: every micro-batch but the last in the root's ``no_sync``.

    Args:
        module: it is wrapped in place.
        plan: of `lightning_plan`.
        sharding: of all units.
    """

    def __init__(self, module: Family, plan: Plan, sharding: Sharding) -> None:
        devices = [torch.device("cpu")] * dist.get_world_size()
        self._strategy = LightningFSDP(sharding, parallel_devices=devices, cluster_environment=StartedRanks())
        super().__init__(module, plan)

    @override
    def _wrap(self, module: Family, plan: Plan) -> FullyShardedDataParallel:
        return self._strategy._setup_model(module)

    @override
    def _before_last(self) -> AbstractContextManager[None]:
        context: AbstractContextManager[None] = self.root.no_sync()
        return context
