"""What a step is found to take, with repeated blocks left out and with all of them."""

import copy
from contextlib import nullcontext
from unittest import mock

import torch
from torch import nn

from lightning_osdp.profiler.step.run_step import Step
from lightning_osdp.profiler.timing.estimate import estimate_step
from lightning_osdp.profiler.tracing import trace

CPU = torch.device("cpu")
DEPTH = 10


def _seconds_of(operation):
    return 1e-9 * (operation.moved_bytes + operation.flops)


def _found(step, context):
    with context:
        traced = trace.trace_step(step)
    seconds = {size: estimate_step(step, traced.short, size, _seconds_of) for size in traced.activations}
    return traced, {"calls": traced.calls, "activations": dict(traced.activations), "seconds": seconds}


def both(module, batch, batch_size, run):
    """Whether blocks were left out, what is then found, and what the whole model says."""
    step = Step(module, batch, batch_size, run, CPU)
    before = [*module.named_modules()]
    traced, short = _found(step, nullcontext())
    assert [*module.named_modules()] == before
    _, whole = _found(step, mock.patch.object(trace, "blocks_of", return_value={}))
    return bool(traced.short.cuts), short, whole


def deepened(module):
    """With copies of the last block in every list of equal ones, so that there are enough."""
    for child in [*module.modules()]:
        if isinstance(child, (nn.ModuleList, nn.Sequential)) and len(child) > 1 and len({*map(_shapes, child)}) == 1:
            for _ in range(DEPTH - len(child)):
                child.append(copy.deepcopy(child[-1]))
    return module


def _shapes(block):
    return type(block), tuple(parameter.shape for parameter in block.parameters())
