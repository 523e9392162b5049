"""Plans of assignments: the slices of an operator are one unit of a plan."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lightning_osdp.core.axes import KEEP, Treatment
from lightning_osdp.core.plans.parts import Block, Option, Unit
from lightning_osdp.core.plans.plan import Plan
from lightning_osdp.core.plans.search_space import SearchSpace
from lightning_osdp.core.profile import BlockProfile, ModelProfile, in_chunks
from lightning_osdp.core.slices import slice_names
from lightning_osdp.core.text.byte_size import format_bytes
from lightning_osdp.core.text.duration import format_seconds
from lightning_osdp.core.text.names import is_inside
from lightning_osdp.core.units import SMALL_UNIT_BYTES, UnitProfile
from lightning_osdp.planner.assign import Assignment, Modes, Setting, applicable, chosen_activations
from lightning_osdp.planner.cost import block_s, evaluation_peak, exact_peak, exchanged_bytes
from lightning_osdp.planner.cost.peak_memory import ROUNDING_BYTES
from lightning_osdp.planner.engine import effects_of, freed_bytes, leaving_order
from lightning_osdp.planner.simulation import planned_step

MAX_SIMULATED_UNITS = 200_000
"""Units in all steps that are simulated for what else units could be: about a second."""


def plan_of(
    assignment: Assignment,
    *,
    memory_limit_bytes: int,
    space: SearchSpace,
    host_limit_bytes: int | None = None,
    most_samples_per_s: float | None = None,
    **searched: Any,
) -> Plan:
    """The plan that an assignment is.

    Args:
        assignment: of modes to units.
        memory_limit_bytes: most bytes of live tensors on one rank.
        space: what it was chosen from.
        host_limit_bytes: most memory of the host that a rank may take; None: no limit.
        most_samples_per_s: what no plan exceeds; None: nothing was searched.
        searched: other fields of the plan.
    """
    setting, time_s = assignment.setting, assignment.step_time_s
    blocks, chosen = setting.unchanged.blocks, chosen_activations(setting, assignment.modes)
    recomputable = [
        _recomputing(setting, block, chosen.get(block.name, KEEP))
        for block in may_recompute(setting, assignment.modes)
        if "recompute" in space.activations and (block.name not in chosen or chosen[block.name] in block.levels)
    ]
    samples_per_s = setting.workload.num_samples * setting.cluster.world_size / time_s if time_s > 0 else 0.0
    is_searched = most_samples_per_s is not None and samples_per_s > 0
    host_bytes = setting.costs.host_bytes(assignment.modes)
    on_host = (_updated_on_host(setting, assignment.modes), _kept_on_host(setting, assignment.modes))
    notes = (*setting.profile.notes, assignment.note, _held_by_root(setting.profile, space), *on_host)
    plan = Plan(
        fingerprint=dict(setting.profile.fingerprint),
        world_size=setting.cluster.world_size,
        node_size=setting.cluster.node_size if setting.cluster.has_nodes else None,
        units=tuple(_units(setting, assignment.modes)),
        blocks=tuple(_block(setting, block, chosen[block.name]) for block in blocks if block.name in chosen),
        recomputable=tuple(block for block in recomputable if block.frees_bytes > 0),
        memory_limit_bytes=memory_limit_bytes,
        peak_bytes=assignment.peak.peak_bytes,
        micro_batch_size=setting.workload.micro_batch_size,
        num_micro_batches=setting.workload.num_micro_batches,
        step_time_s=time_s,
        samples_per_s=samples_per_s,
        gap=max(0.0, (most_samples_per_s or 0.0) / samples_per_s - 1) if is_searched else 0.0,
        search_space=space,
        cost_model=setting.cost_model,
        **dataclasses.asdict(setting.engine),
        reached=_reached(setting.units) if any(unit.modules for unit in setting.units) else (),
        peak_phase=assignment.peak.phase,
        peak_operator=assignment.peak.operator,
        peak_parts=dict(assignment.peak.parts),
        evaluation_peak_bytes=math.ceil(evaluation_peak(setting, assignment.modes, engine=setting.bytes_engine)),
        host_bytes=host_bytes,
        host_limit_bytes=host_limit_bytes if host_bytes else None,
        notes=tuple(filter(None, notes)),
        **searched,
    )
    return plan if setting.is_paper else dataclasses.replace(plan, loss_bytes=_loss_bytes(plan, setting))


def may_recompute(setting: Setting, modes: Modes) -> list[BlockProfile]:
    """Blocks that can recompute, whatever they do now: a block runs once where activations move inside."""
    in_modes = zip(setting.units, modes, strict=True)
    moving = [each.name for unit, mode in in_modes if effects_of(mode).exchanges for each in unit.operators]
    return [
        block
        for block in setting.unchanged.blocks
        if "recompute" in block.segments and not any(is_inside(name, [block.name]) for name in moving)
    ]


def _loss_bytes(plan: Plan, setting: Setting) -> int:
    """Bytes by which the peak is lower where logits and loss are in chunks."""
    whole, chunked = (
        exact_peak(*planned_step(plan, profile, setting.cluster), engine=setting.bytes_engine).peak_bytes
        for profile in (setting.unchanged, in_chunks(setting.unchanged))
    )
    return max(0, whole - chunked)


def _exchanged_bytes(setting: Setting, unit: UnitProfile, mode: Treatment) -> int:
    """Bytes that a rank sends of a unit's activations in a step; over all ranks if its weights move."""
    if unit.exchange is None:
        return 0
    effects = effects_of(mode)
    over = effects.sharded_over if effects.exchanges else "all"
    return round(exchanged_bytes(unit.exchange, setting.cluster, setting.workload, over=over))


