"""What forward saves for backward."""

import pytest

from lightning_osdp.core.modes import MODES
from lightning_osdp.cost.activations import activations_cost


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_activations_are_those_of_one_micro_batch_in_every_mode(unit, cluster, workload, mode):
    saving = unit(8, activation_bytes_per_sample=2.5)
    found = [
        activations_cost(saving, mode, cluster=cluster(ranks), workload=workload(size, number))
        for ranks, size, number in [(1, 1, 1), (4, 1, 1), (4, 6, 1), (4, 6, 5)]
    ]
    assert [cost.memory_bytes for cost in found] == [2.5, 2.5, 15.0, 15.0]
    assert [cost.time_s for cost in found] == [0.0] * 4
