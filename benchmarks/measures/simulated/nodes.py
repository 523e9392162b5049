"""Llama-like models on nodes of GPUs, simulated: OSDP beside what people choose by hand, for the same global batch."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, TypeAlias

import torch
from rich.table import Table
from torch.optim import AdamW

from benchmarks.measures.section import Row, Section, Target
from benchmarks.measures.simulated.models import LanguageModel, Sizes
from lightning_osdp import InfeasibleError, Machine, ModelProfile, SearchSpace, make_plan, simulate
from lightning_osdp.core.batch_policy import BatchPolicy, samples_of_rank
from lightning_osdp.core.text.byte_size import format_bytes
from lightning_osdp.core.text.duration import format_seconds, three_digits
from lightning_osdp.planner.scheduler import made_by_hand
from lightning_osdp.profiler.without_weights import DescribedModel
from lightning_osdp.report.sentences import tell_kept

SEQUENCE = 4096
"""Tokens of a sample."""
_LLAMA = partial(Sizes, kind="llama", kv_heads=8)
MODELS = {
    "8B": _LLAMA(layers=32, hidden=4096, heads=32, ffn=14336, vocabulary=128256),
    "70B": _LLAMA(layers=80, hidden=8192, heads=64, ffn=28672, vocabulary=128256),
    "tiny": _LLAMA(layers=2, hidden=64, heads=8, ffn=128, vocabulary=256),
}
"""Models of Llama 3.1, and one for a test."""
MACHINES = ("8 rtx-4090", "2x8 a100-80, 100gbit", "4x8 h100-sxm, 8x400gbit", "16x8 h100-sxm, 8x400gbit")
"""Machines, as `Machine.parse` reads them; rates have their sources in its catalog."""
MILLIONS_OF_TOKENS = (1, 4)
OVER_ALL = "OSDP, sharded over all ranks"
SPACES = {"OSDP": SearchSpace(), OVER_ALL: SearchSpace(modes=("ZDP", "DP"))}
NOTHING = 1.02
"""Ratios below this are nothing that a simulation could tell."""
_AS_GOOD = 0.999
"""Fraction of the best by hand's samples/s: a sweep stops where no size can be better by more than a thousandth."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model on a machine, with a global batch."""

    model: str
    machine: str
    global_batch: int
    """Samples of all ranks in an optimizer step."""

    def __str__(self) -> str:
        """Text of the case in a line of progress."""
        return f"{self.model} on {self.machine}, {self.global_batch} samples"


