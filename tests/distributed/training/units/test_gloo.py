"""Collectives that send and receive at once: gloo's own elements, whatever ranks are late or give each other."""

import random
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from lightning_osdp.operations.gloo import AllGather, all_gather, begin_all_to_all

pytestmark = pytest.mark.distributed

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64]
MANY = 70_001
"""Elements of which messages are not small, whatever their dtype."""


def numbers(num_ranks, each_gives):
    """Numbers of elements that each rank gives each: all so many, or, if 0, any number, zero included."""
    if each_gives:
        return [[each_gives] * num_ranks] * num_ranks
    draw = random.Random(num_ranks)
    return [[draw.choice([0, 1, 5, 40_000]) for _ in range(num_ranks)] for _ in range(num_ranks)]


def exchanged(dtype, each_gives, in_flight):
    """Elements from all ranks by this all-to-all and by gloo's, of several exchanges that are in flight together."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    of_ranks = numbers(num_ranks, each_gives)
    given, got = of_ranks[rank], [each[rank] for each in of_ranks]
    begun, own, expected = [], [], []
    for turn in range(in_flight):
        sent = (torch.arange(sum(given)) % 97 + 100 * rank + turn).to(dtype)
        own.append(torch.full((sum(got),), -1, dtype=dtype))
        expected.append(own[-1].clone())
        time.sleep(random.Random(rank + turn).random() / 50)  # each rank is the last one now and then
        splits = {} if each_gives else {"got": got, "given": given}
        begun.append(begin_all_to_all(own[-1], sent, **splits))
        dist.all_to_all_single(expected[-1], sent, got, given)
    for each in begun:
        each.wait()
    return [bool(torch.equal(*pair)) for pair in zip(own, expected, strict=True)]


def gathered(dtype, width):
    """Tensors of all ranks: waited for, from the place where it goes, and two at once; and as gloo has them."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    own = (torch.arange(2 * width).view(2, width) % 91 + 10 * rank).to(dtype)
    expected = own.new_zeros(2 * num_ranks, width)
    dist.all_gather_single(expected, own)
    whole, in_place, *both = (torch.full_like(expected, -1) for _ in range(4))
    all_gather(whole, own)
    in_place[2 * rank : 2 * rank + 2] = own
    all_gather(in_place, in_place[2 * rank : 2 * rank + 2])
    time.sleep(0.02 * rank)
    begun = [AllGather()(each, own, dist.group.WORLD, async_op=True) for each in both]
    for each in begun:
        each.wait()
    return [bool(torch.equal(each, expected)) for each in (whole, in_place, *both)]


def dropped():
    """Returns the number of ranks after an exchange that rank 0 has given up before its peers have begun it."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    sent = torch.ones(num_ranks * 2_000_000)
    if rank > 0:
        time.sleep(0.5)
    begun = begin_all_to_all(torch.empty_like(sent), sent)
    if rank > 0:
        begun.wait()
    del begun
    counted = torch.ones(1)
    dist.all_reduce(counted)
    return counted.item()


def waited_for_twice():
    """Tells if collectives that are waited for once more give what they gave."""
    group = dist.new_group(timeout=timedelta(seconds=20))
    own = torch.full((MANY,), float(dist.get_rank()))
    whole, received = (torch.full((MANY * dist.get_world_size(),), -1.0) for _ in range(2))
    expected = torch.arange(float(dist.get_world_size())).repeat_interleave(MANY)
    for begun, found in (
        (AllGather()(whole, own, group, async_op=True), whole),
        (begin_all_to_all(received, own.repeat(dist.get_world_size()), group), received),
    ):
        for _ in range(3):
            begun.wait()
            if not torch.equal(found, expected):
                return False
    return True


def of_one_rank():
    """Tells if a rank gets what it gives in a group of its own."""
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    received, sent = torch.zeros(MANY), torch.arange(float(MANY))
    begin_all_to_all(received, sent, groups[dist.get_rank()]).wait()
    return torch.equal(received, sent)


def of_empty():
    """Number of elements that there are of none."""
    received, none = torch.empty(0), [0] * dist.get_world_size()
    begin_all_to_all(received, torch.empty(0)).wait()
    begin_all_to_all(received, torch.empty(0), got=none, given=none).wait()
    all_gather(received, torch.empty(0))
    return received.numel()


@pytest.mark.parametrize("each_gives", [3, MANY, 0])
@pytest.mark.parametrize("world_size", [2, 4])
def test_elements_are_those_of_gloo(ranks, world_size, each_gives):
    for dtype in DTYPES:
        for found in ranks(world_size).run(exchanged, dtype=dtype, each_gives=each_gives, in_flight=3):
            assert found == [True] * 3


@pytest.mark.parametrize("width", [3, MANY])
@pytest.mark.parametrize("world_size", [2, 4])
def test_tensors_of_all_ranks_are_those_of_gloo(ranks, world_size, width):
    for dtype in DTYPES:
        for found in ranks(world_size).run(gathered, dtype=dtype, width=width):
            assert found == [True] * 4


@pytest.mark.parametrize("world_size", [2, 4])
def test_what_is_given_up_is_in_nobodys_way(ranks, world_size):
    assert ranks(world_size).run(dropped) == [world_size] * world_size


def test_a_rank_alone_gets_its_own(ranks):
    assert ranks(2).run(of_one_rank) == [True] * 2


def test_nothing_is_exchanged_of_nothing(ranks):
    assert ranks(2).run(of_empty) == [0, 0]


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_collective_that_has_ended_is_not_waited_for(ranks, world_size):
    assert ranks(world_size).run(waited_for_twice) == [True] * world_size
