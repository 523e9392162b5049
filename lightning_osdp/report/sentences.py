"""Sentences on a plan: which unit is treated how, why, and what that is predicted to cost.

Every reason is derived from the plan's own numbers (menus of units, the room under the limit), so that it can be given
for a plan read from a file, too.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from lightning_osdp.core.axes import NAMED_MODES, ZDP, freed_and_kept, on_device
from lightning_osdp.core.correction import Correction
from lightning_osdp.core.plans.parts import Block, Cost, Unit
from lightning_osdp.core.plans.plan import Plan
from lightning_osdp.core.profile import CHUNKS
from lightning_osdp.core.text.byte_size import format_bytes
from lightning_osdp.core.text.duration import format_seconds, three_digits
from lightning_osdp.core.text.names import fold_names, is_inside
from lightning_osdp.planner.engine import Collective, effects_of, planned_collectives

MOST_PATTERNS = 8
"""Folded names that one row spells out."""
NOT_PREDICTED = "not predicted"
ONE_RANK = "modes make no difference with one rank"
LARGE_LOSS = 0.05
"""Fraction of the peak that logits and loss must take for a line of their own."""
_TOLD = frozenset({"moves", "home", "keep", "sync"})
"""Axes that names of treatments tell, and `name_treatment` in words of its own."""
_WAYS = {
    "recompute": "recomputed in backward",
    "offload": "offloaded to host memory",
    "recompute_offload": "recomputed in backward, inputs offloaded to host memory",
}
"""Words for what a block does with activations that it does not keep."""


def is_predicted(plan: Plan) -> bool:
    """A plan that was made without a profile holds no prediction, but zeros."""
    return plan.step_time_s > 0


def group_equal(units: Sequence[Unit]) -> list[list[Unit]]:
    """Units that a reader need not tell apart, together; the same operators in other modes come next to them."""
    equal: dict[tuple[object, ...], dict[tuple[object, ...], list[Unit]]] = {}
    for unit in units:
        operators = (unit.name == "", unit.kind, unit.parameter_bytes, unit.num_slices)
        exchange = unit.exchange if effects_of(unit.treatments[0]).exchanges else ""
        treatment = (tuple(sorted(map(repr, unit.treatments))), exchange)
        equal.setdefault(operators, {}).setdefault(treatment, []).append(unit)
    return [group for treatments in equal.values() for group in treatments.values()]


def name_operators(units: Sequence[Unit]) -> str:
    """Folded names of all operators of these units."""
    names = [operator or "(itself)" for unit in units for operator in unit.operators]
    patterns = fold_names(names)
    rest = len(patterns) - MOST_PATTERNS
    text = "\n".join(patterns[:MOST_PATTERNS]) + (f"\nand {rest} more" if rest > 0 else "")
    return f"(root) {text}".rstrip() if units[0].name == "" else text


def name_units(units: Sequence[Unit], plan: Plan) -> str:
    """Folded names of the modules, where these units hold all operators inside them; else of the operators."""
    if all(unit.name and len(unit.operators) > 1 and _holds_modules(unit, plan) for unit in units):
        return "\n".join(fold_names([name for unit in units for name in unit.wrapped_modules]))
    return name_operators(units)


def _holds_modules(unit: Unit, plan: Plan) -> bool:
    """True where the unit's operators are all that is inside its modules."""
    modules = unit.wrapped_modules
    others = (operator for other in plan.units if other is not unit for operator in other.operators)
    return all(is_inside(operator, modules) for operator in unit.operators) and not any(
        is_inside(operator, modules) for operator in others
    )


def name_treatment(unit: Unit) -> str:
    """Mode, per slice where it is split, and what else departs from plain FSDP."""
    counts = Counter(unit.modes)
    if unit.num_slices == 1:
        text = f"{unit.modes[0]} {unit.exchange}" if effects_of(unit.treatments[0]).exchanges else unit.modes[0]
    else:
        text = " + ".join(f"{counts[mode]} {mode}" for mode in NAMED_MODES if counts[mode])
    if "sync" in unit.treatments[0]:
        text += f"\nsync {unit.sync}"
    others = dict.fromkeys(each for own in unit.treatments for each in own.items() if each[0] not in _TOLD)
    return "\n".join([text, *(f"{axis} {value}" for axis, value in others)])