def cases() -> list[Case]:
    """Every model on every machine with each global batch."""
    return [
        Case(model=model, machine=machine, global_batch=millions * 2**20 // SEQUENCE)
        for machine in MACHINES
        for model in ("8B", "70B")
        for millions in MILLIONS_OF_TOKENS
    ]


def quick_cases() -> list[Case]:
    """Case of a few seconds."""
    return [Case(model="tiny", machine="2x2 a100-80, 100gbit", global_batch=8)]


def section(chosen: Sequence[Case]) -> Section:
    """Section of these cases."""
    return Section(name="nodes", cases=chosen, measure=measure, table=table, targets=targets, misses=remarks)


def measure(case: Case) -> dict[str, Any]:
    """Predicts what everybody takes at the best division of the global batch, in bf16-mixed.

    Returns:
        The limit of a rank's memory in bytes; `HandMade` configurations; and OSDP's plans by name, of those that fit,
        with the CPU seconds of finding each.
    """
    machine = Machine.parse(case.machine)
    profile = _profile(case.model, case.machine)
    policy = BatchPolicy.divide(samples_of_rank(case.global_batch, machine.world_size, name="global_batch"))
    limit_bytes, cluster = machine.memory_bytes, machine.cluster
    by_hand = made_by_hand(profile, cluster, memory_limit_bytes=limit_bytes, policy=policy)
    plans = {}
    for name, space in SPACES.items():
        start_s = time.process_time()
        try:
            plan = make_plan(
                profile, cluster, memory_limit_bytes=limit_bytes, micro_batch_size=policy, search_space=space
            )
        except InfeasibleError:
            continue
        cpu_s, step = time.process_time() - start_s, simulate(plan, profile, cluster)
        plans[name] = {
            "micro_batch_size": plan.micro_batch_size,
            "num_micro_batches": plan.num_micro_batches,
            "samples_per_s": plan.samples_per_s,
            "step_time_s": plan.step_time_s,
            "exposed_s": step.exposed_communication_s,
            "peak_bytes": plan.peak_bytes,
            "gap": plan.gap,
            "kept": tell_kept(plan),
            "num_recomputing": len(plan.blocks),
            "cpu_s": cpu_s,
        }
    return {"limit_bytes": limit_bytes, "by_hand": [each.numbers for each in by_hand], "plans": plans}


SHOWN = Case(model="8B", machine="8 a100-40", global_batch=8)
"""Case whose memory is drawn over a step, of one sample a rank."""
_DRAWN = ("SHARD_GRAD_OP", "FULL_SHARD", "FULL_SHARD, checkpointing")
Curve: TypeAlias = Sequence[tuple[float, float]]
"""Seconds from the start of a step, and live bytes of a rank."""


def memory_over_step(case: Case) -> tuple[dict[str, Curve], int]:
    """Predicted memory of a step under what people choose by hand, and under OSDP's plan.

    Returns:
        Curves by name, those of configurations that do not fit among them, and the limit of a rank's memory in bytes.
    """
    machine = Machine.parse(case.machine)
    profile, cluster = _profile(case.model, case.machine), machine.cluster
    policy = BatchPolicy.fixed(samples_of_rank(case.global_batch, machine.world_size, name="global_batch"), 1)
    by_hand = made_by_hand(profile, cluster, memory_limit_bytes=machine.memory_bytes, policy=policy)
    plans = {each.name: each.plan for each in by_hand if each.name in _DRAWN}
    best = make_plan(profile, cluster, memory_limit_bytes=machine.memory_bytes, micro_batch_size=policy)
    curves: dict[str, Curve] = {
        name: [(time_s, moment.num_bytes) for time_s, moment in simulate(plan, profile, cluster).moments]
        for name, plan in {**{name: plans[name] for name in _DRAWN}, "OSDP": best}.items()
    }
    return curves, machine.memory_bytes


@cache
def _profile(model: str, machine: str) -> ModelProfile:
    with torch.device("meta"):
        module = LanguageModel(MODELS[model], sequence=SEQUENCE)
    tokens = torch.zeros(2, SEQUENCE, dtype=torch.long)
    described = DescribedModel(
        module=module,
        batch=(tokens, tokens.clone()),
        run=module,
        optimizers=lambda module: [AdamW(module.parameters())],
    )
    return described.profile(Machine.parse(machine).rates, precision="bf16-mixed")


def best_by_hand(row: Row) -> Row | None:
    """Fastest configuration by hand that fits; None where none does."""
    found: list[Row] = [each for each in row["by_hand"] if each["fits"]]
    return found[0] if found else None


def table(rows: Sequence[Row]) -> Table:
    """One line for each that took part and fits."""
    drawn = Table("model", "machine", "batch", "who", title="Simulated: the same global batch, each at its best")
    for column in ("micro-batch", "step", "samples/s", "OSDP over it", "waiting", "gap", "peak", "planned in"):
        drawn.add_column(column, justify="right")
    drawn.add_column("between forward and backward it keeps")
    for row in rows:
        case, osdp = row["case"], row["plans"].get("OSDP")
        where = (case["model"], case["machine"], str(case["global_batch"]))
        for name, plan in row["plans"].items():
            recomputing = f", {plan['num_recomputing']} blocks recompute" if plan["num_recomputing"] else ""
            drawn.add_row(
                *where,
                name,
                *_numbers(plan, osdp),
                f"{plan['exposed_s'] / plan['step_time_s']:.1%}",
                f"{plan['gap']:.1%}",
                format_bytes(plan["peak_bytes"]),
                f"{plan['cpu_s']:.0f} s",
                plan["kept"] + recomputing,
            )
        for each in row["by_hand"]:
            if each["fits"]:
                drawn.add_row(*where, each["name"], *_numbers(each, osdp), "", "", format_bytes(each["peak_bytes"]))
        drawn.add_section()
    return drawn


def _numbers(each: Row, osdp: Row | None) -> tuple[str, ...]:
    return (
        f"{each['micro_batch_size']} x {each['num_micro_batches']}",
        format_seconds(each["step_time_s"]),
        three_digits(each["samples_per_s"]),
        "" if osdp is None else f"{osdp['samples_per_s'] / each['samples_per_s']:.3f}",
    )


def ratio(row: Row, name: str) -> float | None:
    """Samples/s over those of the best by hand; None where one of them does not fit."""
    own, other = row["plans"].get(name), best_by_hand(row)
    return None if own is None or other is None else float(own["samples_per_s"] / other["samples_per_s"])


def remarks(rows: Sequence[Row]) -> list[str]:
    """Lines on where nobody fits, where only OSDP does, and where it gains nothing."""
    lines = []
    for row in rows:
        where, gained = str(Case(**row["case"])), ratio(row, "OSDP")
        if "OSDP" not in row["plans"]:
            lines.append(f"{where}: nobody fits.")
        elif gained is None:
            lines.append(f"{where}: only OSDP fits.")
        elif gained < NOTHING:
            lines.append(f"{where}: OSDP gains nothing ({gained:.3f}).")
    return lines


def targets(rows: Sequence[Row]) -> list[Target]:
    """OSDP is nowhere predicted to be slower than what people choose by hand."""
    ratios = [found for row in rows if (found := ratio(row, "OSDP")) is not None]
    if not ratios:
        return []
    return [Target(name="OSDP: least over the best by hand", limit=_AS_GOOD, measured=min(ratios), is_least=True)]
