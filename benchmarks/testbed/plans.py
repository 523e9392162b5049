"""Plans written down instead of searched: any units, any modes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from torch import nn

from lightning_osdp import Cluster, ModelProfile, simulate
from lightning_osdp.core.axes import named
from lightning_osdp.core.batch_policy import largest_fitting
from lightning_osdp.core.plans.parts import Unit
from lightning_osdp.core.plans.plan import Plan
from lightning_osdp.planner.engine import effects_of, planned_collectives
from lightning_osdp.profiler import fingerprint


def plan_of(
    module: nn.Module,
    modes: Mapping[str, str | tuple[str, ...]],
    *,
    world_size: int,
    micro_batch_size: int,
    num_micro_batches: int = 1,
    node_size: int | None = None,
    backward_prefetch: str = "pre",
    forward_prefetch: bool = False,
    asynchronous_unshard: bool = True,
) -> Plan:
    """A plan that predicts nothing, with one unit at each named module and the root around them.

    Args:
        module: the unwrapped model.
        modes: qualified name of a module -> its mode, or the modes of its slices, in forward order; without an entry
            the root is ``"DP"``.
        world_size: N.
        micro_batch_size: samples per rank and micro-batch.
        num_micro_batches: per optimizer step.
        node_size: ranks of a node; None: all are in one.
        backward_prefetch: ``"pre"`` or ``"none"``.
        forward_prefetch: whether forward gathers the next unit before one runs.
        asynchronous_unshard: whether computing may go on during all-gathers.
    """
    held: dict[str, list[str]] = {"": [], **{name: [] for name in modes}}
    names = (name for name, _ in module.named_parameters(remove_duplicate=False))  # tied ones are two operators'
    for operator in dict.fromkeys(name.rpartition(".")[0] for name in names):
        unit = operator
        while unit not in held:
            unit = unit.rpartition(".")[0]
        held[unit].append(operator)
    return Plan(
        fingerprint=fingerprint(module),
        world_size=world_size,
        units=tuple(
            Unit(name=unit, operators=tuple(operators), kind="", treatments=named(*_of_slices(modes.get(unit, "DP"))))
            for unit, operators in held.items()
        ),
        memory_limit_bytes=2**62,
        peak_bytes=0,
        micro_batch_size=micro_batch_size,
        num_micro_batches=num_micro_batches,
        node_size=node_size,
        step_time_s=0.0,
        samples_per_s=0.0,
        gap=0.0,
        backward_prefetch=backward_prefetch,
        forward_prefetch=forward_prefetch,
        asynchronous_unshard=asynchronous_unshard,
    )


def sent_bytes(plan: Plan, *, scatters_round: bool = False) -> float:
    """Bytes that a node sends to others in an optimizer step; where there are no nodes, a rank.

    On N ranks in nodes of m, where an all-gather over all ranks goes round the ring, one rank of a node has its next
    one elsewhere: the node sends (N-1)/N of a unit's S bytes, as each rank does. In a reduce-scatter each rank sends
    its part to each other one: m (N-m)/N of S together, or as an all-gather does where ``scatters_round``. In an
    all-reduce of S/m between nodes each of m ranks sends: 2 (1 - m/N) S together. Collectives over all ranks, with
    gradients reduced in the last of K micro-batches:

        ZDP   2 K all-gathers and a reduce-scatter
        hpZ     K              and a reduce-scatter
        DP        an all-gather and a reduce-scatter
        HSDP, HDP   1 all-reduce between nodes
        replicated  2 all-gathers, which are an all-reduce over all ranks

    Exchanges of activations count as one rank sends them: ranks of a node together send more of an all-to-all. Nothing
    counts that `lightning_osdp.planner.engine.planned_collectives` leaves out.
    """
    sent, ranks = 0.0, plan.world_size
    node_size = plan.node_size or 1
    for unit in plan.units:
        if any(effects_of(mode).exchanges for mode in unit.treatments):
            sent += unit.exchanged_bytes
        for collective, number, whole_bytes in planned_collectives(unit, plan.num_micro_batches):
            if collective.link == "all":
                is_sum = collective.operation == "all_reduce"
                held_by = 1 if collective.over == "all" else plan.node_size or ranks
                times = 2 * (1 - held_by / ranks) if is_sum else 1 - 1 / ranks
                if collective.operation == "reduce_scatter" and not scatters_round:
                    times = node_size * (1 - node_size / ranks)
                sent += number * times * whole_bytes
    return sent


def largest_that_fits(plan: Plan, profile: ModelProfile, cluster: Cluster, *, limit_bytes: int) -> Plan | None:
    """The plan at its best micro-batch, which is the largest that fits; None where not even one sample does.

    Every duration is affine in the samples, with no negative part, and a step's is made of them by sums and maxima: the
    time of a sample falls as there are more of them.
    """

    def fits(size: int) -> bool:
        return simulate(replace(plan, micro_batch_size=size), profile, cluster).peak.peak_bytes <= limit_bytes

    largest = largest_fitting(fits)
    return replace(plan, micro_batch_size=largest) if largest else None


def _of_slices(modes: str | tuple[str, ...]) -> tuple[str, ...]:
    return (modes,) if isinstance(modes, str) else modes
