"""What the runtime takes for a unit: parts of what was measured, and which collectives were in it."""

from collections import Counter

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.testbed.groups import fake_group
from lightning_osdp.core.cluster import UNIT_PARTS, Cluster, Link
from lightning_osdp.profiler import fastest, overhead
from lightning_osdp.profiler.overhead import parts_s

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
    assert set(found) == set(UNIT_PARTS)
    assert min(found.values()) >= 0
    assert found["gather"] + found["flatten"] + found["reduce"] == pytest.approx(max(0, gather_s, dp_s))


@pytest.mark.parametrize(("seconds_per_byte", "width"), [(0.0, 1024), (2e-8, 512), (1.0, 512)])
def test_larger_units_are_measured_where_that_takes_no_time(seconds_per_byte, width):
    link = Link(latency_s=0.0, seconds_per_byte=seconds_per_byte)
    assert overhead._large_width(Cluster(world_size=4, all_gather=link, reduce_scatter=link)) == width


def test_a_chain_gathers_and_reduces_as_is_subtracted(monkeypatch):
    counts = Counter()
    for kind in ("all_gather", "reduce_scatter_single", "reduce_scatter_tensor"):
        if hasattr(dist, kind):
            collective = getattr(dist, kind)

            def counted(*args, kind=kind, collective=collective, **kwargs):
                counts[kind.removesuffix("_single").removesuffix("_tensor")] += 1
                return collective(*args, **kwargs)

            monkeypatch.setattr(dist, kind, counted)
    num_units, num_runs = 2, fastest.REPEATS + 1
    with fake_group(2):
        found = overhead._chain_s(8, num_units, torch.device("cpu"), "fsdp1")
    assert set(found) == {"gathered", "dp", "held"}
    # forward alone once a run, forward and backward once; and once for all runs that hold what they have gathered
    assert counts == {"all_gather": num_units * (2 * num_runs + 1), "reduce_scatter": num_units * num_runs}
