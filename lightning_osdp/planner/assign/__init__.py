"""One sharding mode per unit, for one micro-batch size: least predicted step time with the peak under the limit.

    minimise    sum_u time_s[u, mode_u]
    subject to  sum over the first k units of kept bytes  <=  room_k      for every k      (`cost.StepMemory`)

The constraints are nested; the solvers of `search` take one. So `solve` takes one of them at a time, which
bounds every plan from below, and `repair` makes plans of the solutions that violate another one.
"""

from lightning_osdp.planner.assign.additive import NO_GAIN, Modes
from lightning_osdp.planner.assign.assign import (
    Assignment,
    assign_modes,
    assignment_of,
    fill_spare,
)
from lightning_osdp.planner.assign.bounds import LeastSeconds, bound_in_s, bound_later_s, bound_of_larger_s
from lightning_osdp.planner.assign.menu import applicable
from lightning_osdp.planner.assign.merging.blocks import block_units, chosen_activations
from lightning_osdp.planner.assign.merging.join import apart_units, join_units, pair_units, trained_together
from lightning_osdp.planner.assign.merging.share import share_units
from lightning_osdp.planner.assign.merging.slices import ever_more_slices
from lightning_osdp.planner.assign.prefetch import as_far_as_fits, assign_ahead
from lightning_osdp.planner.assign.setting import Decided, Setting

__all__ = [
    "NO_GAIN",
    "Assignment",
    "Decided",
    "LeastSeconds",
    "Modes",
    "Setting",
    "apart_units",
    "applicable",
    "as_far_as_fits",
    "assign_ahead",
    "assign_modes",
    "assignment_of",
    "block_units",
    "bound_in_s",
    "bound_later_s",
    "bound_of_larger_s",
    "chosen_activations",
    "ever_more_slices",
    "fill_spare",
    "join_units",
    "pair_units",
    "share_units",
    "trained_together",
]
