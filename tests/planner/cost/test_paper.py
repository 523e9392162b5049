"""The paper's memory: a sum over units, whatever they do when."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_osdp.core.axes import DP, ZDP
from lightning_osdp.core.step import Step
from lightning_osdp.core.units import partition
from lightning_osdp.planner.cost import PAPER_TERMS, TERMS, paper_memory
from lightning_osdp.planner.cost.paper import model_states_bytes
from tests.support.steps import step_of
from tests.support.tiers import examples

# ---- model states: m_ZDP and m_DP by hand


def num_bytes(unit, world_size):
    """Returns bytes of a unit's model states under ZDP and under DP."""
    return [model_states_bytes(unit, mode, world_size) for mode in (ZDP, DP)]


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
def test_dp_keeps_the_parameter_whole_and_shards_the_rest(unit, world_size, zdp_bytes, dp_bytes):
    assert num_bytes(unit(80), world_size) == [zdp_bytes, dp_bytes]


def test_a_frozen_unit_is_its_parameter(unit):
    assert num_bytes(unit(80, frozen=True), 4) == [20.0, 80.0]


def test_dp_keeps_the_parameter_as_it_is_gathered(unit):
    # half precision: 40 gathered bytes, and gradients and Adam at rest, (80 + 160) / 4
    half = unit(80, gathered_bytes=40, gradient_bytes=40)
    assert num_bytes(half, 4) == [80.0, 100.0]


@examples(50)
@given(parameter_bytes=st.integers(0, 2**35), frozen=st.booleans(), world_size=st.integers(1, 512))
def test_zdp_is_never_bigger_than_dp(unit, parameter_bytes, frozen, world_size):
    zdp_bytes, dp_bytes = num_bytes(unit(parameter_bytes, frozen=frozen), world_size)
    assert 0 <= zdp_bytes <= dp_bytes * (1 + 1e-12)


# ---- their sum


def test_bytes_add_up_over_units_of_any_modes(model, operator, cluster, workload):
    operators = [operator("", 40), *(operator(f"m{i}", 80 + i, activation_bytes_per_sample=10) for i in range(3))]
    profile = model(*operators, loss_activation_bytes_per_sample=5)
    units = partition(profile, min_unit_bytes=0)
    memory = paper_memory(Step(profile=profile, units=units, cluster=cluster(4), workload=workload(2)))
    for chosen in itertools.product((ZDP, DP), repeat=3):
        modes = (DP, *chosen)
        # parameters, gradients and Adam's two; 10 bytes of each operator and 5 of the loss per sample
        states = sum(80 + i + (80 + i) * 3 / 4 if mode is DP else 80 + i for i, mode in enumerate(chosen))
        expected = 40 + 40 * 3 / 4 + states + 2 * 35
        assert memory.peak(modes).peak_bytes == pytest.approx(expected, abs=1)
        each = (model_states_bytes(unit, mode, 4) for unit, mode in zip(units, modes, strict=True))
        assert sum(each) + 2 * 35 == pytest.approx(expected)
    assert memory.peak((DP,) * 4).parts.keys() == {"model states", "activations", "gathered parameters"}


def test_half_precision_keeps_no_less_than_it_shards(model, operator):
    memory = paper_memory(step_of(model(operator("m", 80, gathered_bytes=40)), world_size=1))
    assert memory.gathered_bytes == (0.0,)


def test_seconds_are_those_of_equation_two_alone():
    assert set(TERMS) - set(PAPER_TERMS) == {"copies", "overhead", "activations"}
