"""The cost model: pure functions from (unit, mode, cluster, workload, engine) to seconds, and from a step to bytes.

`TERMS` lists the seconds that add up over units; `step_memory` is the closed form of the peak for any choice of modes.
"""

from lightning_osdp.core.step import Workload
from lightning_osdp.planner.cost.between_steps import evaluation_peak, saving_peak
from lightning_osdp.planner.cost.moments import LargestMoments
from lightning_osdp.planner.cost.paper import PAPER_TERMS, paper_memory
from lightning_osdp.planner.cost.peak_memory import (
    Held,
    PeakMemory,
    StepMemory,
    block_copied_bytes,
    exact_moments,
    exact_peak,
    host_bytes,
    host_bytes_ahead,
    key_of_moments,
    peak_bytes_of,
    saved_bytes,
    step_memory,
)
from lightning_osdp.planner.cost.terms import (
    TERMS,
    HostUpdate,
    apart_s,
    block_s,
    collective_s,
    copied_out_s,
    copied_s,
    copies_s,
    exchanged_bytes,
    host_updates,
    more_optimizer_s,
    optimizer_s,
    overhead_part_s,
    overhead_s,
    resource_s,
    unit_s,
    update_s,
)

__all__ = [
    "PAPER_TERMS",
    "TERMS",
    "Held",
    "HostUpdate",
    "LargestMoments",
    "PeakMemory",
    "StepMemory",
    "Workload",
    "apart_s",
    "block_copied_bytes",
    "block_s",
    "collective_s",
    "copied_out_s",
    "copied_s",
    "copies_s",
    "evaluation_peak",
    "exact_moments",
    "exact_peak",
    "exchanged_bytes",
    "host_bytes",
    "host_bytes_ahead",
    "host_updates",
    "key_of_moments",
    "more_optimizer_s",
    "optimizer_s",
    "overhead_part_s",
    "overhead_s",
    "paper_memory",
    "peak_bytes_of",
    "resource_s",
    "saved_bytes",
    "saving_peak",
    "step_memory",
    "unit_s",
    "update_s",
]
