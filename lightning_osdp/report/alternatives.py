"""Why a unit is as it is: the step simulated with the unit treated in every other way, and all else as planned."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from lightning_osdp.core.axes import KEEP, Treatment, freed_and_kept
from lightning_osdp.core.cluster import Cluster
from lightning_osdp.core.plans.parts import Block, Unit
from lightning_osdp.core.plans.plan import Plan
from lightning_osdp.core.plans.search_space import SearchSpace
from lightning_osdp.core.profile import ModelProfile
from lightning_osdp.core.slices import slice_names
from lightning_osdp.core.text.byte_size import format_bytes
from lightning_osdp.core.text.duration import format_seconds
from lightning_osdp.core.text.names import is_inside
from lightning_osdp.core.text.nearest import nearest
from lightning_osdp.errors import ConfigurationError
from lightning_osdp.planner.assign import applicable
from lightning_osdp.planner.engine import effects_of, engine_of
from lightning_osdp.planner.simulation import planned_activations, planned_step, simulate
from lightning_osdp.report.sentences import name_saves, name_treatment


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """A simulated step in which one unit is treated like this."""

    name: str
    """Modes, and what else departs from plain FSDP: ``DP, sync last, recompute``."""
    modes: tuple[str, ...]
    """Modes of the unit, one per slice."""
    sync: str
    """Micro-batches that reduce the unit's gradients: ``every`` or ``last``."""
    activations: str
    """Value of ``saves`` of the operator's block."""
    step_time_s: float
    """Seconds of one optimizer step."""
    peak_bytes: int
    """Exact peak of one rank."""
    spare_bytes: int
    """Bytes that the limit leaves; below 0 where it does not fit."""
    is_offered: bool
    """True where the plan's search space has it."""


@dataclass(frozen=True, kw_only=True)
class Alternatives:
    """Ways to treat the unit that holds one operator."""

    operator: str
    unit: str
    unit_operators: tuple[str, ...]
    block: str
    """Module around the operator that may recompute or offload; the empty string where there is none."""
    planned: Alternative
    others: tuple[Alternative, ...]
    """Alternatives to the planned one, the fastest first."""

    def why(self) -> str:
        """One sentence: what speaks against the others."""
        if not self.others:
            return "There is no other way: the root unit is never freed, and with one rank modes make no difference."
        faster = [other for other in self.others if other.step_time_s < self.planned.step_time_s * (1 - 1e-9)]
        fitting = [other for other in faster if other.spare_bytes >= 0]
        if not faster:
            return f"No other way is faster; {format_bytes(self.planned.spare_bytes)} are left under the limit."
        best = (fitting or faster)[0]
        saved = f"would save {format_seconds(self.planned.step_time_s - best.step_time_s)} a step"
        if fitting and not best.is_offered:
            return f"{best.name} {saved} and fit, but is not in the search space of the plan."
        if fitting:
            return f"{best.name} {saved} and fit, with everything else as planned: plan anew."
        return f"{best.name} {saved}, but takes {format_bytes(-best.spare_bytes)} more than the limit."


