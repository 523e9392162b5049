"""Counts with one process for rank 0 of N, against counts in real ranks."""

from contextlib import ExitStack
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from benchmarks.families import build
from benchmarks.testbed import ring
from benchmarks.testbed.beside_fsdp.engines import ByHand
from benchmarks.testbed.groups import fake_group, simulated_group
from benchmarks.testbed.memory import count_step
from benchmarks.testbed.plans import plan_of
from benchmarks.testbed.ring import ring_reduce_scatter
from benchmarks.testbed.simulated import SimulatedLinks
from benchmarks.testbed.step import Step
from lightning_osdp.apply import local
from tests.tiers import slow

pytestmark = pytest.mark.distributed


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


MLP = {"layers.0": "ZDP", "layers.1": "DP", "layers.2": "ZDP", "layers.5": "ZDP"}
GPT = {f"model.blocks.{i}": mode for i, mode in enumerate(("DP", "ZDP", "DP"))}


@pytest.mark.parametrize(
    "case",
    [
        slow({"name": "odd_mlp", "optimizer": "adamw", "precision": "32-true", "modes": MLP, "world_size": 3}),
        slow(
            {"name": "odd_mlp", "optimizer": "sgd_momentum", "modes": MLP, "prefetch": "none", "num_micro_batches": 3}
        ),
        {"name": "tied", "optimizer": "adamw_foreach", "precision": "bf16-mixed", "modes": GPT},
    ],
)
def test_rank_0_of_n_alone_counts_what_real_ranks_count(ranks, case):
    case = {"world_size": 2, **case}
    real = ranks(case["world_size"]).run(counted, **case)[0]
    with simulated_group(case["world_size"], SimulatedLinks(copies_reduced=True)):
        alone = counted(**case)
    # the least of several steps: a thread of gloo may hold a tensor longer than the step does
    assert alone == pytest.approx(real, rel=1e-3)
    with fake_group(case["world_size"]):
        fake = counted(**case)
    assert fake.pop("reduce-scatter") < alone.pop("reduce-scatter")  # gloo copies what it reduces
    assert fake == alone


@pytest.mark.parametrize("op", ["SUM", "AVG"])
@pytest.mark.parametrize(
    ("world_size", "group"), [slow(2, None), slow(3, None), (3, [2, 1]), slow(3, [0, 2]), slow(3, [1])]
)
def test_the_ring_reduces_as_gloo_does(ranks, world_size, group, op):
    found = ranks(world_size).run(reduced, num_elements=5, op=op, ranks_of_group=group)
    for rank, result in enumerate(found):
        if group is not None and rank not in group:
            assert result is None
            continue
        ours, expected, is_left_alone = result
        assert ours == pytest.approx(expected, rel=1e-6)
        assert is_left_alone


@pytest.mark.parametrize("options", [{"op": "MAX"}, {"async_op": True}])
def test_the_ring_refuses_what_it_cannot_do(ranks, options):
    for told in ranks(2).run(refused_by_the_ring, **options):
        assert told.startswith("Expected SUM or AVG that is waited for")


@pytest.mark.parametrize("how", ["by a plan", "by hand"])
def test_units_reduce_in_the_ring(ranks, how):
    for without, with_ring, num_rings in ranks(3).run(reduced_in_a_ring, how=how):
        assert num_rings == 12  # three blocks and the root, in three steps
        assert with_ring == pytest.approx(without, rel=1e-5)