def explain(units: Sequence[Unit], plan: Plan) -> str:
    """Why one of these equal units is treated as it is: what keeping it gathered saves, and what it takes."""
    return _explain_mode(units, plan) + _explain_host(units)


def _explain_host(units: Sequence[Unit]) -> str:
    """Why the host updates one of these units, or has its shard, as far as that is predicted; else nothing."""
    effects = [effects_of(each) for each in units[0].treatments]
    if not any(each.is_on_host for each in effects):
        return ""
    told = {
        "the host updates it": any(each.updates_on_host for each in effects),
        "its shard is on the host": any(each.shard_on_host for each in effects),
    }
    does = " and ".join(text for text, is_so in told.items() if is_so)
    if not units[0].menu:
        return f"; {does}"
    there = [unit.cost().beyond(unit.cost(*map(on_device, unit.treatments))) for unit in units]
    taken = format_span([each.seconds for each in there], format_seconds)
    return f"; {does}: {_takes(there, 1.0)} less for {taken}"


def _explain_mode(units: Sequence[Unit], plan: Plan) -> str:
    unit = units[0]
    if plan.world_size == 1:
        return ONE_RANK
    if unit.name == "":
        return "always kept: the root unit is never freed" if unit.operators else "holds no parameters"
    if not is_predicted(plan) or not unit.menu:
        return NOT_PREDICTED
    if effects_of(unit.treatments[0]).exchanges:
        return _explain_exchange(units, plan)
    if effects_of(unit.treatments[0]).is_replicated:
        sharding = [each.cost(each.treatments[0].but(home="all")).beyond(each.cost()) for each in units]
        return f"trained: all of it on each rank, {_takes(sharding, 1.0)} more, {_saves(sharding, 1.0)}"
    freed, kept = freed_and_kept(unit.treatments[0])
    num_kept = sum(each == kept for each in unit.treatments)
    unkept = next((each for each in unit.treatments if each != kept), freed)
    keeping, keeping_more = ([each.cost(way).beyond(each.cost(kept)) for each in units] for way in (freed, unkept))
    share = num_kept / unit.num_slices
    if effects_of(unit.treatments[0]).is_resident:
        why = f"frozen: keeping {_takes(keeping, 1.0)} from the first step on {_saves(keeping, 1.0)}"
    elif num_kept == 0:
        why = f"keeping it would {_if_kept(keeping_more, 1.0, plan)}"
    elif num_kept == unit.num_slices:
        why = f"keeping {_takes(keeping, 1.0)} {_saves(keeping, 1.0)}"
    else:
        why = (
            f"keeping {num_kept} of {unit.num_slices} slices, {_takes(keeping, share)}, {_saves(keeping, share)};"
            f" keeping the rest would {_if_kept(keeping_more, 1 - share, plan)}"
        )
    if effects_of(unit.treatments[0]).holds_whole_gradients:
        waiting = [each.with_least("sync").cost().beyond(each.cost()) for each in units]
        why += f"; {_takes(waiting, 1.0)} held between micro-batches {_saves(waiting, 1.0, 'save')}"
    if any(effects_of(option.treatment).exchanges for option in unit.menu):
        why += f"; moving activations would send {_sent(units, plan, is_moving=True)} a step, which is"
        why += f" {_sent(units, plan, is_moving=False)} now"
    return why


def _explain_exchange(units: Sequence[Unit], plan: Plan) -> str:
    """Why activations move: what is sent of the rows of all ranks, against what the best way to gather would send."""
    gathered = [option for option in units[0].menu if not effects_of(option.treatment).exchanges]
    best = min(gathered, key=lambda option: option.more_s)
    gathering = [replace(unit, treatments=(best.treatment,)) for unit in units]
    differences = [other.cost().beyond(unit.cost()) for other, unit in zip(gathering, units, strict=True)]
    return (
        f"sends {_sent(units, plan, is_moving=True)} of activations a step, where {name_treatment(gathering[0])}"
        f" would send {_sent(gathering, plan, is_moving=False)}: {_saves(differences, 1.0)}".replace("\n", ", ")
    )


