import dataclasses

import pytest

from lightning_osdp.core.axes import Treatment, named
from lightning_osdp.core.plans.parts import Block, Unit
from lightning_osdp.core.plans.plan import Plan

MIB = 2**20
PLAN = Plan(
    fingerprint={"a.weight": "[2] float32"},
    world_size=2,
    units=(
        Unit(name="", operators=("ln",), kind="LayerNorm", treatments=named("DP")),
        *(
            Unit(name=f"h.{index}", operators=(f"h.{index}",), kind="Linear", treatments=named("ZDP"))
            for index in range(3)
        ),
        Unit(name="fc", operators=("fc",), kind="Linear", treatments=named("ZDP", "DP")),
    ),
    memory_limit_bytes=64 * MIB,
    peak_bytes=62 * MIB,
    micro_batch_size=8,
    num_micro_batches=4,
    step_time_s=0.18,
    samples_per_s=88.9,
    gap=0.0036,
    solver="depth_first",
    blocks=(Block(name="h.0", treatment=Treatment(saves="recompute")),),
    all_zdp_step_time_s=0.2,
    peak_phase="forward",
    peak_operator="fc",
)


def test_a_plan_as_text_has_ten_lines():
    assert (
        str(PLAN)
        == """\
OSDP plan for 2 ranks
units    3 ZDP, 1 ZDP + DP
blocks   1 recompute
prefetch backward pre, forward none
batch    8 x 4 x 2 = 64 samples a step
memory   62.0 MiB of 64.0 MiB (96.9%) predicted per rank
peak     forward fc
step     180 ms predicted, 88.9 samples/s
gain     1.111 times the samples/s of plain FSDP
gap      0.36% at most to the fastest plan in the search space"""
    )


@pytest.mark.parametrize(
    ("changes", "lines"),
    [
        ({"world_size": 1}, {"OSDP plan for one rank"}),
        ({"units": PLAN.units[:1], "blocks": ()}, {"units    the root alone", "blocks   all keep what they save"}),
        (
            {"step_time_s": 0.0, "all_zdp_step_time_s": 0.0, "peak_phase": "", "peak_operator": ""},
            {
                "memory   not predicted; the limit is 64.0 MiB",
                "step     not predicted",
                "gain     not predicted",
                "gap      not predicted",
                "peak     not known",
            },
        ),
        ({"forward_prefetch": True}, {"prefetch backward pre, forward next"}),
    ],
)
def test_what_is_not_there_is_said(changes, lines):
    told = str(dataclasses.replace(PLAN, **changes)).splitlines()
    assert len(told) == 10
    assert lines <= set(told)


def test_notes_follow():
    *told, last = str(dataclasses.replace(PLAN, notes=("unvalidated on CUDA",))).splitlines()
    assert told == str(PLAN).splitlines()
    assert last == "note     unvalidated on CUDA"
