"""What is told of blocks that do not keep what they save."""

import dataclasses

from lightning_osdp.core.plans.plan import Block, Plan, Unit
from lightning_osdp.report import render_plan
from lightning_osdp.report.activations import tell_blocks

PLAN = Plan(
    fingerprint={},
    world_size=2,
    units=(Unit(name="", operators=(), kind="", modes=("DP",)),),
    memory_limit_bytes=2**30,
    peak_bytes=2**29,
    micro_batch_size=4,
    num_micro_batches=1,
    step_time_s=0.25,
    samples_per_s=32.0,
    gap=0.0,
    blocks=(
        Block(name="h.0", activations="recompute", frees_bytes=3 * 2**20, costs_s=0.001),
        Block(name="h.1", activations="recompute", frees_bytes=2 * 2**20, costs_s=0.0005),
        Block(name="h.2", activations="offload", frees_bytes=2**20, costs_s=0.25),
        Block(name="h.3", activations="recompute_offload"),
    ),
)


def test_equal_choices_are_told_together():
    assert list(tell_blocks(PLAN)) == [
        "h.{0-1} recomputed in backward: 5.00 MiB fewer at the end of forward, 1.50 ms more a step",
        "h.2 offloaded to host memory: 1.00 MiB fewer at the end of forward, 250 ms more a step",
        "h.3 recomputed in backward, inputs offloaded to host memory",
    ]


def test_the_table_has_them():
    assert "h.2 offloaded to host memory" in render_plan(PLAN)
    assert "offloaded" not in render_plan(dataclasses.replace(PLAN, blocks=()))
