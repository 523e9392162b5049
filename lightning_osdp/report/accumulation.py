"""What dividing an optimizer step, and reducing gradients in its last micro-batch only, cost and save: one sentence."""

from __future__ import annotations

from dataclasses import replace

from lightning_osdp.core.modes import DP
from lightning_osdp.core.plans.plan import Plan, Unit
from lightning_osdp.core.text.byte_size import format_bytes
from lightning_osdp.engine import Engine, engine_of


def wire_bytes(plan: Plan) -> float:
    """Bytes that one rank sends in an optimizer step of K micro-batches, with rings (OSDP, equation 2).

    Of a unit's S bytes each collective sends (N-1)/N, and there are

        ZDP, sync every   2 K all-gathers   K reduce-scatters
        ZDP, sync last    2 K all-gathers   1 reduce-scatter
        DP, sync every      K all-gathers   K reduce-scatters
        DP, sync last       1 all-gather    1 reduce-scatter

    Frozen units, which reduce nothing, modules that forward calls more than once, and units inside of blocks that are
    run again are counted as any other.
    """
    engine = engine_of(plan)
    sent = sum(_collectives(unit, engine, plan.num_micro_batches) * unit.parameter_bytes for unit in plan.units)
    return sent * (plan.world_size - 1) / plan.world_size


def whole_gradient_bytes(plan: Plan) -> int:
    """Bytes of gradients that are kept whole from one micro-batch to the next."""
    if plan.num_micro_batches == 1:
        return 0
    return sum(unit.parameter_bytes for unit in plan.units if unit.sync == "last")


def tell_accumulation(plan: Plan, without: Plan) -> str:
    """``b 4 -> 8, K 8 -> 4, +1.10 GiB gradients kept whole, 2.3x fewer bytes on the wire``; empty if all is equal.

    Args:
        plan: the plan in use.
        without: the user's own micro-batches, in each of which all units reduce.
    """
    changes = []
    for name, before, after in (
        ("b", without.micro_batch_size, plan.micro_batch_size),
        ("K", without.num_micro_batches, plan.num_micro_batches),
    ):
        changes += [f"{name} {before} -> {after}"] if before != after else []
    kept_bytes = whole_gradient_bytes(plan) - whole_gradient_bytes(without)
    if kept_bytes:
        changes.append(f"{'+' if kept_bytes > 0 else '-'}{format_bytes(abs(kept_bytes))} gradients kept whole")
    sent, sent_before = wire_bytes(plan), wire_bytes(without)
    if sent != sent_before and min(sent, sent_before) > 0:
        ratio = max(sent, sent_before) / min(sent, sent_before)
        changes.append(f"{ratio:.3g}x {'fewer' if sent < sent_before else 'more'} bytes on the wire")
    return ", ".join(changes)


def _collectives(unit: Unit, engine: Engine, num_micro_batches: int) -> float:
    """All-gathers and reduce-scatters of a unit in an optimizer step: of its slices, the mean."""
    modes = (unit if unit.name else replace(unit, modes=(DP.name,))).sharding_modes  # the root is never freed
    gathers = sum(engine.num_all_gathers(mode, num_micro_batches=num_micro_batches) for mode in modes)
    return gathers / len(modes) + engine.num_reduce_scatters(modes[0], num_micro_batches=num_micro_batches)
