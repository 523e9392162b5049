"""Plans whose blocks recompute or offload what they save: trained as where blocks keep it, gathered as predicted."""

import activation_cases as cases
import activation_fits as fits
import pytest

pytestmark = pytest.mark.distributed


ONE, TWO = [(1, "every")], [(1, "every"), (2, "last"), (2, "every")]
"""Micro-batches in a step, and which of them reduce."""


@pytest.mark.parametrize(
    ("world_size", "activations", "workloads"),
    [
        *((2, activations, TWO) for activations in cases.POLICIES),
        *((4, activations, ONE) for activations in ("recompute", "offload", "recompute_offload", "mixed")),
    ],
)
def test_every_plan_trains_as_one_process_in_which_blocks_keep_everything(ranks, world_size, activations, workloads):
    """Losses, gradients, weights and buffers, with every kind of unit and mode; nothing is left on the host."""
    given = {"activations": activations, "workloads": workloads}
    for found in ranks(world_size).run(cases.differences_from_one_process, **given):
        assert len(found) == 1 + 3 + 3 + 4 + 4
        assert {name: difference for name, difference in found.items() if not difference < 1e-12} == {}


def test_fits_in_bf16_mixed_are_those_of_blocks_that_keep_everything(ranks):
    for found in ranks(2).run(fits.in_precision, precision="bf16-mixed"):
        assert len(found) == 3
        assert max(found.values()) < 1e-6, found


def test_what_lightnings_policy_names_recomputes_and_is_planned_so(ranks):
    found = ranks(2).run(fits.by_policy)[0]
    blocks = {"blocks.0": "recompute", "blocks.1": "recompute"}
    assert {name: (planned, executed) for name, (planned, executed, _) in found.items()} == {
        "classes": (blocks, blocks),
        "callable": (blocks, blocks),
        "nested": (blocks | {"head": "recompute"}, blocks | {"head": "recompute"}),
        "given": ({}, blocks),
    }
    assert max(difference for *_, difference in found.values()) < 1e-6
