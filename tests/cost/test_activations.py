"""What forward saves for backward."""

import pytest

from lightning_osdp.core.modes import MODES
from lightning_osdp.cost import saved_bytes
from lightning_osdp.cost.terms import activations_s


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_to_keep_activations_takes_their_bytes_of_one_micro_batch_and_no_time(unit, cluster, workload, mode):
    saving = unit(8, activation_bytes_per_sample=2.5)
    assert [saved_bytes(saving, mode.activations, size) for size in (1, 6)] == [2.5, 15.0]
    for ranks, size, number in [(1, 1, 1), (4, 1, 1), (4, 6, 1), (4, 6, 5)]:
        assert activations_s(saving, mode, cluster=cluster(ranks), workload=workload(size, number)) == 0.0
