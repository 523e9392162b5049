"""Changes beside the plan that the simulator says are worth it, each with its number.

All but what is changed stays as planned, so nothing is searched: what a plan made for the change would save is at least
that. Memory that comes free goes to what saves most seconds for a byte, as far as the simulated step fits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import inf
from typing import NamedTuple

from lightning_osdp.core.axes import STATIONARY, freed_and_kept
from lightning_osdp.core.cluster import Cluster
from lightning_osdp.core.plans.parts import Block, Unit
from lightning_osdp.core.plans.plan import Plan
from lightning_osdp.core.profile import CHUNKS, ModelProfile, in_chunks
from lightning_osdp.core.text.byte_size import format_at_least, format_bytes
from lightning_osdp.core.text.duration import format_seconds
from lightning_osdp.planner.scheduler import WORTH_MOVING_ACTIVATIONS, moving_operators
from lightning_osdp.planner.simulation import StepEstimate, simulate

WORTH = 0.02
"""Fraction of the seconds of a step that a change must save."""
WORTH_ANOTHER_BATCH = 0.1
"""Fraction of the seconds of a sample that a change must save where the samples of an optimizer step change with it."""
DOMINANT = 0.5
"""Fraction of the peak above which activations are to be looked at."""
_LEAST_MORE = 1.1
"""Times the limit that must be free for a larger one: less is for what no plan counts."""
_MOST_DOUBLINGS = 11
"""Doublings of the micro-batch that are tried."""


@dataclass(frozen=True, kw_only=True)
class Advice:
    """A change that is worth it."""

    change: str
    """Option that is changed: ``memory_limit``, ``loss``, ``activations``, ``modes``, ``micro-batches`` or
    ``batch_size``."""
    sentence: str
    saves: float
    """Fraction of the seconds for a sample; of ``activations`` that cannot be recomputed yet, what any memory saves."""


def advise(plan: Plan, profile: ModelProfile, cluster: Cluster) -> list[Advice]:
    """Changes that would make steps faster by 2%, as far as simulated ones tell.

    Each is one change beside the plan, with all else as planned. A micro-batch that changes the global
    batch must save 10% of the time of a sample, and operators that move activations 20% of a step.

    Args:
        plan: that is used.
        profile: of its model.
        cluster: of as many ranks.

    Raises:
        PlanMismatchError: the plan is for another model or another number of ranks.
    """
    case = _Case(plan, profile, cluster, simulate(plan, profile, cluster))
    if not case.step.time_s:
        return []
    found = (
        _larger_limit,
        _loss_in_chunks,
        _given_blocks,
        _recompute,
        _moving_activations,
        _other_micro_batches,
        _larger_micro_batch,
    )
    return [advice for look in found for advice in look(case)]


@dataclass(frozen=True)
class _Case:
    plan: Plan
    profile: ModelProfile
    cluster: Cluster
    step: StepEstimate

    def simulated(self, plan: Plan) -> StepEstimate:
        return simulate(plan, self.profile, self.cluster)

    def saves(self, other: Plan, step: StepEstimate) -> float:
        """Fraction of the seconds for a sample."""
        before, after = (each.micro_batch_size * each.num_micro_batches for each in (self.plan, other))
        return 1 - (step.time_s / after) / (self.step.time_s / before)

    def keeping_more(self, limit_bytes: float) -> tuple[Plan, StepEstimate]:
        """The plan with as much kept as fits, and its step; itself where nothing does."""
        moves = sorted(_moves(self.plan), key=lambda move: move.bytes_per_s)
        best, fits, fails, number = (self.plan, self.step), 0, len(moves) + 1, len(moves)
        while fails - fits > 1:
            plan = self.plan
            for move in moves[:number]:
                plan = _moved(plan, move.changed)
            step = self.simulated(plan)
            if step.peak.peak_bytes <= limit_bytes:
                best, fits = (plan, step), number
            else:
                fails = number
            number = (fits + fails) // 2
        return best


class _Move(NamedTuple):
    """Change by which a unit or a block keeps more for the sake of time."""

    changed: Unit | Block
    """Unit or block as it would be; a block would keep what it saves."""
    bytes_per_s: float


def _moves(plan: Plan) -> Iterator[_Move]:
    """Things that could be kept and are not: parameters, as units' menus price them, and what blocks save."""
    for unit in plan.units if plan.world_size > 1 else ():
        changed = replace(unit, treatments=(freed_and_kept(unit.treatments[0])[1],) * unit.num_slices)
        more_s, more_bytes = changed.cost().beyond(unit.cost())
        if more_s < 0 and changed.modes[0] in plan.search_space.offered_modes:
            yield _Move(changed, more_bytes / -more_s)
    for block in plan.blocks if not plan.given_blocks else ():
        if block.costs_s > 0:
            yield _Move(block, block.frees_bytes / block.costs_s)