def _sent(units: Sequence[Unit], plan: Plan, *, is_moving: bool) -> str:
    """Bytes that a rank sends for each of these units: of activations, or as they are treated."""
    sent = (unit.exchanged_bytes if is_moving else _unit_wire_bytes(unit, plan) for unit in units)
    return format_span(sent, format_bytes)


def _takes(differences: Sequence[Cost], share: float) -> str:
    return format_span([-share * each.num_bytes for each in differences], format_bytes)


def _saves(differences: Sequence[Cost], share: float, verb: str = "saves") -> str:
    saved_s = [share * each.seconds for each in differences]
    return f"{verb} {format_span(saved_s, format_seconds)}" if max(saved_s) > 0 else f"{verb} no time"


def _if_kept(differences: Sequence[Cost], share: float, plan: Plan) -> str:
    """``save 1.20 ms but take 4.00 MiB; 2.10 MiB are left``, and what else keeps a unit sharded that would fit."""
    saves, takes = _saves(differences, share, "save"), _takes(differences, share)
    left_bytes = plan.memory_limit_bytes - plan.peak_bytes
    if left_bytes <= 0:
        return f"{saves} but take {takes}; nothing is left"
    left = f"{format_bytes(left_bytes)} are left"
    if share * min(-each.num_bytes for each in differences) > left_bytes:
        return f"{saves} but take {takes}; {left}"
    # the bytes at the peak may be more than those kept, and a search may miss something within its gap
    searched = plan.solver != "" and max(each.seconds for each in differences) > 0
    return f"{saves} and take {takes}; {left}" + (", but no better plan was found that keeps it" if searched else "")


def summarise(plan: Plan) -> list[tuple[str, str]]:
    """Labels and sentences on what the plan as a whole is predicted to do."""
    samples = plan.micro_batch_size * plan.num_micro_batches * plan.world_size
    limit = format_bytes(plan.memory_limit_bytes)
    if is_predicted(plan):
        share = f"{plan.peak_bytes / plan.memory_limit_bytes:.1%}"
        lines = {
            "step time": f"{format_seconds(plan.step_time_s)} predicted for one optimizer step{_corrected(plan)}",
            "samples/s": f"{three_digits(plan.samples_per_s)} predicted, all ranks together",
            "peak memory": f"{format_bytes(plan.peak_bytes)} of {limit} ({share}) predicted per rank",
        }
    else:
        lines = dict.fromkeys(("step time", "samples/s"), NOT_PREDICTED)
        lines["peak memory"] = f"{NOT_PREDICTED}; the limit is {limit}"
    if plan.peak_phase:
        lines["peak is in"] = tell_peak(plan)
    if plan.host_bytes:
        of_limit = "" if plan.host_limit_bytes is None else f" of {format_bytes(plan.host_limit_bytes)}"
        lines["host memory"] = f"{format_bytes(plan.host_bytes)}{of_limit} predicted per rank"
    if plan.loss_bytes > LARGE_LOSS * plan.peak_bytes:
        lines["loss"] = (
            f"{CHUNKS} chunks of logits and loss, as by chunked_cross_entropy, would take"
            f" {format_bytes(plan.loss_bytes)} ({plan.loss_bytes / plan.peak_bytes:.1%}) off the peak"
        )
    if plan.evaluation_peak_bytes:
        batch = _count(plan.micro_batch_size, "sample")
        lines["evaluation"] = f"{format_bytes(plan.evaluation_peak_bytes)} predicted per rank, {batch} at once"
    if plan.correction.num_plans:
        lines["correction"] = tell_correction(plan.correction)
    lines["gap"] = _gap(plan)
    lines["solver"] = plan.solver or "none: the plan was not searched"
    lines["gain"] = _gain(plan)
    lines["batch"] = (
        f"{_count(plan.micro_batch_size, 'sample')} x {_count(plan.num_micro_batches, 'micro-batch', 'es')}"
        f" x {_count(plan.world_size, 'rank')} = {_count(samples, 'sample')} per optimizer step"
    )
    blocks = (("activations", line) for line in tell_blocks(plan))
    return [*lines.items(), *blocks, *(("note", note) for note in plan.notes)]


