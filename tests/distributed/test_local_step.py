"""Optimizers that step on rows: as on DTensors, bit for bit, and nobody else sees rows."""

import local_step_cases as cases
import pytest
from tiers import slow

pytestmark = pytest.mark.distributed
ROUNDING = 1e-6


@pytest.mark.parametrize(
    ("world_size", "names", "in_nodes"),
    [
        (2, tuple(cases.CLASSES), False),
        slow(4, ("SGD", "AdamW", "NAdam"), True),
        slow(4, tuple(cases.CLASSES), False),
    ],
    ids=["two", "nodes", "four"],
)
def test_steps_on_rows_equal_those_on_dtensors(ranks, world_size, names, in_nodes):
    for found in ranks(world_size).run(cases.equals_dtensors, names=names, in_nodes=in_nodes):
        assert len(found) == sum(len(cases.CLASSES[name]) * (2 + (name in cases.FUSED)) for name in names)
        for (name, how, index), (different, from_plain) in found.items():
            if (name, how) in cases.NOT_ON_DTENSORS:
                assert different is None
            else:
                assert different == [], (name, how, index)
            assert from_plain < ROUNDING, (name, how, index)


def test_what_steps_on_rows(ranks):
    for found in ranks(2).run(cases.arithmetic):
        assert found["adam"] == {"Tensor"}
        assert found["scheduled"] == {"Tensor"}
        assert found["mixed"] == {"Tensor", "Parameter"}  # that one is of a plain parameter
        for name in ("replaced", "subclass", "gradient of other cut"):
            assert "DTensor" in found[name], name


@pytest.mark.parametrize("how", ["name", "place", "none"])
def test_closures_and_hooks_see_dtensors(ranks, how):
    for seen, returned, arithmetic, steps in ranks(2).run(cases.seen_by_others, how=how):
        places = ["before", *["closure"] * (how != "none"), "after", "behind"]
        assert seen == [(place, {"DTensor"}) for place in places]
        assert returned == (None if how == "none" else 3.0)
        assert arithmetic == {"Tensor"}
        assert steps == {2.0}


@pytest.mark.parametrize("where", [slow("closure"), "arithmetic"])
def test_a_step_that_fails_leaves_dtensors(ranks, where):
    for told, kinds, moved, states in ranks(2).run(cases.failing, where=where):
        assert told.startswith("ValueError: of the closure" if where == "closure" else "TypeError"), told
        assert kinds == {"DTensor"}
        assert not any(moved) if where == "closure" else all(moved[:2])
        assert states == ([] if where == "closure" else [*range(6)])
