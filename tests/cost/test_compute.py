"""The gamma term of equation 2."""

import pytest

from lightning_osdp.core.modes import MODES
from lightning_osdp.cost.terms import compute_s


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@pytest.mark.parametrize(
    ("micro_batch_size", "num_micro_batches", "expected_s"),
    # gamma = 2 s forward + 3 s backward per sample
    [(1, 1, 5.0), (4, 1, 20.0), (4, 3, 60.0)],
)
def test_computing_takes_gamma_per_sample(
    unit, cluster, workload, mode, micro_batch_size, num_micro_batches, expected_s
):
    computing = unit(8, forward_s_per_sample=2.0, backward_s_per_sample=3.0)
    work = workload(micro_batch_size, num_micro_batches)
    for world_size in (1, 8):  # each rank computes its own samples
        assert compute_s(computing, mode, cluster=cluster(world_size), workload=work) == expected_s
