"""Bytes of a step in slices, added up by hand in units of one slice W; s = W/8 is its shard on eight ranks.

Two layers of four slices; base is 3: shards and the two moments of AdamW. What activations take is rounded away.

forward         3 + 1 of reduced gradients + what is gathered: one ZDP slice, and the DP slices so far
backward        3 + the slice and, if it is ZDP, the one before it, gathered ahead + 2 of its gradient + the DP slices
                before it + s for each slice behind it: with ZDP alone 7.75 at the first slice but one
reduce-scatter  the same without the slice and one of its gradients, and with s more
optimizer       3 + 1 of reduced gradients + three temporaries of a shard
"""

import pytest

from benchmarks.families.layers import TwoLayers
from benchmarks.testbed.groups import fake_group
from benchmarks.testbed.memory import PHASES, count_step
from benchmarks.testbed.plans import plan_of

WIDTH, NUM_SLICES = 1024, 4
W_BYTES = 4 * WIDTH * WIDTH // NUM_SLICES


@pytest.mark.parametrize(
    ("modes", "prefetch", "expected"),
    [
        ("Z", "pre", [8.0, 19.0, 11.5, 5.5]),  # the same layers whole: 3 + 8 gathered + 8 of the second one's gradient
        ("ZZZZ", "pre", [5.0, 7.8, 5.9, 4.4]),
        ("ZZZZ", "none", [5.0, 6.9, 5.0, 4.4]),
        ("ZZDD", "pre", [8.0, 9.3, 7.4, 4.4]),
        ("DDDD", "pre", [12.0, 13.0, 11.1, 4.4]),
    ],
)
def test_one_slice_is_gathered_and_its_gradient_whole_at_a_time(modes, prefetch, expected):
    names = tuple({"Z": "ZDP", "D": "DP"}[letter] for letter in modes)
    with fake_group(8):
        module = TwoLayers(WIDTH)
        layers = {f"layers.{index}": names for index in range(2)}
        plan = plan_of(module, layers, world_size=8, micro_batch_size=1, backward_prefetch=prefetch)
        found = count_step(module, plan)
    assert [round(found.phases[phase] / W_BYTES, 1) for phase in PHASES] == expected
