"""The sweep over micro-batch sizes against all of them, and plans of random models."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_osdp.core.batch_policy import BatchPolicy
from lightning_osdp.core.plans.search_space import SearchSpace
from lightning_osdp.errors import InfeasibleError
from lightning_osdp.planner.engine import FSDP2
from lightning_osdp.planner.scheduler import PlanMethod, competition, make_plan, sweep
from lightning_osdp.planner.search import SOLVERS
from tests.support.plans import keeping
from tests.support.steps import TWO_NODES
from tests.support.tiers import examples, in_turn

EVERY_UNIT = SearchSpace(min_unit_bytes=0)


UNITS_AS_THEY_ARE = SearchSpace(min_unit_bytes=0, share_units=False)


def plan(profile, cluster, **options):
    return make_plan(profile, cluster, **{"search_space": EVERY_UNIT, "memory_limit_bytes": 560, **options})


@pytest.fixture
def tried(monkeypatch):
    """Sizes that modes were assigned for, and that were looked at for whether they fit, in order."""
    assigned, looked_at = [], []
    assign, fits = competition.assign_ahead, sweep.Sweep.fits

    def record_assign(setting, **options):
        assigned.append(setting.workload.micro_batch_size)
        return assign(setting, **options)

    def record_fits(self, size):
        looked_at.append(size)
        return fits(self, size)

    monkeypatch.setattr(competition, "assign_ahead", record_assign)
    monkeypatch.setattr(sweep.Sweep, "fits", record_fits)
    return assigned, looked_at


def test_sizes_double_to_the_first_that_does_not_fit_and_none_above_is_tried(model, operator, cluster, tried):
    # reduce(m) = 1 + 2 (states) + 2 (sent) + 2 (last gradient) + 1 (received) + 2 (gloo's copy), and a byte per sample
    profile = model(operator("m", 2), batch_bytes_per_sample=1.0, loss_s_per_sample=0.1)
    found = plan(
        profile, cluster(2, seconds_per_byte=1.0), memory_limit_bytes=100, micro_batch_size=BatchPolicy.scale()
    )
    assigned, looked_at = tried
    assert looked_at == [1, 2, 4, 8, 16, 32, 64, 128, 96, 80, 88, 92, 90, 91]
    assert found.micro_batch_size == max(assigned) == 90


def test_sizes_that_cannot_be_best_are_left_out(uneven, cluster, tried):
    plan(uneven, cluster(2, seconds_per_byte=0.01), memory_limit_bytes=10**6, micro_batch_size=BatchPolicy.scale())
    assigned, _ = tried
    # everything is kept up to the largest size but the last one or two: nothing between is open for long
    assert len(assigned) < 12
    assert len(set(assigned)) == len(assigned)


def test_the_largest_size_is_one_that_fits_as_simulated_where_that_is_more_than_the_closed_form(model, operator):
    # two micro-batches, sharded in nodes: by the closed form 5,708 bytes and 100 a sample, and more as simulated
    profile = model(operator("first", 8, activation_bytes_per_sample=100), *(operator(f"{i}", 800) for i in range(4)))
    options = {
        "memory_limit_bytes": 6_758,
        "search_space": SearchSpace(modes=("HSDP", "HDP"), min_unit_bytes=0, share_units=False, slices=(1,)),
    }
    found = plan(profile, TWO_NODES, micro_batch_size=BatchPolicy.scale(num_micro_batches=2), **options)
    assert (found.micro_batch_size, found.peak_bytes) == (9, 6_708)
    assert plan(profile, TWO_NODES, micro_batch_size=BatchPolicy.fixed(9, 2), **options).peak_bytes == 6_708
    with pytest.raises(InfeasibleError, match="micro-batches of 5 fit"):
        plan(profile, TWO_NODES, micro_batch_size=BatchPolicy.fixed(10, 2), **options)


def test_a_size_that_has_no_plan_ends_the_sweep(uneven, cluster, monkeypatch):
    candidate = sweep.Sweep.candidate

    def of_some(self, size):
        return candidate(self, size) if size in {1, 1000} else None

    monkeypatch.setattr(sweep.Sweep, "candidate", of_some)
    options = {"memory_limit_bytes": 10**9, "micro_batch_size": BatchPolicy.scale(1000)}
    assert plan(uneven, cluster(2, seconds_per_byte=0.01), **options).micro_batch_size == 1000


@st.composite
def sweeps(draw):
    """Operators of a chain, and a largest size."""
    num_bytes = st.integers(0, 60)
    operators = [
        {
            "name": f"m{index}",
            "parameter_bytes": draw(st.integers(1, 400)),
            "activation_bytes_per_sample": draw(num_bytes),
            "backward_workspace_bytes_per_sample": draw(num_bytes),
            "forward_s_per_sample": draw(st.sampled_from([0.0, 0.01, 0.1, 0.5])),
        }
        for index in range(draw(st.integers(1, 6)))
    ]
    return operators, draw(st.integers(1, 24)), draw(st.floats(0.5, 3.0)), draw(st.sampled_from([1, 2, 4]))


@pytest.mark.parametrize(("search", "overlaps"), in_turn(SOLVERS, [True, False]))
@examples(15)
@given(case=sweeps())
def test_no_size_is_better_than_the_chosen_one_by_more_than_the_tolerance(
    model, operator, cluster, search, overlaps, case
):
    # samples/s are not unimodal: they drop wherever another unit has to be sharded. Every size is compared.
    operators, most, share, world_size = case
    profile = model(*(operator(**made) for made in operators))
    ring = dataclasses.replace(cluster(world_size, latency_s=0.01, seconds_per_byte=0.001), overlaps=overlaps)
    limit_bytes = int(share * 4 * sum(made["parameter_bytes"] for made in operators))
    # units as they are: which of them are shared differs from size to size, and is no part of what the gap is about
    options = {
        "memory_limit_bytes": limit_bytes,
        "method": PlanMethod(search=search),
        "search_space": UNITS_AS_THEY_ARE,
    }
    unlimited = {**options, "memory_limit_bytes": 10**9, "engine": FSDP2(backward_prefetch="none")}
    least = [plan(profile, ring, micro_batch_size=size, **unlimited).all_zdp_peak_bytes for size in range(1, most + 1)]
    fitting = [size for size, peak_bytes in enumerate(least, start=1) if peak_bytes <= limit_bytes]
    if not fitting:
        with pytest.raises(InfeasibleError):
            plan(profile, ring, micro_batch_size=BatchPolicy.scale(most), **options)
        return
    found = [plan(profile, ring, micro_batch_size=size, **options) for size in fitting]
    chosen = plan(profile, ring, micro_batch_size=BatchPolicy.scale(most), **options)
    best = max(each.samples_per_s for each in found)
    assert best <= chosen.samples_per_s * (1 + chosen.gap) * (1 + 1e-12)
    assert best / (1 + sweep.TOLERANCE) <= chosen.samples_per_s * (1 + 1e-12)
    assert chosen.samples_per_s == found[chosen.micro_batch_size - 1].samples_per_s
    assert chosen.peak_bytes <= limit_bytes


def test_throughput_is_not_unimodal_in_the_micro_batch(uneven, cluster):
    ring = cluster(2, seconds_per_byte=0.01)
    at = [plan(uneven, ring, micro_batch_size=size, memory_limit_bytes=700).samples_per_s for size in range(1, 7)]
    assert at[3] > at[4] < at[5]  # 4 samples keep everything, 5 and 6 do not


@examples(40)
@given(case=sweeps(), number=st.integers(1, 3), modes=st.sampled_from([("ZDP", "DP"), ("ZDP",), ("DP",)]))
def test_what_a_plan_states_agrees_with_itself(model, operator, cluster, case, number, modes):
    operators, size, _, world_size = case
    profile = model(
        operator("norm", 40, enclosing=("",), forward_s_per_sample=0.1),
        *(operator(**made) for made in operators),
        fingerprint={"weight": "float32[2]"},
    )
    ring = cluster(world_size, latency_s=0.01, seconds_per_byte=0.001)
    found = plan(
        profile,
        ring,
        memory_limit_bytes=10**6,
        micro_batch_size=BatchPolicy.fixed(size, number),
        search_space=SearchSpace(modes=modes, min_unit_bytes=100),
        engine=FSDP2(backward_prefetch="pre", forward_prefetch=True),
    )
    assert found.fingerprint == {"weight": "float32[2]"}
    assert (found.world_size, found.micro_batch_size, found.num_micro_batches) == (world_size, size, number)
    assert found.samples_per_s == pytest.approx(size * number * world_size / found.step_time_s)
    assert (found.memory_limit_bytes, found.solver, found.notes, found.gap) == (10**6, "depth_first", (), 0.0)
    assert (found.backward_prefetch, found.forward_prefetch) == ("pre", True)
    assert found.units[0].name == ""
    assert found.units[0].menu == ()
    assert sorted(decision.operator for decision in found.decisions) == sorted(each.name for each in profile)
    assert {decision.modes for decision in found.decisions if decision.unit} <= {(mode,) for mode in modes}
    assert found.step_time_s == pytest.approx(sum(unit.time_s for unit in found.units))
    # plain FSDP is the same model and the same batch, whatever was offered
    plain = plan(
        profile,
        ring,
        memory_limit_bytes=10**6,
        micro_batch_size=BatchPolicy.fixed(size, number),
        search_space=SearchSpace(modes=("ZDP",), min_unit_bytes=100),
        engine=FSDP2(backward_prefetch="pre", forward_prefetch=True),
    )
    assert (found.all_zdp_step_time_s, found.all_zdp_peak_bytes) == (
        plain.all_zdp_step_time_s,
        plain.all_zdp_peak_bytes,
    )
    assert (plain.step_time_s, plain.peak_bytes) <= (plain.all_zdp_step_time_s, plain.all_zdp_peak_bytes)
    # which units are shared differs by modes
    stated, others = ({unit.operators: keeping(unit) for unit in each.units} for each in (found, plain))
    assert all(stated[operators] == others[operators] for operators in stated.keys() & others.keys())
    if stated.keys() == others.keys():
        assert list(stated) == list(others)
