"""The simulator: one optimizer step of a plan, event by event, without a device.

`simulate` goes through a plan; `simulate_step` through any choice of modes. Both are pure and know no torch.
"""

from lightning_osdp.planner.simulation.clock import StepClock
from lightning_osdp.planner.simulation.plan import planned_activations, planned_step, simulate
from lightning_osdp.planner.simulation.step import StepEstimate, seconds_by_link, simulate_step
from lightning_osdp.planner.simulation.timeline import Interval

__all__ = [
    "Interval",
    "StepClock",
    "StepEstimate",
    "planned_activations",
    "planned_step",
    "seconds_by_link",
    "simulate",
    "simulate_step",
]
