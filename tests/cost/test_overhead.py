"""What the runtime takes per unit: as measured, as often as it happens, and nothing where nothing was measured."""

from dataclasses import replace

import pytest

from lightning_osdp.core.cluster import UNIT_PARTS, Cluster, Link, UnitOverhead
from lightning_osdp.core.modes import ALL_MODES, DP, ZDP
from lightning_osdp.core.profile import ModelProfile, OperatorProfile
from lightning_osdp.core.step import Step
from lightning_osdp.core.units import partition
from lightning_osdp.cost import Workload, overhead_s
from lightning_osdp.simulation import simulate_step

FREE = Link(latency_s=0.0, seconds_per_byte=0.0)
MEASURED = {
    part: UnitOverhead(fixed_s=1e-3 * 10**place, seconds_per_byte=1e-9) for place, part in enumerate(UNIT_PARTS)
}
EACH_S = {part: 1e-3 * 10**place + 1e-9 * 10**6 for place, part in enumerate(UNIT_PARTS)}
CLUSTER = Cluster(world_size=2, all_gather=FREE, reduce_scatter=FREE, unit_overhead=MEASURED)
OPERATOR = OperatorProfile(
    name="a",
    kind="Linear",
    enclosing=("a", ""),
    parameter_bytes=10**6,
    num_trainable=250_000,
    gathered_bytes=10**6,
    trainable_bytes=10**6,
    gradient_bytes=10**6,
    optimizer_bytes=0,
)
ROOT, UNIT = partition(ModelProfile.in_turn([OPERATOR]), min_unit_bytes=0)


@pytest.mark.parametrize("num_micro_batches", [1, 3])
@pytest.mark.parametrize(
    ("mode", "per_micro_batch", "once"),
    [
        (ZDP, {"gather": 2, "flatten": 1, "reduce": 1}, {}),
        (DP, {"gather": 1, "flatten": 1, "reduce": 1}, {}),
        # the last micro-batch reduces, all others accumulate
        (replace(ZDP, sync="last"), {"gather": 2, "flatten": 1, "accumulate": 1}, {"reduce": 1, "accumulate": -1}),
        (replace(DP, sync="last"), {"flatten": 1, "accumulate": 1}, {"gather": 1, "reduce": 1, "accumulate": -1}),
    ],
)
def test_parts_are_charged_as_often_as_they_happen(mode, per_micro_batch, once, num_micro_batches):
    workload = Workload(micro_batch_size=3, num_micro_batches=num_micro_batches)
    found_s = overhead_s(UNIT, mode, cluster=CLUSTER, workload=workload)
    counts = {part: num_micro_batches * per_micro_batch.get(part, 0) + once.get(part, 0) for part in UNIT_PARTS}
    assert found_s == pytest.approx(sum(count * EACH_S[part] for part, count in counts.items()))


def test_the_simulated_step_has_the_same_overhead(model):
    profile = model(100, 200)
    units = partition(profile, min_unit_bytes=0)
    workload = Workload(micro_batch_size=1, num_micro_batches=5)
    for mode in ALL_MODES:
        modes = [DP if unit.is_root else mode for unit in units]
        terms = [
            overhead_s(unit, mode, cluster=CLUSTER, workload=workload) for unit, mode in zip(units, modes, strict=True)
        ]
        for overlaps in (False, True):
            cluster = replace(CLUSTER, overlaps=overlaps)
            found = simulate_step(Step(profile=profile, units=units, cluster=cluster, workload=workload), modes)
            assert found.overhead_s == pytest.approx(sum(terms))
            assert found.time_s == pytest.approx(sum(terms))  # nothing else takes time


def test_nothing_where_it_was_not_measured_or_the_unit_is_empty():
    unmeasured = replace(CLUSTER, unit_overhead={})
    assert overhead_s(UNIT, ZDP, cluster=unmeasured, workload=Workload(micro_batch_size=1)) == 0
    alone = replace(CLUSTER, world_size=1)
    assert overhead_s(UNIT, ZDP, cluster=alone, workload=Workload(micro_batch_size=1)) == 0
    assert overhead_s(ROOT, DP, cluster=CLUSTER, workload=Workload(micro_batch_size=1)) == 0
