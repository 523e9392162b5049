"""A plan in ten lines."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from lightning_osdp.core.text.byte_size import format_bytes
from lightning_osdp.core.text.duration import format_seconds, three_digits

if TYPE_CHECKING:
    from lightning_osdp.core.plans.plan import Plan


def summary(plan: Plan) -> str:
    """What the plan is for, decides and predicts; `lightning-osdp show` prints its units, too."""
    limit = format_bytes(plan.memory_limit_bytes)
    samples = plan.micro_batch_size * plan.num_micro_batches * plan.world_size
    if plan.step_time_s > 0:
        share = plan.peak_bytes / plan.memory_limit_bytes
        memory = f"{format_bytes(plan.peak_bytes)} of {limit} ({share:.1%}) predicted per rank"
        step = f"{format_seconds(plan.step_time_s)} predicted, {three_digits(plan.samples_per_s)} samples/s"
        gap = f"{plan.gap:.2%} at most to the fastest plan in the search space"
    else:
        memory, step, gap = f"not predicted; the limit is {limit}", "not predicted", "not predicted"
    gain = (
        f"{plan.predicted_gain:.3f} times the samples/s of plain FSDP" if plan.all_zdp_step_time_s else "not predicted"
    )
    lines = {
        "units": _counted(" + ".join(dict.fromkeys(unit.modes)) for unit in plan.units if unit.name),
        "blocks": _counted(block.activations for block in plan.blocks) if plan.blocks else "all keep what they save",
        "prefetch": f"backward {plan.backward_prefetch}, forward {'next' if plan.forward_prefetch else 'none'}",
        "batch": f"{plan.micro_batch_size} x {plan.num_micro_batches} x {plan.world_size} = {samples} samples a step",
        "memory": memory,
        "peak": f"{plan.peak_phase} {plan.peak_operator}".strip() or "not known",
        "step": step,
        "gain": gain,
        "gap": gap,
    }
    ranks = "one rank" if plan.world_size == 1 else f"{plan.world_size} ranks"
    if plan.node_size is not None:
        ranks += f" in nodes of {plan.node_size}"
    return "\n".join([f"OSDP plan for {ranks}", *(f"{name:9}{text}" for name, text in lines.items())])


def _counted(names: Iterable[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(Counter(names).items())) or "the root alone"
