"""The orders in which a step comes to units and is through with them, whatever their modes."""

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


def completed(
    units: Sequence[UnitProfile], begins: Sequence[int], num_segments: int, *, is_ahead: bool
) -> list[list[int]]:
    """For each segment, the units with whose gradients backward is through when it is over, in order; without the root.

    That is the segment in which a unit begins. But where forward gathers ahead, it splits the unit's parameters into
    views before the unit before it runs, and autograd takes what forward did last first: then it is the segment in
    which that one begins. A frozen unit has no gradient to wait for.

    Args:
        units: root first, if any, then in forward order.
        begins: first segment of each.
        num_segments: of the model.
        is_ahead: FSDP1's ``forward_prefetch``.
    """
    found: list[list[int]] = [[] for _ in range(num_segments)]
    in_turn = [index for index, unit in enumerate(units) if unit.gathered_bytes or not unit.is_root]
    for before, index in zip([*in_turn[:1], *in_turn], in_turn, strict=False):
        if not units[index].is_root:
            waits = is_ahead and units[index].gradient_bytes
            found[begins[before if waits else index]].append(index)
    if is_ahead:
        return [through[::-1] for through in found]
    place = {unit: place for place, unit in enumerate(leaving_order(units))}
    return [sorted(through, key=place.__getitem__) for through in found]
