import time

import pytest
import torch
import torch.distributed as dist

from benchmarks.testbed.groups import simulated_group
from benchmarks.testbed.simulated import SimulatedLinks


def test_collectives_take_the_other_ranks_to_hold_what_this_one_holds():
    with simulated_group(3):
        mine = torch.arange(2.0)
        gathered = [torch.zeros(2) for _ in range(3)]
        dist.all_gather(gathered, mine)
        assert [part.tolist() for part in gathered] == [[0, 1]] * 3
        reduced = torch.zeros(2)
        dist.distributed_c10d._get_default_group().reduce_scatter_single(reduced, torch.arange(6.0)).wait()
        assert reduced.tolist() == [0, 3]
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total.item() == 3
        dist.all_reduce(total, op=dist.ReduceOp.MAX)
        assert total.item() == 3
        objects = [None] * 3
        dist.all_gather_object(objects, "mine")
        assert objects == ["mine"] * 3
        dist.barrier()


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
