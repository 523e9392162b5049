"""The test-bed's instruments on real ranks."""

from contextlib import ExitStack
from unittest.mock import patch

import torch
import torch.distributed as dist

from benchmarks.families import build
from benchmarks.testbed import ring
from benchmarks.testbed.beside_fsdp.engines import ByHand
from benchmarks.testbed.memory import count_step
from benchmarks.testbed.plans import plan_of
from benchmarks.testbed.ring import ring_reduce_scatter
from benchmarks.testbed.step import Step
from lightning_osdp.apply import local


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


def reduced(*, num_elements, op, ranks_of_group=None):
    """This rank's shard by the ring and by gloo, in a group (None: all ranks), and whether the ring left its input."""
    group = None if ranks_of_group is None else dist.new_group(ranks_of_group)
    if group is not None and dist.get_rank() not in ranks_of_group:
        return None
    op, num_ranks = getattr(dist.ReduceOp, op), dist.get_world_size(group)
    whole = (1.0 + dist.get_rank()) * torch.arange(num_elements * num_ranks)
    ours, expected, before = torch.empty(num_elements), torch.empty(num_elements), whole.clone()
    dist.reduce_scatter_single(expected, whole.clone(), op=op, group=group)
    ring_reduce_scatter(ours, whole, op, group)
    return ours.tolist(), expected.tolist(), torch.equal(whole, before)


def refused_by_the_ring(**options):
    """What it says to what it cannot do."""
    try:
        ring_reduce_scatter(torch.empty(2), torch.empty(2 * dist.get_world_size()), **options)
    except ValueError as error:
        return str(error)
    return None


def reduced_in_a_ring(how):
    """Squares of weights after steps without a ring and with it, and how many reductions took it.

    Args:
        how: units are sharded "by hand" or "by a plan".
    """
    num_rings = [0]

    def counted(*args, **kwargs):
        num_rings[0] += 1
        ring_reduce_scatter(*args, **kwargs)

    found = []
    for with_ring in (False, True):
        module = build("tiny", optimizer="sgd_momentum")
        plan = plan_of(
            module,
            {f"model.blocks.{index}": mode for index, mode in enumerate(("ZDP", "DP", "ZDP"))},
            world_size=dist.get_world_size(),
            micro_batch_size=2,
        )
        with ExitStack() as stack:
            stack.enter_context(patch.object(ring, "ring_reduce_scatter", counted))
            if with_ring and how != "by hand":
                stack.enter_context(ring.ring_reduce_scatters())
            step = ByHand(module, plan, in_ring=with_ring) if how == "by hand" else Step(module, plan)
            for _ in range(3):
                step()
        if how != "by hand":
            step.sharded.reshard()
        found.append([float(local(parameter).detach().square().sum()) for parameter in module.parameters()])
    return *found, num_rings[0]
