"""The sentence on accumulation, and the bytes that it counts."""

import dataclasses

import pytest

from lightning_osdp.core.axes import named
from lightning_osdp.core.plans.parts import Unit
from lightning_osdp.report.sentences import tell_accumulation, whole_gradient_bytes, wire_bytes
from tests.support.plans import bare_plan, menu

MIB = 2**20


def plan(*units, size=4, number=8, world_size=4, trains=True):
    """Makes a plan of (mode, sync) or (modes, sync), each unit of one MiB, after a root without parameters."""
    made = [Unit(name="", operators=(), kind="", treatments=named("DP"))]
    for index, (modes, sync) in enumerate(units):
        each = (modes,) if isinstance(modes, str) else modes
        whole = MIB * (world_size - 1) // world_size if trains else 0  # in place of a rank's part
        of_unit = {"parameter_bytes": MIB, "menu": menu(0.0, MIB, 0.0, whole)}
        made.append(Unit(name=f"{index}", operators=(), kind="", treatments=named(*each, sync=sync), **of_unit))
    return bare_plan(made, world_size=world_size, micro_batch_size=size, num_micro_batches=number)


@pytest.mark.parametrize(
    ("unit", "collectives"),
    [
        (("ZDP", "every"), 24),
        (("ZDP", "last"), 17),
        (("DP", "every"), 16),
        (("DP", "last"), 2),
        ((("ZDP", "DP"), "every"), 20),
        ((("ZDP", "DP"), "last"), (17 + 2) / 2),
    ],
)
def test_bytes_on_the_wire_are_those_of_the_collectives(unit, collectives):
    assert wire_bytes(plan(unit)) == collectives * MIB * 3 / 4
    assert wire_bytes(plan(unit, unit)) == 2 * wire_bytes(plan(unit))
    assert wire_bytes(plan(unit, world_size=1)) == 0


@pytest.mark.parametrize(
    ("unit", "gathers", "reductions"),
    [(("ZDP", "every"), 16, 8), (("ZDP", "last"), 16, 1), (("DP", "every"), 8, 8), (("DP", "last"), 1, 1)],
)
def test_gradients_on_the_wire_are_those_of_what_is_trained(unit, gathers, reductions):
    whole = plan(unit)
    for trained_bytes in (0, MIB // 4, MIB):
        root, sharded = whole.units
        units = (root, dataclasses.replace(sharded, gradient_bytes=trained_bytes))
        expected = gathers * MIB + reductions * trained_bytes
        assert wire_bytes(dataclasses.replace(whole, units=units)) == expected * 3 / 4
    frozen = (root, dataclasses.replace(sharded.in_modes("resident", sync="every"), gradient_bytes=0))
    assert wire_bytes(dataclasses.replace(whole, units=frozen)) == 0


def test_the_root_is_always_gathered_once():
    sharded = plan(("ZDP", "every"))
    root = dataclasses.replace(sharded.units[0].in_modes("ZDP"), parameter_bytes=MIB)
    assert wire_bytes(dataclasses.replace(sharded, units=(root,))) == 16 * MIB * 3 / 4


def test_gradients_are_kept_whole_between_micro_batches_only():
    units = [("ZDP", "last"), ("DP", "last"), ("DP", "every")]
    assert whole_gradient_bytes(plan(*units)) == 2 * 3 / 4 * MIB
    assert whole_gradient_bytes(plan((("ZDP", "DP"), "last"))) == 3 / 4 * MIB
    assert whole_gradient_bytes(plan(*units, number=1)) == 0


def test_what_is_frozen_has_no_gradients_to_keep_whole():
    units = [("ZDP", "last"), ("DP", "last"), (("ZDP", "DP"), "last")]
    assert whole_gradient_bytes(plan(*units, trains=False)) == 0
    assert "gradients" not in tell_accumulation(plan(*units, trains=False), plan(("ZDP", "every")))


@pytest.mark.parametrize(
    ("chosen", "text"),
    [
        (plan(("ZDP", "every"), ("DP", "every")), ""),
        (plan(("ZDP", "every"), ("DP", "every"), size=8, number=4), "b 4 -> 8, K 8 -> 4, 2x fewer bytes on the wire"),
        (plan(("ZDP", "every"), ("DP", "last")), "+768 KiB gradients kept whole, 1.54x fewer bytes on the wire"),
        (
            plan(("DP", "last"), ("DP", "last"), size=8, number=4),
            "b 4 -> 8, K 8 -> 4, +1.50 MiB gradients kept whole, 10x fewer bytes on the wire",
        ),
        (plan(("ZDP", "every"), ("DP", "every"), size=2, number=16), "b 4 -> 2, K 8 -> 16, 2x more bytes on the wire"),
        (plan(("DP", "last"), ("DP", "last"), size=32, number=1), "b 4 -> 32, K 8 -> 1, 10x fewer bytes on the wire"),
    ],
)
def test_the_sentence_says_what_differs(chosen, text):
    assert tell_accumulation(chosen, plan(("ZDP", "every"), ("DP", "every"))) == text


def test_one_rank_sends_nothing_and_says_nothing_of_it():
    before, after = (plan(("DP", "every"), size=size, number=8 // size, world_size=1) for size in (2, 4))
    assert tell_accumulation(after, before) == "b 2 -> 4, K 4 -> 2"
