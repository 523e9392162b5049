"""m_ZDP and m_DP by hand."""

import pytest

from lightning_osdp.core.modes import DP, ZDP
from lightning_osdp.cost.model_states import model_states_cost


def num_bytes(unit, cluster, workload):
    """Of ZDP and of DP."""
    costs = [model_states_cost(unit, mode, cluster=cluster, workload=workload) for mode in (ZDP, DP)]
    assert [cost.time_s for cost in costs] == [0.0, 0.0]
    return [cost.memory_bytes for cost in costs]


@pytest.mark.parametrize(
    ("world_size", "zdp_bytes", "dp_bytes"),
    [
        # parameters 80, gradients 80, Adam 160
        (2, 160.0, 200.0),  # 320 / 2;  80 + 240 / 2
        (4, 80.0, 140.0),  # 320 / 4;  80 + 240 / 4
        (8, 40.0, 110.0),  # 320 / 8;  80 + 240 / 8
        (1, 320.0, 320.0),
    ],
)
def test_dp_keeps_the_parameter_whole_and_shards_the_rest(unit, cluster, workload, world_size, zdp_bytes, dp_bytes):
    assert num_bytes(unit(80), cluster(world_size), workload()) == [zdp_bytes, dp_bytes]


def test_a_frozen_unit_is_its_parameter(unit, cluster, workload):
    assert num_bytes(unit(80, frozen=True), cluster(4), workload()) == [20.0, 80.0]


def test_dp_keeps_the_parameter_as_it_is_gathered(unit, cluster, workload):
    # half precision: 40 gathered bytes, and gradients and Adam at rest, (80 + 160) / 4
    half = unit(80, gathered_bytes=40, gradient_bytes=40)
    assert num_bytes(half, cluster(4), workload()) == [80.0, 100.0]


def test_model_states_do_not_depend_on_the_samples(unit, cluster, workload):
    assert num_bytes(unit(80), cluster(4), workload(5, 3)) == [80.0, 140.0]
