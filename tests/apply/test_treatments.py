"""Appliers of all axes of a unit; tests of steps that do as the axes say are in `tests/distributed`."""

from types import SimpleNamespace

import pytest

from lightning_osdp.apply.treatments import APPLIERS, Applier, change
from lightning_osdp.apply.units import ShardedUnit
from lightning_osdp.core.axes import AXES, DP, HDP, ZDP


def test_every_axis_of_units_has_an_applier():
    assert list(APPLIERS) == [name for name, axis in AXES.items() if axis.on == "unit"]


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        (None, ZDP, ["moves", "home", "keep", "sync", "states", "shard"]),
        (ZDP, ZDP, []),
        (ZDP, DP, ["keep"]),
        (DP, ZDP.but(sync="last"), ["keep", "sync"]),
        (HDP, DP, []),  # an axis that cannot change is refused before
    ],
)
def test_a_change_goes_through_the_axes_that_differ_and_can_change(monkeypatch, before, after, expected):
    changed = []
    for axis in APPLIERS:
        monkeypatch.setitem(APPLIERS, axis, Applier(change=lambda *_, axis=axis: changed.append(axis)))
    change(ShardedUnit("layer", (SimpleNamespace(),), after), None, before)
    assert changed == expected
