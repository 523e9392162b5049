"""What the runtime takes per unit: as measured, once per micro-batch, and nothing where nothing was measured."""

from dataclasses import replace

import pytest

from lightning_osdp.core.cluster import Cluster, Link, UnitOverhead
from lightning_osdp.core.modes import DP, ZDP
from lightning_osdp.core.profile import ModelProfile, OperatorProfile
from lightning_osdp.core.units import partition
from lightning_osdp.cost import Workload
from lightning_osdp.cost.overhead import overhead_cost

FREE = Link(latency_s=0.0, seconds_per_byte=0.0)
MEASURED = {"ZDP": UnitOverhead(fixed_s=2e-3, seconds_per_byte=1e-9), "DP": UnitOverhead(fixed_s=1e-3)}
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


@pytest.mark.parametrize(("mode", "seconds"), [(ZDP, 2e-3 + 1e-9 * 10**6), (DP, 1e-3)])
def test_fixed_and_per_byte_once_per_micro_batch(mode, seconds):
    once = overhead_cost(UNIT, mode, cluster=CLUSTER, workload=Workload(micro_batch_size=3))
    assert once.time_s == pytest.approx(seconds)
    assert once.memory_bytes == 0
    thrice = overhead_cost(UNIT, mode, cluster=CLUSTER, workload=Workload(micro_batch_size=3, num_micro_batches=3))
    assert thrice.time_s == pytest.approx(3 * seconds)


def test_nothing_where_it_was_not_measured_or_the_unit_is_empty():
    unmeasured = replace(CLUSTER, unit_overhead={})
    assert overhead_cost(UNIT, ZDP, cluster=unmeasured, workload=Workload(micro_batch_size=1)).time_s == 0
    assert overhead_cost(ROOT, DP, cluster=CLUSTER, workload=Workload(micro_batch_size=1)).time_s == 0
