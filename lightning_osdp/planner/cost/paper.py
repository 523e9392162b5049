"""The paper's own cost model: seconds and bytes add up over operators, nothing overlaps, nothing else counts.

Seconds are equation 2: collectives and computing, without the runtime's overhead and the optimizer step. Bytes are
those of model states and saved tensors at the end of forward:

    memory(x) = sum_u ( m_ZDP,u  +  x_u (m_DP,u - m_ZDP,u) )        x_u = 1 where unit u is DP

So the peak has one moment, at which all units are freed but those that are kept.

References:
    OSDP (Jiang et al. 2022), equations 1 and 2, appendix B. Its "others", temporaries of one operator, are left out.
"""

from __future__ import annotations

from lightning_osdp.core.axes import DP, ZDP, Treatment
from lightning_osdp.core.step import Step
from lightning_osdp.core.units import UnitProfile
from lightning_osdp.planner.cost.peak_memory import StepMemory
from lightning_osdp.planner.engine import Moment, effects_of, leaving_order

PAPER_TERMS = ("communication", "compute")
"""Terms of `cost.TERMS` that the paper adds up."""


def model_states_bytes(unit: UnitProfile, mode: Treatment, world_size: int) -> float:
    """Bytes of parameters, gradients and optimizer state on one rank.

        m_ZDP = (parameters + gradients + optimizer) / N
        m_DP  = parameters + (gradients + optimizer) / N

    The paper's text has everything of a DP operator whole; its code, and FSDP's ``SHARD_GRAD_OP``, keep only the
    parameter whole.

    References:
        OSDP (Jiang et al. 2022), appendix B (profiler), with the deviation above.
    """
    sharded = unit.trainable_bytes + unit.optimizer_bytes
    if effects_of(mode).is_kept:
        return unit.gathered_bytes + sharded / world_size
    return (sharded + unit.parameter_bytes) / world_size


def paper_memory(step: Step) -> StepMemory:
    """Bytes as the paper adds them up, for any choice of modes; the root unit is DP in all of them."""
    units, world_size = step.units, step.cluster.world_size
    sharded, whole = ([model_states_bytes(unit, mode, world_size) for unit in units] for mode in (ZDP, DP))
    order = leaving_order(units)
    states = sum(whole[index] if unit.is_root else sharded[index] for index, unit in enumerate(units))
    saved = step.profile.saved_bytes.at(step.workload.micro_batch_size)
    moment = Moment(
        num_bytes=states + saved,
        phase="all phases",
        operator="",
        parts={"model states": states, "activations": saved},
    )
    return StepMemory(
        order=order,
        # in half precision the gathered parameters may be smaller than the shard at rest
        gathered_bytes=tuple(max(0.0, whole[unit] - sharded[unit]) for unit in order),
        shared_bytes=(0.0,) * len(order),  # shards are not among them
        whole_bytes=tuple(
            max(0.0, units[unit].gradient_bytes - units[unit].trainable_bytes / world_size) for unit in order
        ),
        saved_bytes=({},) * len(order),
        largest_bytes={len(order): moment.num_bytes},
        moment=lambda _: moment,
    )