def _moved(plan: Plan, changed: Unit | Block) -> Plan:
    if isinstance(changed, Block):
        return replace(plan, blocks=tuple(block for block in plan.blocks if block.name != changed.name))
    return replace(plan, units=tuple(changed if unit.name == changed.name else unit for unit in plan.units))


def _larger_limit(case: _Case) -> Iterator[Advice]:
    free_bytes = case.cluster.memory_bytes
    if free_bytes is not None and free_bytes < _LEAST_MORE * case.plan.memory_limit_bytes:
        return
    plan, step = case.keeping_more(inf if free_bytes is None else free_bytes)
    saves = case.saves(plan, step)
    if saves >= WORTH and step.peak.peak_bytes > case.plan.memory_limit_bytes:
        had = "" if free_bytes is None else f"; {format_bytes(free_bytes)} were free"
        yield Advice(
            change="memory_limit",
            sentence=f'memory_limit="{format_at_least(step.peak.peak_bytes)}" {_told(case, step, saves)}:'
            f" {_kept(case.plan, plan)}{had}",
            saves=saves,
        )


def _loss_in_chunks(case: _Case) -> Iterator[Advice]:
    chunked = replace(case, profile=in_chunks(case.profile))
    chunked = replace(chunked, step=chunked.simulated(case.plan))
    less_bytes = case.step.peak.peak_bytes - chunked.step.peak.peak_bytes
    plan, step = chunked.keeping_more(case.plan.memory_limit_bytes)
    saves = case.saves(plan, step)
    if saves >= WORTH and case.simulated(plan).peak.peak_bytes > case.plan.memory_limit_bytes:
        share = less_bytes / case.step.peak.peak_bytes
        yield Advice(
            change="loss",
            sentence=f"logits and loss in {CHUNKS} chunks, as by chunked_cross_entropy, take {format_bytes(less_bytes)}"
            f" ({share:.1%}) off the peak, for which {_kept(case.plan, plan)}: that {_told(case, step, saves)}",
            saves=saves,
        )


def _given_blocks(case: _Case) -> Iterator[Advice]:
    """Advice where blocks recompute though there is room for what they save."""
    if not case.plan.given_blocks:
        return
    space = replace(case.plan.search_space, activations=("keep", "recompute"))
    free = replace(case, plan=replace(case.plan, search_space=space))
    plan, step = free.keeping_more(case.plan.memory_limit_bytes)
    saves = case.saves(plan, step)
    if saves >= WORTH:
        yield Advice(
            change="activations",
            sentence=f"without activation_checkpointing_policy, {_kept(case.plan, plan)} under the same limit: that"
            f" {_told(case, step, saves)}",
            saves=saves,
        )


def _recompute(case: _Case) -> Iterator[Advice]:
    """Advice where activations take most of the memory, and no block was able to recompute them."""
    activations = case.step.peak.parts.get("activations", 0) / case.step.peak.peak_bytes
    is_offered = "recompute" in case.plan.search_space.activations
    can = any("recompute" in block.segments for block in case.profile.blocks)
    why_not = next((note for note in case.profile.notes if "not planned to recompute" in note), "")
    if activations <= DOMINANT or (is_offered and can) or case.plan.given_blocks:
        return
    if not is_offered:
        remedy = f"SearchSpace(activations={(*case.plan.search_space.activations, 'recompute')})"
    elif "use_cache" in why_not:
        remedy = "model.config.use_cache = False"
    elif not why_not:
        remedy = "activation_checkpointing_policy={Block}, with the class of your layers,"
    else:
        return
    saves = case.saves(*case.keeping_more(inf))
    if saves < WORTH:
        return
    yield Advice(
        change="activations",
        sentence=f"activations are {activations:.1%} of the peak, and memory would save up to {saves:.1%} of a step:"
        f" {remedy} lets blocks recompute them",
        saves=saves,
    )