def _units(setting: Setting, modes: Modes) -> Iterator[Unit]:
    costs, prices = setting.costs, [*_prices(setting, modes)]
    places = {unit.name: index for index, unit in enumerate(setting.units)}
    slices = {name: slice_names(name, number) for name, number in setting.decided.num_slices.items()}
    whole = {part: name for name, parts in slices.items() for part in parts}
    for unit in setting.units:
        name = whole.get(unit.name, unit.name)
        parts = slices.get(name, (name,))
        if unit.name != parts[0]:
            continue
        each = [(places[part], modes[places[part]]) for part in parts]
        yield Unit(
            name=name,
            operators=(name,) if name in slices else tuple(operator.name for operator in unit.operators),
            kind=unit.kind,
            treatments=tuple(mode.on("unit") for _, mode in each),
            modules=unit.modules,
            exchange="" if unit.exchange is None else unit.exchange.kind,
            exchanged_bytes=_exchanged_bytes(setting, unit, modes[places[unit.name]]),
            is_read=len(each) > 1 or unit.is_read,
            parameter_bytes=sum(setting.units[index].gathered_bytes for index, _ in each),
            gradient_bytes=round(
                sum(setting.engine.reduce_scatter_bytes(setting.units[index], 1) for index, _ in each)
            ),
            time_s=sum(costs.times_s[index][mode] for index, mode in each),
            menu=_menu([prices[index] for index, _ in each]),
        )


def _reached(units: Sequence[UnitProfile]) -> tuple[str, ...]:
    """Names of the units that backward comes to, in that order."""
    return tuple(
        units[unit].name for unit in reversed(leaving_order(units)) if units[unit].last >= units[unit].trained_from
    )


def _menu(slices: Sequence[Mapping[Treatment, tuple[float, float]]]) -> tuple[Option, ...]:
    """Options of a unit, from the prices of its slices."""
    ways = [way for way in slices[0] if all(way in prices for prices in slices)]
    seconds, sizes = ([sum(prices[way][i] for prices in slices) for way in ways] for i in range(2))
    return tuple(
        Option(
            treatment=way,
            more_s=each_s - min(seconds),
            more_bytes=math.ceil(num_bytes - min(sizes) - ROUNDING_BYTES),
        )
        for way, each_s, num_bytes in zip(ways, seconds, sizes, strict=True)
    )


