"""What OSDP is compared with: Lightning's own strategies, as a user would give them to the Trainer."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Literal, TypeAlias

from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ParallelStrategy
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from typing_extensions import override

from benchmarks.families import Family
from benchmarks.testbed.plans import plan_of
from examples.mingpt.model import Block
from lightning_osdp.core import plan as plans
from lightning_osdp.core.plan import Plan

Sharding: TypeAlias = Literal["FULL_SHARD", "SHARD_GRAD_OP", "DDP"]
_MODES = {"FULL_SHARD": "ZDP", "SHARD_GRAD_OP": "DP"}


@dataclass(frozen=True, kw_only=True)
class Way:
    """One of Lightning's own ways to train."""

    sharding: Sharding
    """DDP: none at all, and then neither of the others."""
    by_operator: bool = False
    """Whether every Linear is a unit, as the paper's baseline has it, or every block."""
    recomputes: bool = False
    """Whether blocks are checkpointed. Lightning does so inside of the units that are blocks, which is torch's best
    order, and around the units that are inside of blocks, which is the paper's."""

    @property
    def name(self) -> str:
        """For people, and to tell one from the others."""
        parts = [self.sharding, *["a unit for each Linear"] * self.by_operator, *["checkpointing"] * self.recomputes]
        return ", ".join(parts)

    def strategy(self) -> ParallelStrategy:
        """For a Trainer."""
        if self.sharding == "DDP":
            return DDPStrategy()
        policy = {Block} if self.recomputes else None
        units = {nn.Linear} if self.by_operator else {Block}
        return LightningFSDP(self.sharding, auto_wrap_policy=units, activation_checkpointing_policy=policy)

    def plan(self, module: Family, *, world_size: int, micro_batch_size: int, num_micro_batches: int = 1) -> Plan:
        """What the strategy does, as a plan, so that it can be predicted: all gradients are reduced once, at the end.

        (The root of FULL_SHARD is gathered in every micro-batch, the plan's only in the first one. DDP has no plan like
        it: of that for SHARD_GRAD_OP, only the micro-batches are its own.)
        """
        kind = nn.Linear if self.by_operator else Block
        mode = _MODES.get(self.sharding, "DP")
        plan = plan_of(
            module,
            {name: mode for name, child in module.named_modules() if isinstance(child, kind)},
            world_size=world_size,
            micro_batch_size=micro_batch_size,
            num_micro_batches=num_micro_batches,
        )
        blocks = [name for name, child in module.named_modules() if isinstance(child, Block) and self.recomputes]
        return replace(
            plan,
            units=tuple(replace(unit, sync="last" if num_micro_batches > 1 else "every") for unit in plan.units),
            blocks=tuple(plans.Block(name=name, activations="recompute") for name in blocks),
        )


@dataclass(frozen=True, kw_only=True)
class Baseline(Way):
    """One of these ways with so many samples in so many micro-batches, and its counted peak."""

    micro_batch_size: int
    num_micro_batches: int
    counted_bytes: int

    @property
    def way(self) -> Way:
        """Without sizes."""
        return Way(**{field.name: getattr(self, field.name) for field in fields(Way)})

    def its_plan(self, module: Family, world_size: int) -> Plan:
        """See `Way.plan`."""
        size, number = self.micro_batch_size, self.num_micro_batches
        return self.plan(module, world_size=world_size, micro_batch_size=size, num_micro_batches=number)


class LightningFSDP(FSDPStrategy):
    """Lightning's strategy with the one change that CPU needs: FSDP1 gets the device instead of its index.

    Args:
        sharding: of all units.
        **kwargs: of Lightning's strategy.
    """

    # Lightning's accelerator connector refuses CPU for the names in FSDPStrategy's own list.
    _registered_strategies: list[str] = []  # noqa: RUF012 (Lightning's declaration)

    def __init__(self, sharding: str, **kwargs: Any) -> None:
        super().__init__(sharding_strategy=sharding, **kwargs)  # type: ignore[arg-type]  # one of FSDP1's names

    @override
    def _setup_model(self, model: nn.Module) -> nn.Module:
        wrapped = FullyShardedDataParallel(
            module=model,
            cpu_offload=self.cpu_offload,
            mixed_precision=self.mixed_precision_config,
            sharding_strategy=self.sharding_strategy,
            device_id=self.root_device,
            **self.kwargs,
        )
        return super()._setup_model(wrapped)  # which applies checkpointing to what is wrapped already