def _corrected(plan: Plan) -> str:
    return f", {format_seconds(plan.corrected_step_time_s)} after a race" if plan.corrected_step_time_s else ""


def tell_correction(correction: Correction) -> str:
    """``computing takes 1.20 times as long as was measured apart, collectives 0.80 times; ...``, with the errors."""
    named = {"all": "collectives", "node": "those in nodes"}
    links = "".join(f", {named[link]} {factor:.2f} times" for link, factor in correction.links.items())
    return (
        f"computing takes {correction.computing:.2f} times as long as was measured apart{links}; steps of"
        f" {correction.num_plans} plans are predicted {correction.error:.1%} off, and"
        f" {correction.error_before:.1%} without that"
    )


def tell_peak(plan: Plan) -> str:
    """``backward of h.3.mlp: activations 1.20 GiB, parameter shards 803 MiB``: where the peak is, and what of."""
    has_place = plan.peak_phase not in ("optimizer step", "all phases")  # the latter is the paper's
    where = f"{plan.peak_phase} of {plan.peak_operator or 'the loss'}" if has_place else plan.peak_phase
    parts = sorted(plan.peak_parts.items(), key=lambda part: part[1], reverse=True)
    return f"{where}: {', '.join(f'{name} {format_bytes(size)}' for name, size in parts)}"


def tell_kept(plan: Plan) -> str:
    """``12 of 19 units unsharded, a shard of 3 in each node``: what is kept between forward and backward."""
    units = [unit for unit in plan.units if unit.name]
    modes = [effects_of(each) for unit in units for each in unit.treatments]
    kept = sum(each.is_kept for each in modes)
    in_nodes = sum(not each.is_kept and each.left_over != "all" for each in modes)
    what = f"slices of {len(units)} units" if len(modes) > len(units) else "units"
    shards = f", a shard of {in_nodes} in each node" if in_nodes else ""
    return f"{kept} of {len(modes)} {what} unsharded{shards}"


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}{plural}"


def _gap(plan: Plan) -> str:
    if not is_predicted(plan) or not plan.solver:
        return NOT_PREDICTED
    if plan.gap <= 0:
        return "none: no plan in the search space is predicted to be faster"
    # rounded up, since it certifies; the small subtrahend keeps 0.003 at 0.3%
    percent = math.ceil(plan.gap * 1e4 - 1e-6) / 100 if plan.gap < 100 else 100 * plan.gap
    return f"no plan in the search space is predicted to be faster by more than {max(percent, 0.01):g}%"


def _gain(plan: Plan) -> str:
    """Predicted samples/s against plain FSDP under the same limit: every unit ZDP, reducing each time."""
    plain = "plain FSDP" + (f" at its best ({plan.all_zdp_how})" if plan.all_zdp_how else "")
    if plan.world_size == 1:
        return f"none: {ONE_RANK}"
    chosen = [unit for unit in plan.units if unit.name != ""]
    if not plan.blocks and all({*unit.treatments} == {ZDP} for unit in chosen):
        return f"none: this plan is {plain}"
    if is_predicted(plan) and plan.all_zdp_peak_bytes > plan.memory_limit_bytes:
        return f"plain FSDP does not fit: it takes at least {format_bytes(plan.all_zdp_peak_bytes)}"
    if not is_predicted(plan) or plan.all_zdp_step_time_s == 0:
        return NOT_PREDICTED
    gain = plan.predicted_gain - 1
    more = f"{abs(gain):.1%} {'more' if gain >= 0 else 'fewer'} samples/s"
    samples = "a step" if plan.num_micro_batches == 1 and not plan.all_zdp_how else "for as many samples"
    return (
        f"{more} than {plain}: {format_seconds(plan.all_zdp_step_time_s)} {samples},"
        f" peak {format_bytes(plan.all_zdp_peak_bytes)}"
    )


def name_saves(block: Block) -> str:
    """``selective_1 (keeps results 0, 3)``: what a block does; levels of one number keep other results elsewhere."""
    return block.activations + (f" (keeps results {', '.join(map(str, block.kept))})" if block.kept else "")


