"""When backward is through with units."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_osdp.core.units import UnitProfile
from lightning_osdp.engine.order import leaving_order


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
