"""FSDP1, `torch.distributed.fsdp.FullyShardedDataParallel`, by what differs from ``fully_shard``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from typing_extensions import override

from benchmarks.fsdp1.layout import layout
from benchmarks.fsdp1.live_parts import FSDP1LiveParts
from benchmarks.fsdp1.schedule import FSDP1Host
from lightning_osdp.core.modes import ShardingMode
from lightning_osdp.core.profile import OptimizerProfile
from lightning_osdp.core.units import UnitProfile
from lightning_osdp.engine import FSDP2, GatherRule
from lightning_osdp.engine.layout import Layout
from lightning_osdp.engine.live_parts import LiveParts
from lightning_osdp.engine.schedule import Host


@dataclass(frozen=True, kw_only=True)
class FSDP1(FSDP2):
    """Units are flat tensors, wrapped one inside the other; of settings, only those of prefetching all units count.

    Where communication overlaps computing, a gather after a unit's backward (``post``) runs as early as one before it
    (``pre``), as the host is ahead of the device, and holds one unit less.
    """

    prefetches: ClassVar[tuple[str, ...]] = ("pre", "post", "none")
    host: ClassVar[type[Host]] = FSDP1Host
    reader: ClassVar[type[LiveParts]] = FSDP1LiveParts

    @property
    @override
    def gathers_wait_for(self) -> GatherRule:
        """``_FreeEventQueue`` of torch/distributed/fsdp/_limiter_utils.py."""
        return "frees"

    @property
    @override
    def most_lingering(self) -> int:
        """The gathered unit is the buffer."""
        return 0

    @override
    def keeps(self, mode: ShardingMode, world_size: int) -> bool:
        return mode.resident and world_size > 1  # on one rank it does not shard

    @override
    def may_wait(self, unit: UnitProfile) -> bool:
        return True

    @override
    def num_all_gathers(
        self, mode: ShardingMode, unit: UnitProfile | None = None, *, num_micro_batches: int = 1
    ) -> int:
        """A unit that frees its parameter after forward gathers it again at every call, also of a forward in backward.

        Backward gathers it once, because FSDP1 reshards only after the last of the gradients
        (``_runtime_utils._post_backward_hook``).
        """
        if mode.resident and mode.sync == "last":
            return 1
        num_calls = 1 if mode.resident or unit is None else len(unit.calls) + unit.num_reruns
        return num_micro_batches * (num_calls + mode.backward_all_gathers)

    @override
    def all_gather_bytes(self, unit: UnitProfile, num_shards: int) -> float:
        return unit.gathered_bytes

    @override
    def reduce_scatter_bytes(self, unit: UnitProfile, num_shards: int) -> float:
        """Of the whole flat parameter once any of it is trainable."""
        return unit.gathered_bytes if unit.gradient_bytes else 0

    @override
    def layout(
        self,
        units: Sequence[UnitProfile],
        optimizer: OptimizerProfile,
        shards: int | Sequence[int],
        *,
        rank: int | None = None,
    ) -> Layout:
        (number,) = {shards} if isinstance(shards, int) else set(shards)
        return layout(tuple(units), optimizer, number, rank)