def tell_blocks(plan: Plan) -> Iterator[str]:
    """``h.{0-11} recomputed in backward: 1.20 GiB fewer at the end of forward, 12.0 ms more a step``."""
    by_choice: dict[tuple[str, int], list[Block]] = {}
    for block in plan.blocks:
        by_choice.setdefault((block.activations, len(block.kept)), []).append(block)
    for (choice, num_kept), blocks in by_choice.items():
        names = ", ".join(fold_names([block.name for block in blocks]))
        freed, cost_s = sum(block.frees_bytes for block in blocks), sum(block.costs_s for block in blocks)
        numbers = f": {format_bytes(freed)} fewer at the end of forward, {format_seconds(cost_s)} more a step"
        results = f"all but {num_kept} {'result' if num_kept == 1 else 'results'} of heavy operations"
        way = f"{_WAYS['recompute']}, {results}" if num_kept else _WAYS[choice]
        yield f"{names} {way}{numbers if freed or cost_s else ''}"


def tell_accumulation(plan: Plan, without: Plan) -> str:
    """``b 4 -> 8, K 8 -> 4, +1.10 GiB gradients kept whole, 2.3x fewer bytes on the wire``; empty if all is equal.

    The plan ``without`` has the user's own micro-batches, in each of which all units reduce.
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


def wire_bytes(plan: Plan) -> float:
    """Bytes that one rank sends in an optimizer step of K micro-batches, with rings (OSDP, equation 2).

    Each collective sends (N-1)/N of a unit's S bytes, and there are

        ZDP, sync every   2 K all-gathers   K reduce-scatters
        ZDP, sync last    2 K all-gathers   1 reduce-scatter
        DP, sync every      K all-gathers   K reduce-scatters
        DP, sync last       1 all-gather    1 reduce-scatter

    An hpZ unit has K all-gathers over the m ranks of a node, and a rank sends (m-1)/m of its bytes in each. All
    collectives of an HSDP or HDP unit are over these ranks. Each of its reduce-scatters, or with sync node the last
    one, is followed by an all-reduce of S/m between N/m nodes, in which a rank sends 2 (1 - m/N) of that.
    Frozen parameters have no gradients to reduce. Resident units are gathered before the first step, which is not
    counted. Units that move activations send what the plan says of them. All else is left out that
    `planned_collectives` leaves out.
    """
    return sum(_unit_wire_bytes(unit, plan) for unit in plan.units)


def _unit_wire_bytes(unit: Unit, plan: Plan) -> float:
    """Part of one unit in `wire_bytes`."""
    moved_bytes = unit.exchanged_bytes if effects_of(unit.treatments[0]).exchanges else 0
    return moved_bytes + sum(
        number * _sent_share(collective, plan) * whole_bytes
        for collective, number, whole_bytes in planned_collectives(unit, plan.num_micro_batches)
    )


def _sent_share(collective: Collective, plan: Plan) -> float:
    """Fraction of a unit's bytes that a rank sends in a collective."""
    ranks, node_size = plan.world_size, plan.node_size or plan.world_size
    if collective.operation == "all_reduce":
        held_by = 1 if collective.over == "all" else node_size
        return 2 * (1 - held_by / ranks) / held_by
    number = {"all": ranks, "node": node_size}[collective.over]
    return (number - 1) / number


def whole_gradient_bytes(plan: Plan) -> int:
    """Bytes of gradients that are kept whole from one micro-batch to the next, beyond those of reduced ones."""
    if plan.num_micro_batches == 1:
        return 0
    waiting = (unit for unit in plan.units if effects_of(unit.treatments[0]).holds_whole_gradients)
    return round(sum(unit.cost().beyond(unit.with_least("sync").cost()).num_bytes for unit in waiting))


def format_span(values: Iterable[float], form: Callable[[float], str]) -> str:
    """One text where all values read the same, else a range: ``1.20 to 1.30 ms``, ``800 us to 1.10 ms``."""
    values = list(values)
    least, most = form(min(values)), form(max(values))
    if least == most:
        return least
    number, unit = least.split()
    return f"{number if most.endswith(f' {unit}') else least} to {most}"
