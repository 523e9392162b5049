"""One contract over all terms."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_osdp.core.modes import DP, MODES, ZDP
from lightning_osdp.cost import TERMS, unit_s

cases = st.fixed_dictionaries(
    {
        "parameter_bytes": st.integers(0, 2**35),
        "frozen": st.booleans(),
        "num_calls": st.integers(1, 4),
        "activation_bytes_per_sample": st.floats(0, 1e9),
        "forward_s_per_sample": st.floats(0, 1.0),
        "backward_s_per_sample": st.floats(0, 1.0),
    }
)
sizes = {"world_size": st.integers(1, 512), "samples": st.integers(1, 64), "number": st.integers(1, 8)}


@pytest.mark.parametrize("name", TERMS)
@settings(deadline=None, max_examples=50)
@given(case=cases, **sizes)
def test_every_term_is_pure_and_charges_nothing_negative(
    unit, cluster, workload, name, case, world_size, samples, number
):
    one, ring, work = (
        unit(**case),
        cluster(world_size, latency_s=1e-5, seconds_per_byte=1e-10),
        workload(samples, number),
    )
    for mode in MODES.values():
        time_s = TERMS[name](one, mode, cluster=ring, workload=work)
        assert time_s >= 0
        assert time_s == TERMS[name](one, mode, cluster=ring, workload=work)


@pytest.mark.parametrize("name", TERMS)
@settings(deadline=None, max_examples=50)
@given(case=cases, **sizes)
def test_zdp_is_never_faster_than_dp(unit, cluster, workload, name, case, world_size, samples, number):
    one, ring, work = (
        unit(**case),
        cluster(world_size, latency_s=1e-5, seconds_per_byte=1e-10),
        workload(samples, number),
    )
    zdp_s, dp_s = (TERMS[name](one, mode, cluster=ring, workload=work) for mode in (ZDP, DP))
    assert zdp_s >= dp_s


@pytest.mark.parametrize("name", TERMS)
@settings(deadline=None, max_examples=50)
@given(case=cases, **sizes)
def test_terms_are_linear_in_the_micro_batch_and_modes_differ_by_the_same_at_every_size(
    unit, cluster, workload, name, case, world_size, samples, number
):
    # what the sweep over sizes relies on: a bound at one size bounds all larger ones
    one, ring = unit(**case), cluster(world_size, latency_s=1e-5, seconds_per_byte=1e-10)

    def time_s(mode, size):
        return TERMS[name](one, mode, cluster=ring, workload=workload(size, number))

    zdp, dp = ([time_s(mode, size) for size in (samples, 2 * samples)] for mode in (ZDP, DP))
    assert zdp[1] - zdp[0] == pytest.approx(dp[1] - dp[0])
    assert zdp[1] <= 2 * zdp[0] * (1 + 1e-12)
    third = time_s(ZDP, 3 * samples)
    assert third - zdp[1] == pytest.approx(zdp[1] - zdp[0], abs=1e-9 * third)


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_a_unit_takes_the_sum_of_the_terms(unit, cluster, workload, mode):
    one = unit(800, activation_bytes_per_sample=3.0, forward_s_per_sample=2.0)
    arguments = {"cluster": cluster(4), "workload": workload(5)}
    assert unit_s(one, mode, **arguments) == pytest.approx(sum(term(one, mode, **arguments) for term in TERMS.values()))
