"""Bytes of a step in slices, added up by hand in units of one slice W; s = W/8 is its shard on eight ranks.

Two layers of four slices; base is 3: shards and the two moments of AdamW. Activations are rounded away.

forward         3 + 1 of reduced gradients + the DP slices so far + the last slice and the buffer that it is copied from
backward        3 + the slice + 1 of its gradient + 1 that the reduction before took + the slice before it, if it is ZDP
                and gathered ahead + the DP slices before it + s for each slice behind it: with ZDP alone 7.75 at the
                first slice but one, and 6.875 at the first, which has none before it
reduce-scatter  3 + 1 that is reduced + 1 of the gradient that it was made of + s of the result + the slices before it
                and s for each behind it as in backward
optimizer       3 + 1 of reduced gradients + three temporaries of a shard
"""

import pytest
import torch.nn.functional as F

from benchmarks.families import build
from benchmarks.families.dense import TwoLayers
from benchmarks.testbed.groups import fake_group
from benchmarks.testbed.memory import PHASES, count_step
from benchmarks.testbed.plans import plan_of
from lightning_osdp import Cluster, Link, profile_model, simulate

WIDTH, NUM_SLICES = 1024, 4
W_BYTES = 4 * WIDTH * WIDTH // NUM_SLICES


class FirstLayers(TwoLayers):
    """Two layers whose input needs no gradient."""

    def loss(self, batch):
        return F.mse_loss(self.layers(batch[0]), batch[1])


def counted(module, modes, prefetch):
    """Phases in units of a slice."""
    names = tuple({"Z": "ZDP", "D": "DP"}[letter] for letter in modes)
    with fake_group(8):
        layers = {f"layers.{index}": names for index in range(2)}
        plan = plan_of(module, layers, world_size=8, micro_batch_size=1, backward_prefetch=prefetch)
        found = count_step(module, plan)
    return [round(found.phases[phase] / W_BYTES, 1) for phase in PHASES]


@pytest.mark.parametrize(
    ("modes", "prefetch", "expected"),
    [
        # whole layers. backward: 3 + 4 of the first layer + 4 of its gradient + 4 that the second one's
        # reduction took + 4 s; when that one is reduced, 3 + 4 gathered ahead + 4 + 4 + 4 s
        ("Z", "pre", [12.0, 15.5, 15.5, 5.5]),
        ("ZZZZ", "pre", [6.0, 7.8, 6.9, 4.4]),  # reduce-scatter at the first slice but one: 3 + 1 + 1 + s + 1 + 6 s
        ("ZZZZ", "none", [6.0, 6.9, 6.0, 4.4]),  # at the first slice: 3 + 1 + 1 + 1 + 7 s, and 3 + 1 + 1 + s + 7 s
        # backward at the last ZDP slice, the sixth: 3 + 1 + 1 + 1 + 1 gathered ahead + 2 DP slices + 2 s; when it is
        # reduced 3 + 1 + 1 + s + 1 + 2 + 2 s
        ("ZZDD", "pre", [9.0, 9.3, 8.4, 4.4]),
        # backward at the last slice but one: 3 + 7 slices + 1 + 1 + s; when the last one is reduced 3 + 7 + 1 + 1 + s
        ("DDDD", "pre", [13.0, 12.1, 12.1, 4.4]),
    ],
)
def test_one_slice_is_gathered_and_its_gradient_whole_at_a_time(modes, prefetch, expected):
    assert counted(TwoLayers(WIDTH), modes, prefetch) == expected


@pytest.mark.parametrize("prefetch", ["pre", "none"])
def test_slices_of_a_layer_whose_input_needs_no_gradient_are_reduced_at_the_end(prefetch):
    # then all four are gathered, and their gradients whole: 3 + 4 + 4 + 1 that the reduction before took + 4 s; the
    # first of them to be reduced leaves 3 slices and 3 gradients: 3 + 3 + 3 + 1 + 1 + s + 4 s
    assert counted(FirstLayers(WIDTH), "ZZZZ", prefetch) == [6.0, 12.5, 11.6, 4.4]


def test_the_gradients_of_all_who_read_an_input_of_frozen_slices_are_added_up_after_the_last_one():
    # by then the unit before them may have been gathered ahead, and the slices have been resharded
    link = Link(latency_s=0.0, seconds_per_byte=0.0)
    cluster = Cluster(world_size=4, all_gather=link, reduce_scatter=link, overlaps=True, has_streams=False)
    module = build("tiny, LoRA")
    profile = profile_model(module, module.batch(16))
    for slices in (("resident", "resident", "DP", "resident"), ("ZDP",) * 4):
        modes = {"model.blocks.2.mlp.expand": "ZDP", "model.blocks.2.mlp.proj.frozen": slices}
        plan = plan_of(module, modes, world_size=4, micro_batch_size=16)
        with fake_group(4):
            counted = count_step(build("tiny, LoRA"), plan).peak_bytes
        assert simulate(plan, profile, cluster).peak.peak_bytes == pytest.approx(counted, rel=0.003)
