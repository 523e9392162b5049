"""Sharding modes as data: which collectives each one issues, and what it keeps whole."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ShardingMode:
    """How one unit's parameters are treated within a micro-batch (OSDP, figure 1).

    In every mode parameters, reduced gradients and optimizer state are sharded *between* optimizer steps; modes
    differ in how long the gathered parameter lives and in the collectives that this takes.
    """

    name: str
    resident: bool
    """Whether the gathered parameter stays whole from the unit's forward to the end of its backward."""
    backward_all_gathers: int
    """All-gathers of the unit's parameters in one backward."""
    reduce_scatters: int = 1
    """Reduce-scatters of the unit's gradients per synchronised micro-batch."""

    def num_all_gathers(self, num_calls: int = 1) -> int:
        """All-gathers per micro-batch of a unit that forward calls ``num_calls`` times.

        A unit that frees its parameter after forward gathers it again at every call; backward gathers it once,
        because FSDP1 reshards only after the last of the gradients (``_runtime_utils._post_backward_hook``).
        """
        return (1 if self.resident else num_calls) + self.backward_all_gathers


ZDP = ShardingMode("ZDP", resident=False, backward_all_gathers=1)
"""Freed after forward, gathered again for backward: FSDP1's ``FULL_SHARD``."""

DP = ShardingMode("DP", resident=True, backward_all_gathers=0)
"""Gathered once, kept from forward to the end of its backward: FSDP1's ``SHARD_GRAD_OP``."""

MODES = {mode.name: mode for mode in (ZDP, DP)}
"""Every mode by name, in the order in which it is offered to the search: least memory first."""
