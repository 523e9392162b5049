"""Operators split into more and more slices, as long as that lowers the peak that nothing else can lower.

The largest moment of a step in which every unit takes its smallest option binds: an operator that runs then, or
one that is gathered beside it, is split further, and with it all operators equal to it. Each slice is a unit of its
own, which costs latency and overhead, so slices compete with whole operators by the predicted step time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from lightning_osdp.core.axes import LEVELS
from lightning_osdp.core.profile import OperatorProfile
from lightning_osdp.core.slices import slice_names
from lightning_osdp.core.text.names import is_inside
from lightning_osdp.planner.assign.additive import Modes
from lightning_osdp.planner.assign.setting import Setting

WORTH_SPLITTING = 0.01
"""Fraction of the peak that is worth more slices."""

MAX_STEPS = 24
"""Times that a group of equal operators is split further."""

MAX_IN_VAIN = 3
"""Steps in a row without a lower peak: several operators may bind at once."""


def ever_more_slices(setting: Setting, choices: Sequence[int]) -> Iterator[Setting]:
    """The setting with operators split into these numbers, each time with a lower peak of the smallest options."""
    groups = _groups(setting)
    counts: dict[str, int] = {}
    least_bytes, in_vain = setting.costs.least_bytes, 0
    current = setting
    for _ in range(MAX_STEPS):
        more = ((group.names, group.more(counts, choices)) for group in _binding(current, groups))
        names, number = next(((names, number) for names, number in more if number), ((), 0))
        if not number or in_vain == MAX_IN_VAIN:
            return
        counts |= dict.fromkeys(names, number)
        current = setting.with_slices(counts)
        now_bytes = current.costs.least_bytes
        if now_bytes <= least_bytes * (1 - WORTH_SPLITTING):
            least_bytes, in_vain = now_bytes, 0
            yield current
        else:
            in_vain += 1


def agreed_on(setting: Setting, modes: Modes) -> Modes:
    """Modes in which all slices of an operator reduce their gradients in the same micro-batches, over the same ranks.

    Where they differ, all reduce them in every one, over all ranks: that takes no more memory.
    """
    places = {unit.name: index for index, unit in enumerate(setting.units)}
    agreed = list(modes)
    for name, number in setting.decided.num_slices.items():
        slices = [places[part] for part in slice_names(name, number)]
        if len({modes[index].of_all_slices for index in slices}) > 1:
            for index in slices:
                mode, options = modes[index].but(home="all", sync="every"), setting.costs.options[index]
                agreed[index] = mode if mode in options else options[0]
    return tuple(agreed)


class _Group(NamedTuple):
    """Equal operators, each a unit of its own."""

    names: tuple[str, ...]
    num_features: int

    def more(self, counts: Mapping[str, int], choices: Sequence[int]) -> int | None:
        """The next number of slices; None if there is none."""
        now = counts.get(self.names[0], 1)
        return min((each for each in choices if now < each <= self.num_features), default=None)


def _groups(setting: Setting) -> dict[str, _Group]:
    """Groups of equal operators, by the name of each operator, without those inside of blocks at levels.

    Levels count the operations of whole operators.
    """
    at_levels = [name for name, saves in setting.decided.blocks.items() if saves in LEVELS]
    equal: dict[tuple[str, int], list[OperatorProfile]] = {}
    for unit in setting.units:
        operator = unit.operators[0] if len(unit.operators) == 1 and not is_inside(unit.name, at_levels) else None
        if operator is not None and operator.cut is not None and operator.name == unit.name:
            key = (operator.signature or operator.name, operator.parameter_bytes)
            equal.setdefault(key, []).append(operator)
    groups: dict[str, _Group] = {}
    for operators in equal.values():
        (cut,) = {operator.cut.num_features for operator in operators if operator.cut is not None}
        names = tuple(operator.name for operator in operators)
        groups |= dict.fromkeys(names, _Group(names, cut))
    return groups


def _binding(setting: Setting, groups: Mapping[str, _Group]) -> list[_Group]:
    """Groups of the operators that are gathered at the peak, the largest units first."""
    peak = setting.costs.peak(setting.costs.least_memory_modes)
    running = [
        index
        for index, unit in enumerate(setting.units)
        if not unit.is_root and any(operator.name == peak.operator for operator in unit.operators)
    ]
    near = (index for place in running for index in (place, place - 1, place + 1) if 0 <= index < len(setting.units))
    units = sorted((setting.units[index] for index in near), key=lambda unit: -unit.gathered_bytes)
    of_slice = {part: name for name, number in setting.decided.num_slices.items() for part in slice_names(name, number)}
    names = (of_slice.get(unit.name, unit.name) for unit in units)
    return list(dict.fromkeys(groups[name] for name in names if name in groups))
