"""Plans whose blocks recompute or offload what they save: trained as where blocks keep it, gathered as predicted."""

import activation_cases as cases
import activation_fits as fits
import pytest

pytestmark = pytest.mark.distributed

ZDP, DP, MIXED = ("ZDP",), ("DP",), ("DP", "ZDP")
CASES = [
    ("recompute", "block", MIXED, "every", 2),
    ("recompute", "operators", ZDP, "every", 1),
    ("recompute", "operators", DP, "last", 2),
    ("recompute", "both", MIXED, "last", 2),
    ("offload", "block", ZDP, "last", 2),
    ("offload", "operators", MIXED, "every", 1),
    ("offload", "both", DP, "every", 2),
    ("recompute_offload", "block", ZDP, "every", 1),
    ("recompute_offload", "block", DP, "last", 2),
    ("recompute_offload", "operators", MIXED, "last", 2),
    ("recompute_offload", "both", ZDP, "every", 2),
]
NAMES = ("activations", "units", "modes", "sync", "num_micro_batches")


def named(chosen):
    return {"-".join(map(str, case)): dict(zip(NAMES, case, strict=True)) for case in chosen}


@pytest.mark.parametrize(
    ("world_size", "kind", "chosen"),
    [(2, "Parts", CASES[::2]), (2, "DroppingParts", CASES[1::2]), (4, "DroppingParts", CASES[1::6])],
)
def test_losses_gradients_weights_and_buffers_are_those_of_blocks_that_keep_everything(ranks, world_size, kind, chosen):
    for found in ranks(world_size).run(cases.equals_keeping, cases=named(chosen), kind=kind):
        assert len(found) == len(chosen)
        assert {name: difference < 1e-12 for name, difference in found.items()} == dict.fromkeys(found, True), found


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
