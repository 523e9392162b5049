"""A model that is written where it is tested; and one step followed in two ways: on real and on fake tensors, and with
repeated blocks left out and with all of them."""

import copy
import random
from contextlib import nullcontext
from typing import NamedTuple
from unittest import mock

import torch
from torch import nn

from lightning_osdp.profiler import LiveBytes
from lightning_osdp.profiler.step.fake_model import faked
from lightning_osdp.profiler.step.run_step import StepRunner, resized
from lightning_osdp.profiler.step.snapshot import tensors_in, untouched
from lightning_osdp.profiler.timing.operation_time import estimate_step
from lightning_osdp.profiler.tracing import short_model, trace
from tests.support.this_cpu import skip_what_it_lacks

CPU = torch.device("cpu")
DEPTH = 10
PRECISIONS = {"float32": nullcontext, "bf16-mixed": lambda: torch.autocast("cpu", dtype=torch.bfloat16)}


class Net(nn.Module):
    """Modules by name, and a forward, which is the training step too, as a function of the net and its input."""

    def __init__(self, run, **modules):
        super().__init__()
        for name, module in modules.items():
            setattr(self, name, module)
        self.run = run

    def forward(self, x):
        return self.run(self, x)

    def training_step(self, batch, batch_idx):
        return self.run(self, batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def linear():
    return nn.Linear(4, 4)


class Bytes(NamedTuple):
    """Bytes beside those that were there before the step."""

    forward_peak: int
    at_loss: int
    backward_peak: int
    saved: int
    gradients: int


def count(module, batch, step, context=nullcontext):
    torch.manual_seed(3)
    random.seed(3)
    saved = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        saved[storage._cdata] = storage.nbytes()
        return tensor.detach()

    with LiveBytes("cpu") as live:
        live.track([*module.parameters(), *tensors_in([vars(m) for m in module.modules()]), *tensors_in(batch)])
        before = live.current_bytes
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor), context():
            returned = step(module, batch)
        loss = returned["loss"] if isinstance(returned, dict) else returned
        forward_peak, at_loss = live.peak_bytes, live.current_bytes
        live.reset_peak()
        loss.backward()
        del loss, returned
    found = (forward_peak, at_loss, live.peak_bytes, before + sum(saved.values()), live.current_bytes)
    return Bytes(*(num_bytes - before for num_bytes in found))


def real_and_fake(module, batch, size, step, precision="float32"):
    """Counts bytes of a step on real and on fake tensors, with another number of samples unless that is None."""

    def sized(batch):
        return batch if size is None else resized(batch, 4, size)

    skip_what_it_lacks(module, precision)
    context = PRECISIONS[precision]
    with untouched(module):
        real = count(module, sized(batch), step, context)
    with faked(module, batch, CPU) as fake_batch:
        fake = count(module, sized(fake_batch), step, context)
    return real, fake


def module_step(module, batch):
    return module.training_step(batch, 0)


def _seconds_of(operation):
    return 1e-9 * (operation.moved_bytes + operation.flops)


def _found(step, context):
    with context:
        traced = trace.trace_step(step)
    seconds = {size: estimate_step(step, traced.short, size, _seconds_of) for size in traced.activations}
    return traced, {"calls": traced.calls, "activations": dict(traced.activations), "seconds": seconds}


def is_shortened(module, batch, batch_size, run):
    """Tells whether blocks are left out of a trace, which leaves the module as it is."""
    before = [*module.named_modules()]
    traced = trace.trace_step(StepRunner(module, batch, batch_size, run, CPU))
    assert [*module.named_modules()] == before
    return bool(traced.short.cuts)


def both(module, batch, batch_size, run):
    """Returns whether blocks were left out, what is then found, and what the whole model says."""
    step = StepRunner(module, batch, batch_size, run, CPU)
    before = [*module.named_modules()]
    traced, short = _found(step, nullcontext())
    assert [*module.named_modules()] == before
    _, whole = _found(step, mock.patch.object(short_model, "_containers", return_value=[]))
    return bool(traced.short.cuts), short, whole


def deepened(module):
    """Adds copies of the last block to every list of equal ones, so that there are enough, and returns the module."""
    for child in [*module.modules()]:
        if isinstance(child, (nn.ModuleList, nn.Sequential)) and len(child) > 1 and len({*map(_shapes, child)}) == 1:
            for _ in range(DEPTH - len(child)):
                child.append(copy.deepcopy(child[-1]))
    return module


def _shapes(block):
    return type(block), tuple(parameter.shape for parameter in block.parameters())
