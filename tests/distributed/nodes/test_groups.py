"""Groups of ranks beside the default one: counted, warmed up, and used where the default one reaches devices only."""

from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from lightning_osdp.apply.ranks import agreement, hosts
from lightning_osdp.apply.units import warm_up
from lightning_osdp.errors import OSDPError
from lightning_osdp.strategy.runtime import all_ranks
from lightning_osdp.strategy.runtime.ranks import collectives_entered

pytestmark = pytest.mark.distributed


CPU = torch.device("cpu")


def counted():
    """Returns how many collectives are counted after some in each kind of group."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    beside, alone = dist.new_group(), [dist.new_group([each]) for each in range(world_size)][rank]
    before, found = collectives_entered(world_size), {}
    for name, group, number in (("default", None, 1), ("beside", beside, 2), ("some ranks", alone, 3)):
        for _ in range(number):
            dist.all_reduce(torch.zeros(1), group=group)
        found[name] = collectives_entered(world_size) - before
    warm_up(beside, CPU)
    found["warm-up"] = collectives_entered(world_size) - before
    mesh = init_device_mesh("cpu", (world_size, 1), mesh_dim_names=("nodes", "node"))
    for name in mesh.mesh_dim_names:
        dist.all_reduce(torch.zeros(1), group=mesh.get_group(name))
    found["nodes"] = collectives_entered(world_size) - before
    for group in (beside, alone):
        dist.destroy_process_group(group)
    return found


def _told():
    """Returns what ranks tell each other in every way, errors included."""

    def fail():
        if dist.get_rank() == 1:
            raise ValueError("on one rank")
        return "fine"

    found = {
        "all": all_ranks.all_gather_values(dist.get_rank()),
        "one": all_ranks.broadcast_value(f"of {dist.get_rank()}", 1),
        "first": all_ranks.on_rank_zero(lambda: f"of {dist.get_rank()}"),
    }
    try:
        all_ranks.on_all_ranks(fail)
    except (OSDPError, ValueError) as error:
        found["error"] = str(error)
    return found


def told_beside_a_device():
    """Returns `_told` where the default group reaches devices only, as NCCL's, and collectives that went through it."""
    default = dist.group.WORLD._get_backend(CPU)
    for cached in (all_ranks._host_group, agreement._own_group):
        cached.cache_clear()
    with (
        mock.patch.object(all_ranks, "reaches_hosts", return_value=False),
        mock.patch.object(hosts, "reaches_hosts", return_value=False),
    ):
        own, group = agreement._own_group(dist.group.WORLD), all_ranks.host_group()
        before = default._get_sequence_number_for_group()
        found = _told()
        through_default = default._get_sequence_number_for_group() - before
    groups = [dist.get_backend(each) for each in (own, group)], own is not group, group is not dist.group.WORLD
    for cached in (all_ranks._host_group, agreement._own_group):
        cached.cache_clear()
    for each in (own, group):
        dist.destroy_process_group(each)
    return found, through_default, groups


def made_beside(minutes):
    """Returns how long ranks wait in a group that is made beside one whose ranks wait for so many minutes."""
    given = dist.new_group(timeout=timedelta(minutes=minutes))
    made = hosts.new_host_group(given)
    found = made._get_backend(CPU).options._timeout
    for each in (made, given):
        dist.barrier(each)  # torch lets a rank leave `new_group` while others still connect to it
        dist.destroy_process_group(each)
    return found


def test_collectives_are_counted_in_all_groups_of_all_ranks(ranks):
    for found in ranks(2).run(counted):
        assert found == {"default": 1, "beside": 3, "some ranks": 3, "warm-up": 6, "nodes": 8}


def test_ranks_tell_each_other_by_their_hosts_where_devices_may_have_failed(ranks):
    for rank, (found, through_default, groups) in enumerate(ranks(2).run(told_beside_a_device)):
        text = "Rank 1 failed, so every rank stops: ValueError: on one rank" if rank == 0 else "on one rank"
        assert found == {"all": [0, 1], "one": "of 1", "first": "of 0", "error": text}
        assert through_default == 0
        assert groups == (["gloo", "gloo"], True, True)


def test_ranks_wait_for_each_other_as_long_as_the_user_wants(ranks):
    assert set(ranks(2).run(made_beside, minutes=7)) == {timedelta(minutes=7)}
