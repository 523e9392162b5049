"""Tensors that have come alive since a census, whoever holds them."""

import gc

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from benchmarks.testbed.groups import fake_group
from lightning_osdp.operations.splitting import JoinedShards
from lightning_osdp.profiler import Census


def shapes(tensors):
    return sorted(tuple(tensor.shape) for tensor in tensors)


@pytest.fixture(autouse=True)
def _tidy():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_only_what_came_later_is_newer_and_each_storage_once():
    before = torch.zeros(5)
    census = Census()
    kept = [torch.zeros(2, 3)]
    views = [kept[0][0], kept[0].T, before[2:]]
    assert len(census.newer()) == 1
    assert census.newer()[0].untyped_storage().nbytes() == 24
    kept.append(torch.zeros(7))
    assert (7,) in shapes(census.newer())
    del kept[:], views
    assert census.newer() == []


def test_memory_that_is_used_again_is_new():
    memory = bytearray(4000)
    first = torch.frombuffer(memory, dtype=torch.float32)
    census, address = Census(), first.data_ptr()
    assert census.newer() == []
    del first
    again = torch.frombuffer(memory, dtype=torch.float32)
    assert again.data_ptr() == address
    assert shapes(census.newer()) == [(1000,)]


def test_gradients_are_followed():
    weight, middle = nn.Parameter(torch.ones(4)), []
    census = Census()
    middle.append(weight * torch.full((3, 4), 2.0))
    middle[0].retain_grad()
    middle[0].sum().backward()
    assert shapes(census.newer()) == [(3, 4), (3, 4), (4,)]


def test_shards_count_as_what_this_rank_holds():
    with fake_group(4):
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        census = Census()
        other = init_device_mesh("cpu", (2, 2))  # who the ranks are is no tensor of anybody
        shard = nn.Parameter(DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0)]))
        shard.grad = DTensor.from_local(torch.ones(2, 3), mesh, [Shard(0)])
        joined = JoinedShards([shard.detach(), shard.detach()], 0, "both")
        assert shapes(census.newer()) == [(2, 3), (2, 3)]
        assert census.newer(besides=[shard]) == []
        assert census.newer(besides=[joined.pieces[0]]) != []
        del other


def test_a_part_of_a_mesh_may_outlive_its_ranks():
    with fake_group(4):
        node = init_device_mesh("cpu", (2, 2), mesh_dim_names=("nodes", "node"))["node"]
    with pytest.raises(ValueError, match="process group has not been initialized"):
        assert node.mesh
    census = Census()
    assert census.newer() == []


def test_what_takes_no_memory_of_its_own_does_not_count():
    array = np.zeros(100, dtype=np.float32)
    whole = torch.from_numpy(array)
    census = Census()
    with FakeTensorMode():
        fake = torch.zeros(10)
    held = [fake, torch.zeros(10, device="meta"), torch.zeros(0), torch.from_numpy(array), nn.UninitializedParameter()]
    assert census.newer() == []
    del held, whole


def test_what_is_ignored_is_not_newer():
    census, kept = Census(), [torch.zeros(3), torch.zeros(4)]
    census.ignore(kept[:1])
    assert shapes(census.newer()) == [(4,)]


def test_cycles_that_nobody_has_collected_are_alive():
    class Node:
        pass

    census, node = Census(), Node()
    node.itself, node.tensor = node, torch.zeros(3)
    del node
    assert shapes(census.newer()) == [(3,)]
    gc.collect()
    assert census.newer() == []