def find_alternatives(plan: Plan, profile: ModelProfile, cluster: Cluster, operator: str) -> Alternatives:
    """Simulates the step of a plan with one unit treated in each way that there is, and all else as planned.

    Blocks may keep what they save, recompute, and do what the plan's search space offers or any of its blocks does.

    Args:
        plan: to look into.
        profile: of its model.
        cluster: of as many ranks.
        operator: name of an operator, of a unit, or of a module whose operators are in one unit.

    Raises:
        ConfigurationError: the plan has no such operator; the text has the nearest names.
        PlanMismatchError: the plan is for another model or another number of ranks.
    """
    unit, space = _unit_of(plan, operator), plan.offered(profile)
    profile = space.of(profile)
    blocks = [block for block in profile.blocks if is_inside(operator, [block.name])]
    block = blocks[0].name if blocks else ""
    planned = planned_activations(plan, profile).get(block, KEEP)
    # frozen units have states on the device
    states = {*space.states, *(each["states"] for each in unit.treatments)}
    shards = {*space.shards, *(each["shard"] for each in unit.treatments)}
    usual = {*SearchSpace().saves, *space.saves, *(each.activations for each in plan.blocks)}
    choices = [KEEP, *(choice for choice in blocks[0].segments if choice in usual)] if blocks else [KEEP]

    def simulated(changed: Unit, choice: str) -> Alternative:
        units = tuple(changed if each is unit else each for each in plan.units)
        others = tuple(each for each in plan.blocks if each.name != block)
        treatment = Treatment(saves=choice)
        kept = blocks[0].levels[choice].kept if blocks and choice in blocks[0].levels else ()
        own = Block(name=block, treatment=treatment, kept=kept)
        chosen = (*others, own) if treatment else others
        estimate = simulate(replace(plan, units=units, blocks=chosen), profile, cluster)
        words = [*name_treatment(changed).split("\n"), name_saves(own)]
        return Alternative(
            name=", ".join(words if treatment else words[:-1]),
            modes=changed.modes,
            sync=changed.sync,
            activations=choice,
            step_time_s=estimate.time_s,
            peak_bytes=estimate.peak.peak_bytes,
            spare_bytes=plan.memory_limit_bytes - estimate.peak.peak_bytes,
            is_offered={*changed.modes} <= {*space.offered_modes}
            and changed.sync in space.sync
            and {each["states"] for each in changed.treatments} <= states
            and {each["shard"] for each in changed.treatments} <= shards
            and choice in space.saves,
        )

    ways = product(_treatments(plan, unit, profile, cluster), choices)
    others = [simulated(*way) for way in ways if way != (unit, planned) and _goes_together(*way)]
    return Alternatives(
        operator=operator,
        unit=unit.name,
        unit_operators=unit.operators,
        block=block,
        planned=simulated(unit, planned),
        others=tuple(sorted(others, key=lambda each: each.step_time_s)),
    )


def _goes_together(unit: Unit, choice: str) -> bool:
    """Tells if the unit can be treated so where its block does this: what runs again moves no activations."""
    return choice == KEEP or not effects_of(unit.treatments[0]).exchanges


def _unit_of(plan: Plan, operator: str) -> Unit:
    found = {unit.name: unit for unit in plan.units}
    found |= {name: unit for unit in plan.units for name in unit.operators}
    around = [unit for unit in plan.units if any(is_inside(name, [operator]) for name in unit.operators)]
    if operator not in found and len(around) == 1:
        return around[0]
    if operator not in found:
        hint = nearest(operator, found, "`lightning-osdp show` lists them.")
        raise ConfigurationError(f"Expected an operator of the plan, got {operator!r}. {hint}")
    return found[operator]


def _treatments(plan: Plan, unit: Unit, profile: ModelProfile, cluster: Cluster) -> Iterator[Unit]:
    """The unit in every treatment that applies to it; of slices, in each number of them that are kept."""
    step, _ = planned_step(plan, profile, cluster)
    first, *_ = slice_names(unit.name, unit.num_slices)
    (of,) = (each for each in step.units if each.name == first)
    treatments = applicable(of, step, engine_of(plan))
    if not treatments:
        yield unit
    elif unit.num_slices == 1:
        yield from (replace(unit, treatments=(each,)) for each in treatments)
    else:
        shared = dict.fromkeys(each.of_all_slices for each in treatments)
        for each, num_kept in product(shared, range(unit.num_slices + 1)):
            yield replace(unit, treatments=_keeping(unit.treatments, each, num_kept))


def _keeping(planned: tuple[Treatment, ...], shared: Treatment, num_kept: int) -> tuple[Treatment, ...]:
    """Treatments with so many slices kept: of the planned ones the first, and then of the others the first."""
    kept_first = sorted(range(len(planned)), key=lambda index: not effects_of(planned[index]).is_kept)
    freed, kept = freed_and_kept(shared)
    return tuple(kept if index in kept_first[:num_kept] else freed for index in range(len(planned)))
