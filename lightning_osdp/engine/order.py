"""The orders in which a step comes to units, whatever their modes."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_osdp.core.units import UnitProfile


def leaving_order(units: Sequence[UnitProfile]) -> tuple[int, ...]:
    """Units in the order in which forward leaves them for good, inner ones first; without the root."""
    inner = [index for index, unit in enumerate(units) if not unit.is_root]
    return tuple(sorted(inner, key=lambda index: (units[index].last, -index)))


def gathered_ahead(units: Sequence[UnitProfile], begins: Sequence[int], num_segments: int) -> list[list[int]]:
    """For each segment, the unit that ``forward_prefetch`` has gathered by then: the next one of forward.

    Args:
        units: root first, if any, then in forward order.
        begins: first segment of each.
        num_segments: of the model.
    """
    first_at: dict[int, int] = {}  # segment -> the outermost unit that begins with it
    for index in range(len(units) - 1, -1, -1):
        if not units[index].is_root:
            first_at[begins[index]] = index
    ahead: list[list[int]] = []
    following: list[int] = []
    for segment in range(num_segments - 1, -1, -1):
        ahead.append(following)
        following = [first_at[segment]] if segment in first_at else following
    return ahead[::-1]
