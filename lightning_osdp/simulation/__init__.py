"""The simulator: one optimizer step of a plan, event by event, without a device.

`simulate` goes through a plan; `simulate_step` through any choice of modes. Both are pure and know no torch.
"""

from lightning_osdp.simulation.clock import StepClock
from lightning_osdp.simulation.plan import planned_units, simulate
from lightning_osdp.simulation.step import StepEstimate, in_modes, simulate_step
from lightning_osdp.simulation.timeline import Interval

__all__ = ["Interval", "StepClock", "StepEstimate", "in_modes", "planned_units", "simulate", "simulate_step"]
