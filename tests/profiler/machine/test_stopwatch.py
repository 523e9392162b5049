"""The stopwatch on a made-up device, whose times are known."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from benchmarks.testbed.emulated.cuda import FakeCuda
from benchmarks.testbed.groups import fake_group
from lightning_osdp.core.cluster import Contention, Link
from lightning_osdp.profiler import default_memory_limit_bytes
from lightning_osdp.profiler.machine import links, overlap, stopwatch
from lightning_osdp.profiler.machine.stopwatch import fastest_s, fastest_together_s
from lightning_osdp.profiler.timing.operation_time import Operand, Operation, replayed_s
from lightning_osdp.profiler.timing.step_time import time_step
from lightning_osdp.profiler.tracing.calls import recorded_calls

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
LINK = Link(latency_s=1e-4, seconds_per_byte=1e-9, steps=((2.0**13, 1e-4), (2.0**19, 6e-4)))


@pytest.fixture
def gpu():
    with FakeCuda(launch_s=5e-6).installed() as device:
        yield device


@pytest.mark.parametrize("kernel_s", [1e-6, 5e-6, 2e-3])
@pytest.mark.parametrize("num_kernels", [1, 30, 3000])
def test_what_the_host_takes_to_launch_is_no_part_of_what_the_device_takes(gpu, kernel_s, num_kernels):
    def call():
        for _ in range(num_kernels):
            gpu.launch(kernel_s)

    assert fastest_s(call, CUDA, repeats=3) == pytest.approx(kernel_s * num_kernels)
    assert fastest_s(call, CUDA, repeats=3, num_calls=4) == pytest.approx(kernel_s * num_kernels)


def test_a_host_that_takes_longer_than_the_device_may_wait_is_seen(gpu):
    def call():
        gpu.host_s += 1.0
        gpu.launch(1e-3)

    seconds = fastest_s(call, CUDA, repeats=3)
    assert 1.0 - 2 * stopwatch._MOST_LEAD_S < seconds < 1.0


def test_a_call_that_waits_for_the_device_is_timed_whole(gpu):
    def call():
        gpu.launch(1e-3)
        gpu.wait()
        gpu.launch(1e-3)

    assert fastest_s(call, CUDA, repeats=5) == pytest.approx(2e-3 + 5e-6)


def test_a_thread_that_waits_is_not_busy(monkeypatch):
    busy_s = iter(0.25 * number for number in range(100))
    monkeypatch.setattr(stopwatch, "time", SimpleNamespace(thread_time=lambda: next(busy_s), perf_counter=lambda: 0.0))
    with fake_group(2):
        assert fastest_together_s(lambda: None, CPU, repeats=2, is_busy_only=True) == 0.25
    assert next(busy_s) == 0.25 * 2 * 3  # one run to warm up, and two


@pytest.mark.parametrize(("is_warm", "expected"), [(False, 2.0), (True, 1.0)])
def test_the_first_run_counts_where_all_is_warm(monkeypatch, is_warm, expected):
    runs_s = iter([1.0, 3.0, 2.0])
    monkeypatch.setattr(stopwatch, "_run_s", lambda *_, **__: (next(runs_s), 0.0))
    with fake_group(2):
        assert fastest_together_s(lambda: None, CPU, repeats=2, is_warm=is_warm) == expected


def test_ranks_take_what_the_device_takes_together(gpu, monkeypatch):
    monkeypatch.setattr(dist, "barrier", lambda: pytest.fail("hosts would wait"))
    with fake_group(2):
        launches = lambda: [gpu.launch(3e-6) for _ in range(100)]  # noqa: E731
        assert fastest_together_s(launches, CUDA) == pytest.approx(300e-6)
        # each waits for its launch, which takes longer
        assert fastest_together_s(launches, CUDA, is_ahead=False) == pytest.approx(100 * gpu.launch_s, rel=0.02)


@pytest.mark.parametrize("floor_s", [2e-6, 20e-6])
def test_links_are_what_collectives_take_on_the_device(gpu, monkeypatch, floor_s):
    gpu.launch_s = 40e-6
    asked = []

    def collective(whole, shard, group):
        asked.append(whole.nbytes)
        gpu.launch(max(floor_s, whole.nbytes / 100e9))

    with fake_group(2):
        link = links.measure_link(CUDA, 200e6, collective)
        assert {size: asked.count(size) for size in asked} == {
            4**exponent: 10 * (6 if exponent <= 10 else 3) for exponent in range(7, 15)
        }
    for size in asked:
        assert link.ring_s(size, 2) == pytest.approx(max(floor_s, size / 100e9), rel=1e-6)


@pytest.mark.parametrize("is_hidden", [True, False])
def test_overlap_is_told_by_the_device(gpu, monkeypatch, is_hidden):
    sides = {"gather": 0.0, "product": 0.0}

    class Matrix:
        def __matmul__(self, other):
            sides["product"] += 200e-6

    def settle(_):  # the two streams have become one again
        gathering, computing = sides.values()
        gpu.launch(max(gathering, computing) if is_hidden else gathering + computing)
        sides.update(gather=0.0, product=0.0)

    monkeypatch.setattr(torch, "randn", lambda *_, **__: Matrix())
    monkeypatch.setattr(overlap, "all_gather", lambda *_: sides.update(gather=sides["gather"] + 70e-6))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: SimpleNamespace(wait_stream=settle))
    with fake_group(2):
        assert overlap.measure_overlap(CUDA, LINK) == (is_hidden, (), Contention())


IN_NODES = ("reduce_in_node", "scatter_in_node")


@pytest.mark.parametrize(
    ("gathers", "reductions", "all_reduces", "expected"),
    [
        (1.0, 1.0, 1.0, (True, IN_NODES)),
        (1.0, 0.0, 1.0, (True, ("reduce", *IN_NODES))),
        (0.1, 1.0, 1.0, (True, ("gather", "gather_in_node", *IN_NODES))),
        (1.0, 1.0, 0.1, (True, ("reduce_whole", "all_reduce", *IN_NODES))),
        (0.4, 0.6, 0.5, (True, IN_NODES)),  # contention says how much is lost
        (0.0, 0.1, 0.1, (False, ())),
    ],
)
def test_collectives_are_tried_apart_on_cpu(monkeypatch, gathers, reductions, all_reduces, expected):
    clock = SimpleNamespace(now_s=0.0, busy_s=0.0)

    class Matrix:
        def __matmul__(self, other):
            clock.now_s += 200e-6

    def begin(hidden_share):
        # collectives follow each other beside computing, the rest of them in the time of the host
        begins_s = max(clock.now_s, clock.busy_s)
        clock.busy_s = begins_s + 70e-6
        clock.now_s += (1 - hidden_share) * 70e-6
        return SimpleNamespace(wait=lambda: setattr(clock, "now_s", max(clock.now_s, clock.busy_s)))

    def timed(run, device, **_):
        start_s = clock.busy_s = clock.now_s
        run()
        return clock.now_s - start_s

    monkeypatch.setattr(torch, "randn", lambda *_, **__: Matrix())
    monkeypatch.setattr(overlap, "_begin_all_gather", lambda *_: begin(gathers))
    monkeypatch.setattr(overlap, "begin_reduce_scatter", lambda *_: begin(reductions))
    monkeypatch.setattr(overlap, "_begin_all_reduce", lambda *_: begin(all_reduces))
    monkeypatch.setattr(overlap, "fastest_together_s", timed)
    with fake_group(2):
        overlaps, waits_for, contention = overlap.measure_overlap(CPU, LINK)
    assert (overlaps, waits_for) == expected
    if {gathers, reductions} == {0.4, 0.6}:
        assert contention.computing > 1.2
    elif gathers == 1.0:
        assert (contention.computing, contention.collectives) == pytest.approx((1.0, 1.0), abs=0.05)


def test_replays_and_segments_are_timed_on_the_device(gpu):
    operand = Operand((2, 3), None, torch.float32, CPU)
    operation = Operation(torch.ops.aten.exp.default, (operand,), (), (operand,), 0)
    with Launching(gpu, 1e-6):
        assert replayed_s(operation, CUDA) == pytest.approx(1e-6)
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))

    def loss():
        gpu.launch(1.0)
        x = model[0](torch.ones(1, 2))
        gpu.launch(2.0)
        return model[1](x).sum()

    with recorded_calls(model) as calls:
        loss()
    seconds = time_step(model, calls, CUDA, loss)
    # the host issues each of both launches and waits for the second one at the end
    assert seconds.forward_s == pytest.approx((3.0, 0.0, 0.0), abs=1e-3)


class Launching(torch.utils._python_dispatch.TorchDispatchMode):
    """Mode that launches a kernel of so many seconds for each exponential."""

    def __init__(self, gpu, seconds):
        super().__init__()
        self.gpu, self.seconds = gpu, seconds

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.exp.default:
            self.gpu.launch(self.seconds)
        return func(*args, **(kwargs or {}))


def test_the_default_limit_is_what_is_free_or_cached(gpu):
    gpu.allocate(2**32)
    gpu.allocate(-(2**31))
    free = 2**34 - 2**31
    assert default_memory_limit_bytes(CUDA, local_ranks=1) == int(free * 0.9)
    with pytest.raises(torch.OutOfMemoryError, match=r"Tried to allocate 16384\.00 MiB"):
        gpu.allocate(2**34)
