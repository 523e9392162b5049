"""Plans whose blocks recompute or offload what they save: trained as where blocks keep it, gathered as predicted."""

import activation_cases as cases
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
