"""Overhead of the runtime for a unit: parts of what was measured, and the collectives that were in it."""

import dataclasses
from collections import Counter
from functools import partial

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.testbed.groups import fake_group
from lightning_osdp.core.cluster import UNIT_PARTS, Cluster, Link
from lightning_osdp.profiler.machine import unit_overhead
from lightning_osdp.profiler.machine.stopwatch import REPEATS_TOGETHER
from lightning_osdp.profiler.machine.unit_overhead import fitted, parts_s

CPU = torch.device("cpu")
SECONDS = st.floats(0.0, 10.0)


@given(SECONDS, SECONDS, SECONDS, SECONDS)
def test_parts_explain_what_was_measured(gather_s, flatten_s, reduce_s, accumulate_s):
    dp_s = gather_s + flatten_s + reduce_s
    held_s = min(flatten_s + accumulate_s, dp_s)
    found = parts_s(gather_s, dp_s, held_s)
    assert found["gather"] == pytest.approx(gather_s)
    assert found["gather"] + found["flatten"] + found["reduce"] == pytest.approx(dp_s)
    assert found["flatten"] + found["accumulate"] == pytest.approx(held_s)


NOISY = st.floats(-1.0, 10.0)


@given(NOISY, NOISY, NOISY)
def test_no_part_is_negative_and_a_micro_batch_takes_what_was_measured(gather_s, dp_s, held_s):
    found = parts_s(gather_s, dp_s, held_s)
    assert {*found, "stay"} == set(UNIT_PARTS)
    assert min(found.values()) >= 0
    assert found["gather"] + found["flatten"] + found["reduce"] == pytest.approx(max(0, gather_s, dp_s))


def test_calls_are_those_of_modules_with_hooks(monkeypatch):
    called, hooked = [], []

    def timed(run, device, *, repeats, is_busy_only=False, is_ahead=True):
        assert not is_ahead
        called.append(is_busy_only)
        before = len(hooked)
        run()
        return 5.0 if len(hooked) > before else 2.0 if is_busy_only else 6.0

    monkeypatch.setattr(unit_overhead, "fastest_together_s", timed)
    monkeypatch.setattr(unit_overhead, "_enter", lambda *_: hooked.append(True))
    link = Link(latency_s=0.0, seconds_per_byte=0.0)
    cluster = Cluster(world_size=2, all_gather=link, reduce_scatter=link)
    assert unit_overhead.measure_call_s(cluster, CPU) == 0.0  # noise: with hooks it took less
    found = unit_overhead.measure_call_s(dataclasses.replace(cluster, overlaps=True), CPU)
    assert found == pytest.approx(3 * (5.0 - 2.0) / unit_overhead._CALLS)
    assert called == [False, False, True, False, True]
    assert len(hooked) == 2 * 2 * unit_overhead._CALLS


def test_what_a_slice_takes_is_what_slices_after_the_first_add(monkeypatch):
    timed = []

    def seconds(run, device, *, repeats):
        run()
        modules = [type(module).__name__ for module in run.args[0].modules()]
        timed.append(Counter(modules)["Linear"])
        return float(timed[-1])

    monkeypatch.setattr(unit_overhead, "fastest_together_s", seconds)
    assert unit_overhead.measure_slice_s(CPU) == pytest.approx(1.0)
    assert timed == [6, 48]
    noise = iter([2.0, 1.0])
    monkeypatch.setattr(unit_overhead, "fastest_together_s", lambda *_, **__: next(noise))
    assert unit_overhead.measure_slice_s(CPU) == 0.0


@pytest.mark.parametrize(("seconds_per_byte", "width"), [(0.0, 1024), (2e-8, 512), (1.0, 512)])
def test_larger_units_are_measured_where_that_takes_no_time(seconds_per_byte, width):
    link = Link(latency_s=0.0, seconds_per_byte=seconds_per_byte)
    assert unit_overhead._large_width(Cluster(world_size=4, all_gather=link, reduce_scatter=link)) == width


@given(fixed=SECONDS, per_byte=st.floats(0.0, 1e-3), per_tensor=SECONDS)
def test_three_kinds_of_units_tell_what_a_unit_a_byte_and_a_tensor_take(fixed, per_byte, per_tensor):
    def seconds(num_bytes, num_tensors):
        return num_bytes, fixed + per_byte * num_bytes + per_tensor * num_tensors

    found = fitted(seconds(100, 1), seconds(10_000, 1), seconds(600, 6), num_tensors=6)
    for kind in ((100, 1), (10_000, 1), (600, 6), (5000, 3)):
        assert found.seconds(*kind) == pytest.approx(seconds(*kind)[1], abs=1e-6)


@given(NOISY, NOISY, NOISY)
def test_nothing_takes_less_than_no_time(small_s, large_s, several_s):
    found = fitted((100, small_s), (10_000, large_s), (600, several_s), num_tensors=6)
    assert min(found.fixed_s, found.seconds_per_byte, found.seconds_per_tensor) >= 0


def test_a_chain_gathers_and_reduces_as_is_subtracted(monkeypatch):
    counts = Counter()
    for name in ("all_gather_single", "reduce_scatter_single"):
        collective = getattr(dist, name)

        def counted(*args, name=name, collective=collective, **kwargs):
            counts[name] += 1
            return collective(*args, **kwargs)

        monkeypatch.setattr(dist, name, counted)
    num_units, num_runs = 2, REPEATS_TOGETHER + 1
    with fake_group(2):
        found = unit_overhead._chain_s(partial(unit_overhead._unit, 8, 3, CPU), num_units, CPU)
    assert set(found) == {"gathered", "dp", "held"}
    # forward alone once a run, forward and backward once; and once for all runs that hold what they have gathered
    assert counts == {
        "all_gather_single": num_units * (2 * num_runs + 1),
        "reduce_scatter_single": num_units * num_runs,
    }
