import dataclasses

import pytest

from lightning_osdp.errors import ConfigurationError
from lightning_osdp.scheduler import make_plan
from lightning_osdp.simulation import simulate


@pytest.fixture
def profile(model, operator):
    sizes = [400, 800, 1200, 800, 400]
    return model(
        *(operator(f"h.{i // 2}.m{i}", size, activation_bytes_per_sample=50) for i, size in enumerate(sizes)),
        batch_bytes_per_sample=8.0,
        loss_activation_bytes_per_sample=20,
    )


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("limit_bytes", [11_000, 12_000, 2**20])
@pytest.mark.parametrize("prefetch", ["pre", "post", "none"])
def test_the_largest_moment_is_the_peak_of_the_plan(profile, cluster, world_size, limit_bytes, prefetch):
    ranks = cluster(world_size, latency_s=1.0)
    plan = make_plan(
        profile,
        ranks,
        memory_limit_bytes=limit_bytes * (3 - world_size),
        micro_batch_size=3,
        backward_prefetch=prefetch,
    )
    estimate = simulate(plan, profile, ranks)
    assert estimate.peak.peak_bytes == plan.peak_bytes
    assert max(moment.num_bytes for _, moment in estimate.moments) == pytest.approx(plan.peak_bytes, abs=1)
    assert estimate.time_s == pytest.approx(plan.step_time_s)


def test_slices_are_refused(profile, cluster):
    plan = make_plan(profile, cluster(2), memory_limit_bytes=2**20, micro_batch_size=3)
    split = dataclasses.replace(plan.units[1], modes=("ZDP", "DP"))
    with pytest.raises(ConfigurationError, match="got 2 slices in unit"):
        simulate(dataclasses.replace(plan, units=(plan.units[0], split, *plan.units[2:])), profile, cluster(2))
