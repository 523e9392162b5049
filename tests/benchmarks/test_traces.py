"""Traces of a step, predicted and real, read in the same words."""

import pytest

from benchmarks import traces
from benchmarks.measures.traces import PARTS, predicted_step, real_steps, table, typical
from lightning_osdp import SearchSpace, chrome_trace, make_plan, simulate

MS = 1e-3


def event(name, start_ms, length_ms):
    return {"ph": "X", "name": name, "ts": 1e3 * start_ms, "dur": 1e3 * length_ms}


def real(begin_ms, reduced_ms=5):
    """A step of 100 ms: 30 of forward and 40 of backward, in each of which a unit is gathered for 6 ms and more."""
    unit = "(model.h.0, model.h.1)"
    found = [
        event("[pl][profile]run_training_batch", 0, 100),
        event("Optimizer.step#AdamW.step", 2, 96),
        event("[pl][profile][Strategy]OSDPStrategy.training_step", 5, 30),
        event(f"FSDP::pre_forward {unit}", 6, 10),
        event(f"FSDP::all_gather {unit}", 6, 1),
        event("gloo:all_gather", 8, 6),
        event("aten::mm", 16, 10),
        event("[pl][profile][Strategy]OSDPStrategy.backward", 40, 40),
        event(f"FSDP::all_gather {unit}", 42, 1),
        event(f"FSDP::pre_backward {unit}", 42, 8),
        event("gloo:all_gather", 43, 6),
        event(f"FSDP::post_backward_reduce {unit}", 70, 8),
        event("gloo:recv", 71, reduced_ms - 1),
        event("gloo:recv", 71.5, reduced_ms - 0.5),
        event("gloo:all_reduce", 85, 2),  # clipping's
    ]
    moved = [{**each, "ts": each["ts"] + 1e3 * begin_ms} for each in found]
    return [{"ph": "M", "name": "process_name"}, *moved]


def test_a_real_step_is_what_its_trace_says():
    cut = [each for each in real(500) if "backward" not in each["name"]]
    steps = real_steps({"traceEvents": real(0) + real(250) + cut}, num_micro_batches=1)
    assert len(steps) == 2
    for step in steps:
        assert {part: step.seconds(part) for part in PARTS} == {
            "forward": pytest.approx(20 * MS),
            "backward": pytest.approx((40 - 8 - 8) * MS),
            "all-gather": pytest.approx(12 * MS),
            "reduce-scatter": pytest.approx(5 * MS),
            "runtime of units": pytest.approx((10 + 8 + 8 - 12 - 5) * MS),
            "optimizer step": pytest.approx((98 - 80) * MS),
            "other": pytest.approx((5 + 5 + 2) * MS),
        }
        assert sum(map(step.seconds, PARTS)) == pytest.approx(step.total_s) == pytest.approx(100 * MS)
        assert step.collectives == [
            ("all-gather", "model.h.0"), ("all-gather", "model.h.0"), ("reduce-scatter", "model.h.0")
        ]  # fmt: skip


def test_a_reduce_scatter_goes_on_beside_computing():
    (step,) = real_steps({"traceEvents": real(0, reduced_ms=14)}, num_micro_batches=1)
    assert step.collectives[-1] == ("reduce-scatter", "model.h.0")
    assert step.seconds("reduce-scatter") == pytest.approx(14 * MS)
    assert step.seconds("runtime of units") == pytest.approx((10 + 8 + 8 - 12 - 7) * MS)
    assert step.seconds("other") == pytest.approx((5 + 5 + 2) * MS)
    beside_ms = 85 - 78  # backward until 80, and the optimizer's step from there
    assert sum(map(step.seconds, PARTS)) == pytest.approx((100 + beside_ms) * MS)


def test_a_real_step_has_all_of_its_micro_batches():
    """Tracing begins with the second one of a step."""
    begun = [[each for each in real(at) if not each["name"].startswith("Optimizer")] for at in (250, 500)]
    (step,) = real_steps({"traceEvents": real(0) + begun[0] + real(380) + begun[1]}, num_micro_batches=2)
    assert step.total_s == pytest.approx((130 + 100) * MS)
    assert step.seconds("forward") == pytest.approx(2 * 20 * MS)
    assert len(step.collectives) == 6


def test_a_predicted_step_is_what_was_simulated(model, operator, cluster):
    times = {"forward_s_per_sample": 0.1, "backward_s_per_sample": 0.2}
    profile = model(operator("a", 100, **times), operator("b", 100, **times), loss_s_per_sample=0.05)
    ranks = cluster(2, seconds_per_byte=0.01)
    space = SearchSpace(modes=("ZDP",), share_units=False, min_unit_bytes=0)
    plan = make_plan(profile, ranks, memory_limit_bytes=10**6, micro_batch_size=1, search_space=space)
    step, estimate = predicted_step(chrome_trace(plan, profile, ranks)), simulate(plan, profile, ranks)
    assert step.total_s == estimate.time_s
    assert sum(map(step.seconds, ("all-gather", "reduce-scatter"))) == pytest.approx(estimate.communication_s)
    assert step.seconds("forward") == pytest.approx(0.2 + 0.05)
    assert step.seconds("other") == pytest.approx(0.0)
    kinds = [kind for kind, _ in step.collectives]
    assert (kinds.count("all-gather"), kinds.count("reduce-scatter")) == (4, 2)
    assert {unit for _, unit in step.collectives} == {"a", "b"}


def test_the_table_has_a_row_for_each_part_and_for_all():
    steps = real_steps({"traceEvents": real(0) + real(250)}, num_micro_batches=1)
    assert table(steps[0], steps).row_count == len(PARTS) + 1
    assert typical(steps) in steps


@pytest.mark.slow
@pytest.mark.distributed
def test_a_traced_training_has_the_predicted_collectives(tmp_path, capfd):
    picture = tmp_path / "traces.svg"
    traces.main(folder=tmp_path, picture=picture, steps=5)
    assert "collectives, in the same order" in capfd.readouterr().out
    assert picture.read_text().startswith("<?xml")
