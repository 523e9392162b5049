"""Offloading beside computing, with a stream that copies as late as it may: what would be wrong on a device fails."""

import copy
import gc
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import _disable_current_modes

from lightning_osdp.apply.activations.blocks import BlockForwards
from lightning_osdp.apply.activations.offload import CopyStream, HostMemory
from lightning_osdp.core.axes import Treatment
from lightning_osdp.core.plans.parts import Block
from lightning_osdp.profiler import LiveBytes

CPU = torch.device("cpu")
WIDTH, ROWS, NUM_BLOCKS = 32, 64, 4
SAVED = 2
"""Tensors of a block: its input, and what tanh returns."""
COPIED = SAVED * ROWS * WIDTH * 4


class LateStream:
    """Copies only when computing waits for it, in order; like a device it holds none of the memory that it copies."""

    def __init__(self):
        self.begun, self.num_done = [], 0
        self._queue, self._hosts = [], {}

    def copy(self, to, of):
        to, of = (StorageWeakRef(each.untyped_storage()) for each in (to, of))
        is_back = of.cdata in self._hosts
        if not is_back:
            self._hosts[to.cdata] = to
        self.begun.append("back" if is_back else "out")
        self._queue.append((to, of))
        return len(self.begun)

    def wait(self, mark):
        while self.num_done < mark:
            to, of = map(storage_of, self._queue[self.num_done])
            assert of is not None, "Memory was given to others while it was copied."
            # to pinned memory that is free already nothing else is written: its allocator waits for copies itself
            assert to is not None or self.begun[self.num_done] == "out", "What is copied back was given to others."
            if to is not None:
                with _disable_current_modes():
                    to.copy_(of)
            self.num_done += 1


def storage_of(reference):
    """Returns the storage of a weak reference, or None if the storage is free."""
    return torch.UntypedStorage._new_with_weak_ptr(reference.cdata)


class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.linear(x).tanh()


def chain():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), *(Part() for _ in range(NUM_BLOCKS)), nn.Linear(WIDTH, 1))


def offloading(net, stream, *, activations="offload", units=()):
    forwards = BlockForwards(net, CPU)
    forwards.memory = HostMemory(CPU, stream)
    names = [name for name, child in net.named_children() if isinstance(child, Part)]
    forwards.choose(
        [Block(name=name, treatment=Treatment(saves=activations)) for name in names], units=names if units else ()
    )
    return forwards.memory


def trained(net, num_steps=3):
    """Gradients of some steps."""
    found = []
    for step in range(num_steps):
        net.zero_grad()
        net(torch.full((ROWS, WIDTH), 0.1 * (step + 1))).sum().backward()
        found += [parameter.grad.clone() for parameter in net.parameters()]
    return found


@pytest.mark.parametrize(
    ("activations", "units"), [("offload", False), ("recompute_offload", False), ("recompute_offload", True)]
)
def test_copies_beside_computing_change_no_number(activations, units):
    net, stream = chain(), LateStream()
    expected = trained(copy.deepcopy(net))
    memory = offloading(net, stream, activations=activations, units=units)
    assert all(torch.equal(one, other) for one, other in zip(trained(net), expected, strict=True))
    assert (stream.begun.count("out"), stream.begun.count("back")) == (stream.num_done // 2,) * 2
    assert stream.num_done > 0
    assert memory.current_bytes == 0


def live_bytes(stream):
    """Returns live bytes after each block of forward, and the peak of forward and backward."""
    net = chain()
    offloading(net, stream)
    batch, after = torch.ones(ROWS, WIDTH), []
    with LiveBytes("cpu") as live:
        live.track([batch, *net.parameters()])
        for following in net[2:]:
            following.register_forward_pre_hook(lambda *_: after.append(live.current_bytes))
        loss = net(batch).sum()
        loss.backward()
    return after, live.peak_bytes


def test_memory_of_two_blocks_at_most_is_in_flight():
    (now, peak_now), (late, peak_late) = live_bytes(None), live_bytes(LateStream())
    # the block's input is; its output, which the next one gets, is alive in any case
    in_flight = [one - other for one, other in zip(late, now, strict=True)]
    assert in_flight == [COPIED - ROWS * WIDTH * 4] * NUM_BLOCKS
    assert 0 < peak_late - peak_now <= 2 * COPIED


def test_backward_has_the_block_before_come_back_beside_it():
    net, stream = chain(), LateStream()
    offloading(net, stream)
    begun = []
    x = net[0](torch.ones(ROWS, WIDTH))
    for part in net[1:-1]:
        x = part(x)
        x.register_hook(lambda _: begun.append(stream.begun.count("back")))  # when backward comes to the block
    x.sum().backward()
    assert begun == [0, *(SAVED * number for number in range(2, NUM_BLOCKS + 1))]


def test_what_was_fetched_and_is_not_wanted_is_waited_for():
    net, stream = chain(), LateStream()
    memory = offloading(net, stream)
    out = net(torch.ones(ROWS, WIDTH))
    torch.autograd.grad(out.sum(), net[-2].linear.bias, retain_graph=True)
    assert stream.begun.count("back") == 2 * SAVED
    assert stream.num_done < len(stream.begun)
    del out
    gc.collect()
    assert stream.num_done == len(stream.begun)
    assert memory.current_bytes == 0


def test_a_block_that_fails_leaves_nothing_behind():
    net, stream = chain(), LateStream()
    expected = trained(copy.deepcopy(net))
    memory = offloading(net, stream)

    def fail(*_):
        raise ValueError("in a block")

    handle = net[2].linear.register_forward_hook(fail)
    with pytest.raises(ValueError, match="in a block"):
        net(torch.ones(ROWS, WIDTH))
    handle.remove()
    gc.collect()
    assert memory.current_bytes == 0
    assert all(torch.equal(one, other) for one, other in zip(trained(net), expected, strict=True))


def test_pinned_memory_is_counted_as_it_is_taken():
    pinned, pageable = HostMemory(torch.device("cuda"), LateStream()), HostMemory(CPU)
    sizes = [0, 1, 4096, 4097, 33 * 2**20]
    assert [pinned.taken_bytes(size) for size in sizes] == [0, 1, 4096, 8192, 64 * 2**20]
    assert [pageable.taken_bytes(size) for size in sizes] == sizes


def test_a_copy_waits_for_computing_and_computing_only_for_its_end(monkeypatch):
    told = []
    current = SimpleNamespace(wait_event=lambda mark: told.append(f"computing waits for {mark}"))

    class Stream:
        def __init__(self, device):
            assert device == torch.device("cuda", 0)

        def wait_stream(self, other):
            assert other is current
            told.append("the stream waits for computing")

        def record_event(self):
            told.append("marked")
            return "the mark"

        def __enter__(self):
            told.append("in the stream")

        def __exit__(self, *_):
            told.append("out of it")

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    stream = CopyStream(torch.device("cuda", 0))
    to = SimpleNamespace(copy_=lambda of, non_blocking: told.append(f"copies {of}, {non_blocking}"))
    stream.wait(stream.copy(to, "saved"))
    assert told == [
        "the stream waits for computing",
        "in the stream",
        "copies saved, True",
        "marked",
        "out of it",
        "computing waits for the mark",
    ]
