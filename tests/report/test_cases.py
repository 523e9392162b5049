"""Plans under other circumstances."""

import pytest

from lightning_osdp.report.cases import what_if
from tests.support.steps import TWO_NODES


@pytest.fixture(scope="module")
def profile(model, operator):
    return model(*(operator(f"{i}", 800) for i in range(3)))


def found(profile, **circumstances):
    return what_if(profile, TWO_NODES, memory_limits_bytes=[2**40], micro_batch_sizes=[1], **circumstances)


def test_a_rate_is_that_of_all_links_inside_of_nodes_and_between_them(profile):
    measured, faster = found(profile, link_rates=(1.0, 10.0))
    assert measured.plan.needs_nodes  # so it uses both
    assert faster.plan.step_time_s == pytest.approx(measured.plan.step_time_s / 10)  # nothing else takes time


def test_ranks_that_fit_in_one_node_do_not_use_the_links_between_nodes(profile):
    within, across = found(profile, world_sizes=(4, 6))
    # one gather and one reduction of 2,400 bytes
    assert within.plan.step_time_s == pytest.approx(2 * 3 / 4 * 2_400 * 1e-6)
    assert across.plan.step_time_s == pytest.approx(2 * 5 / 6 * 2_400 * 1e-3)
