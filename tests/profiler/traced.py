"""Bytes of one step, counted the same way on real and on fake tensors."""

import random
from contextlib import nullcontext
from typing import NamedTuple

import torch

from lightning_osdp.profiler import LiveBytes
from lightning_osdp.profiler.fake_tensors.fake_model import faked
from lightning_osdp.profiler.step.resize import resized
from lightning_osdp.profiler.step.snapshot import untouched
from lightning_osdp.profiler.step.tensors import tensors_in

CPU = torch.device("cpu")
PRECISIONS = {"float32": nullcontext, "bf16-mixed": lambda: torch.autocast("cpu", dtype=torch.bfloat16)}


class Bytes(NamedTuple):
    """Beside what was there before the step."""

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
    """The same step on real and on fake tensors, with another number of samples unless that is None."""

    def sized(batch):
        return batch if size is None else resized(batch, 4, size)

    context = PRECISIONS[precision]
    with untouched(module):
        real = count(module, sized(batch), step, context)
    with faked(module, batch, CPU) as fake_batch:
        fake = count(module, sized(fake_batch), step, context)
    return real, fake


def own_step(module, batch):
    return module.training_step(batch, 0)
