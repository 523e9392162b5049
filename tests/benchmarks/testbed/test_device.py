"""An emulated device: moments of its clock, and steps that compute what plain ones compute."""

import time
from dataclasses import replace

import pytest
import torch

from benchmarks.testbed.beside_fsdp.host import Offloaded, Planned
from benchmarks.testbed.emulated.blocks import Blocks
from benchmarks.testbed.emulated.device import Device, Stream
from benchmarks.testbed.groups import simulated_group
from benchmarks.testbed.plans import plan_of
from lightning_osdp.apply import local
from lightning_osdp.core.axes import Treatment
from lightning_osdp.core.plans.parts import Block

RATE = 1e3


def device_of(**fields):
    return Device(**{"bytes_per_s": RATE, "stretch": 1.0, "computes": False, "update_s": 0.0, **fields})


def test_copies_of_one_direction_follow_each_other():
    device, now = device_of(), time.perf_counter()
    ends = [device.copy(direction, 100, now) - now for direction in ("out", "out", "in")]
    assert ends == pytest.approx([0.1, 0.2, 0.1])
    assert device.copy("in", 100, now + 5) - now == pytest.approx(5.1)


def test_computing_waits_for_copies_and_copies_for_computing():
    device = device_of(bytes_per_s=1e9)
    device.compute(10.0)  # returns at once: the host is ahead
    stream, (one, other) = Stream(device), (torch.ones(250_000_000 // 4), torch.zeros(250_000_000 // 4))
    before = device.free_s
    mark = stream.copy(other, one)
    assert mark - before == pytest.approx(0.25)
    stream.wait(mark)
    assert device.free_s == mark
    assert torch.equal(one, other)


def test_what_is_stretched_is_what_a_thread_computes(monkeypatch):
    device, slept, computed = device_of(stretch=3.0), [], [0.0]
    monkeypatch.setattr(time, "thread_time", lambda: computed[0])
    monkeypatch.setattr(time, "sleep", slept.append)
    with device.stretched():
        computed[0] += 2.0
        device.sleep_until(time.perf_counter() + 7.0)
        with device.stretched():
            computed[0] += 1.0
    assert slept == [pytest.approx(7.0, abs=0.1), 6.0]


def model(device):
    torch.manual_seed(0)
    return Blocks(3, 16, 8, device, 1e9)


def plain(num_steps):
    """Weights after steps of one process, on a device that is this machine."""
    module = model(device_of(computes=True))
    optimizer, batch = module.configure_optimizers(), module.batch(1)
    for _ in range(num_steps):
        optimizer.zero_grad()
        module.loss(batch).backward()
        optimizer.step()
    return [parameter.detach() for parameter in module.parameters()]


def placed(module):
    """Plan with something in every place, whose blocks recompute, offload and keep."""
    plan = plan_of(module, {f"blocks.{place}": "ZDP" for place in range(3)}, world_size=1, micro_batch_size=1)
    root, *units = plan.units
    places = ({}, {"states": "host"}, {"states": "host", "shard": "host"})
    blocks = [
        Block(name=f"blocks.{place}", treatment=Treatment(saves=saves))
        for place, saves in ((0, "offload"), (2, "recompute"))
    ]
    units = [unit.treated(**where) for unit, where in zip(units, places, strict=True)]
    return replace(plan, units=(root.treated(states="host"), *units), blocks=tuple(blocks))


@pytest.mark.parametrize("way", ["after backward", "beside backward", "all on the host"])
def test_steps_where_this_machine_computes_are_plain_ones(way):
    device = device_of(computes=True, bytes_per_s=1e7)
    with simulated_group(1), device.installed():
        module = model(device)
        if way == "all on the host":
            step = Offloaded(module, device, None, recomputes=True)
        else:
            step = Planned(module, placed(module), device, precision="32-true", ahead=way == "beside backward")
        for _ in range(3):
            step()
        found = [local(parameter).detach().clone() for parameter in module.parameters()]
    assert all(torch.allclose(one, other, rtol=0, atol=1e-6) for one, other in zip(found, plain(3), strict=True))
    assert step.num_taken in (range(1, 11) if way == "beside backward" else [0])  # of 10 that the host updates
