"""The test-bed's instruments on real ranks."""

import torch
import torch.distributed as dist

from benchmarks.families import build
from benchmarks.testbed.memory import count_step
from benchmarks.testbed.plans import plan_of
from benchmarks.testbed.ring import ring_reduce_scatter


def counted(*, name, optimizer, modes, world_size, precision="32-true", prefetch="pre", num_micro_batches=1):
    """Peak of each phase on this rank of the default process group."""
    torch.set_num_threads(1)
    module = build(name, optimizer=optimizer)
    plan = plan_of(
        module,
        modes,
        world_size=world_size,
        micro_batch_size=2,
        num_micro_batches=num_micro_batches,
        backward_prefetch=prefetch,
    )
    return count_step(module, plan, precision=precision, num_steps=5 if dist.get_backend() == "gloo" else 1).phases


def reduced(*, num_elements):
    """This rank's shard of a sum over ranks, by the ring and by gloo, and whether the ring left its input alone."""
    ranks = dist.get_world_size()
    whole = (1.0 + dist.get_rank()) * torch.arange(num_elements * ranks)
    ours, total = torch.empty(num_elements), whole.clone()
    dist.all_reduce(total)
    before = whole.clone()
    ring_reduce_scatter(ours, whole)
    return ours.tolist(), total.chunk(ranks)[dist.get_rank()].tolist(), torch.equal(whole, before)