def _prices(setting: Setting, modes: Modes) -> Iterator[dict[Treatment, tuple[float, float]]]:
    """Yields what each unit could take: seconds of a step with all other units in these modes, and bytes that it holds.

    Where communication overlaps computing, one unit of each kind is treated otherwise and the step simulated; where
    that would take too long, seconds are those of the unit if nothing overlaps.
    """
    costs, memory, places = setting.costs, setting.costs.memory, setting.costs.memory.places
    ways = []
    for unit, mode in zip(setting.units, modes, strict=True):
        others = applicable(unit, setting, setting.engine)
        ways.append(tuple(dict.fromkeys((*others, mode.on("unit")))) if others else ())
    kinds = [
        (unit.kind, unit.gathered_bytes, mode, own) for unit, mode, own in zip(setting.units, modes, ways, strict=True)
    ]
    simulates = setting.overlaps and len(modes) * sum(len(own) for *_, own in {*kinds}) <= MAX_SIMULATED_UNITS
    simulated_s: dict[object, list[float]] = {}
    for index, (kind, mode, own) in enumerate(zip(kinds, modes, ways, strict=True)):
        treatments = [way.but(saves=mode["saves"]) for way in own]
        if simulates and kind not in simulated_s:
            changed = ((*modes[:index], each, *modes[index + 1 :]) for each in treatments)
            simulated_s[kind] = [costs.step_time_s(each) for each in changed]
        seconds = simulated_s[kind] if simulates else [costs.times_s[index][each] for each in treatments]
        held = [memory.held(places[index], each) for each in treatments]
        yield {way: (each_s, sum(each)) for way, each_s, each in zip(own, seconds, held, strict=True)}


def _block(setting: Setting, block: BlockProfile, choice: str) -> Block:
    micro_batch_size, num_micro_batches = setting.workload.micro_batch_size, setting.workload.num_micro_batches
    return Block(
        name=block.name,
        treatment=Treatment(saves=choice),
        kept=block.levels[choice].kept if choice in block.levels else (),
        frees_bytes=max(0, round(freed_bytes(setting.unchanged, block, choice).at(micro_batch_size))),
        costs_s=num_micro_batches * block_s(block, choice, setting.cluster, micro_batch_size),
    )


def _recomputing(setting: Setting, block: BlockProfile, now: str) -> Block:
    """The block as one that recomputes all, with bytes and seconds beyond those of what it does now."""
    recomputing = _block(setting, block, "recompute")
    if now == KEEP:
        return recomputing
    planned = _block(setting, block, now)
    return dataclasses.replace(
        recomputing,
        frees_bytes=max(0, recomputing.frees_bytes - planned.frees_bytes),
        costs_s=max(0.0, recomputing.costs_s - planned.costs_s),
    )


def _updated_on_host(setting: Setting, modes: Modes) -> str:
    """Note on units that the host updates; empty where there are none."""
    hosted = [unit for unit, mode in enumerate(modes) if effects_of(mode).updates_on_host]
    if not hosted:
        return ""
    on_device = [mode.but(states="device") for mode in modes]
    states = [setting.bytes_engine.layout_in(setting, each).optimizer_state for each in (on_device, modes)]
    own_s, device_s = map(setting.costs.step_time_s, (modes, tuple(on_device)))
    return (
        f"the host updates {len(hosted)} of {sum(unit.gradient_bytes > 0 for unit in setting.units)} units:"
        f" {format_bytes(round(states[0] - states[1]))} of states per rank are in its memory, and a step takes"
        f" {format_seconds(max(0.0, own_s - device_s))} more"
    )


def _kept_on_host(setting: Setting, modes: Modes) -> str:
    """Note on units whose shards are on the host; empty where there are none."""
    kept = [unit for unit, mode in enumerate(modes) if effects_of(mode).shard_on_host]
    if not kept:
        return ""
    sizes = setting.bytes_engine.layout_in(setting, modes).units
    device = tuple(mode.but(shard="device") for mode in modes)
    own_s, device_s = map(setting.costs.step_time_s, (modes, device))
    number = sum(unit.parameter_bytes > 0 for unit in setting.units)
    return (
        f"shards of {len(kept)} of {number} units, {format_bytes(round(sum(each.host_shard for each in sizes)))}"
        " per rank, are in memory of the host, from where they are copied for each all-gather: a step takes"
        f" {format_seconds(max(0.0, own_s - device_s))} more"
    )


def _held_by_root(profile: ModelProfile, space: SearchSpace) -> str:
    """Note on operators that no unit but the root can have; empty where they are small."""
    held = [operator for operator in profile if operator.name and operator.enclosing == ("",)]
    held_bytes = sum(operator.gathered_bytes for operator in held)
    if held_bytes <= (SMALL_UNIT_BYTES if space.min_unit_bytes is None else space.min_unit_bytes):
        return ""
    others = f" and {len(held) - 1} more" if len(held) > 1 else ""
    return (
        f"{held[0].name}{others} ({format_bytes(held_bytes)}) can only be in the"
        " root unit, which stays gathered: their parameters are read outside their own modules, as by a loss over"
        " self.parameters(), shared with others, or not used at all"
    )
