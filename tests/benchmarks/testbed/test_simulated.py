import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from benchmarks.testbed.groups import simulated_group
from benchmarks.testbed.simulated import SimulatedLinks


def test_collectives_take_the_other_ranks_to_hold_what_this_one_holds():
    with simulated_group(3):
        mine = torch.arange(2.0)
        gathered = [torch.zeros(2) for _ in range(3)]
        dist.all_gather(gathered, mine)
        assert [part.tolist() for part in gathered] == [[0, 1]] * 3
        in_one = torch.zeros(6)
        in_one[:2] = mine
        dist.all_gather_single(in_one, in_one[:2])  # from the place where it goes, as fully_shard does
        assert in_one.tolist() == [0, 1] * 3
        reduced = torch.zeros(2)
        dist.reduce_scatter_single(reduced, torch.arange(6.0))
        assert reduced.tolist() == [0, 3]
        dist.reduce_scatter_single(reduced, torch.arange(6.0), op=dist.ReduceOp.AVG)
        assert reduced.tolist() == [0, 1]
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total.item() == 3
        for op in (dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.AVG):
            dist.all_reduce(total, op=op)
            assert total.item() == 3
        objects = [None] * 3
        dist.all_gather_object(objects, "mine")
        assert objects == ["mine"] * 3
        dist.barrier()


def test_other_reductions_are_refused():
    with simulated_group(2), pytest.raises(ValueError, match="Expected SUM, AVG, MIN or MAX"):
        dist.all_reduce(torch.ones(1), op=dist.ReduceOp.PRODUCT)


@pytest.mark.parametrize(("rows", "rows_of_rank_0"), [(4, 1), (5, 2)])
@pytest.mark.parametrize(
    ("reduce_dtype", "tolerance"),
    [(None, 1e-6), (torch.float16, 1e-3)],  # the collective divides; or fully_shard, before and after it
)
def test_fully_shard_has_the_gradients_of_one_rank(rows, rows_of_rank_0, reduce_dtype, tolerance):
    torch.manual_seed(0)
    layer, x = nn.Linear(3, rows), torch.randn(2, 3)
    layer(x).square().sum().backward()
    whole = layer.weight.grad
    layer.zero_grad()
    with simulated_group(4):
        policy = MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
        fully_shard(layer, mesh=init_device_mesh("cpu", (4,)), mp_policy=policy)
        layer(x).square().sum().backward()
        found = layer.weight.grad.to_local()
    # a row's gradient depends on no other row, which the other ranks do not have
    torch.testing.assert_close(found, whole[:rows_of_rank_0], rtol=tolerance, atol=tolerance)


def test_collectives_last_as_long_as_their_links_say_and_follow_each_other():
    links = SimulatedLinks(all_gather_s=lambda num_bytes: num_bytes * 1e-3)
    with simulated_group(2, links) as group:
        gathered = [torch.zeros(2), torch.zeros(2)]
        start = time.perf_counter()
        works = [dist.all_gather(gathered, torch.ones(2), async_op=True) for _ in range(2)]
        assert not works[1].is_completed()
        for work in works:
            work.wait()
        assert time.perf_counter() - start >= 2 * 16e-3
        assert group.simulated_s == pytest.approx(2 * 16e-3)
        assert dist.get_backend() == "simulated"