def _moving_activations(case: _Case) -> Iterator[Advice]:
    """Advice to move activations of operators, each by itself, whose weights take longer."""
    modes = case.plan.offered(case.profile).offered_modes
    changed = None if STATIONARY.name in modes else moving_operators(case.plan, case.profile, case.cluster)
    if changed is None:
        return
    step = case.simulated(changed)
    saves = case.saves(changed, step)
    if saves >= WORTH_MOVING_ACTIVATIONS and step.peak.peak_bytes <= case.plan.memory_limit_bytes:
        number = sum(unit.treatments == (STATIONARY,) for unit in changed.units)
        yield Advice(
            change="modes",
            sentence=f"SearchSpace(modes={(*modes, STATIONARY.name)}) {_told(case, step, saves)}: activations of"
            f" {number} {'operator' if number == 1 else 'operators'} would move in place of weights",
            saves=saves,
        )


def _other_micro_batches(case: _Case) -> Iterator[Advice]:
    """Advice to take the same samples of a step in fewer or more micro-batches."""
    size, number = case.plan.micro_batch_size, case.plan.num_micro_batches
    samples = size * number
    divisors = [each for each in range(1, samples + 1) if samples % each == 0 and each != size]
    best = _best(case, ((each, samples // each) for each in divisors))
    if best is not None and best.saves >= WORTH:
        yield Advice(
            change="micro-batches",
            sentence=f"micro-batches of {best.size} x {best.number} in place of {size} x {number}"
            f" {_told(case, best.step, best.saves)}, peak {format_bytes(best.step.peak.peak_bytes)}, if the loss is a"
            " mean over samples",
            saves=best.saves,
        )


def _larger_micro_batch(case: _Case) -> Iterator[Advice]:
    """Advice to take more samples in a step: twice as many, or twice that, as far as they fit."""
    size, number = case.plan.micro_batch_size, case.plan.num_micro_batches
    best = _best(case, ((size * 2**power, number) for power in range(1, _MOST_DOUBLINGS)))
    if best is not None and best.saves >= WORTH_ANOTHER_BATCH:
        yield Advice(
            change="batch_size",
            sentence=f"batch_size={best.size} in place of {size} takes {best.saves:.1%} less time for a sample, peak"
            f" {format_bytes(best.step.peak.peak_bytes)}, but changes the global batch",
            saves=best.saves,
        )


class _InMicroBatches(NamedTuple):
    size: int
    number: int
    step: StepEstimate
    saves: float


def _best(case: _Case, micro_batches: Iterable[tuple[int, int]]) -> _InMicroBatches | None:
    """The fastest of these, by size upwards, that fits."""
    found = []
    for size, number in micro_batches:
        plan = replace(case.plan, micro_batch_size=size, num_micro_batches=number)
        step = case.simulated(plan)
        if step.peak.peak_bytes > plan.memory_limit_bytes:
            break  # larger ones take more
        found.append(_InMicroBatches(size, number, step, case.saves(plan, step)))
    return max(found, key=lambda each: each.saves, default=None)


def _told(case: _Case, step: StepEstimate, saves: float) -> str:
    return f"saves {saves:.1%} of a step ({format_seconds(case.step.time_s)} to {format_seconds(step.time_s)})"


def _kept(before: Plan, after: Plan) -> str:
    """Words for what is kept that was not: ``3 more units stay gathered and 2 more blocks keep activations``."""
    units = sum(unit != other for unit, other in zip(before.units, after.units, strict=True))
    blocks = len(before.blocks) - len(after.blocks)
    told = [f"{units} more {'unit stays' if units == 1 else 'units stay'} gathered"] if units else []
    told += [f"{blocks} more {'block keeps' if blocks == 1 else 'blocks keep'} activations"] if blocks else []
    return " and ".join(told)
