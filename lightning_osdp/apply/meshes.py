"""The meshes that units are sharded over: all ranks, and nodes with the ranks of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from lightning_osdp.apply import internals
from lightning_osdp.core.modes import ShardingMode
from lightning_osdp.core.plans.plan import Plan

_NAMES = ("nodes", "node")
NODE_GROUPS = tuple(f"mesh_{name}" for name in _NAMES)
"""What torch calls the process groups of a mesh of nodes."""
OVER_ALL = 'SearchSpace(modes=("ZDP", "hpZ", "DP"))'
"""What leaves the modes out that shard in the node."""
ONE_MESH = dict.fromkeys(
    ("with different meshes", "cross-mesh operation", "must have the same mesh", "cross mesh concatenation"),
    "Units that are sharded in each node (HSDP, HDP) are on another mesh than those that are sharded over all ranks, as"
    " torch does not allow here. Have the plan shard all of them over all ranks:"
    f" OSDPStrategy(search_space={OVER_ALL}).",
)
"""What helps where code cannot compute with units on two meshes, by what torch says."""


class Meshes:
    """Those of one model, one of each kind for all of its units. Methods are called on all ranks.

    Attributes:
        nodes: the mesh (nodes, ranks of a node), where a plan has needed it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._world = device, dist.group.WORLD
        self._all_ranks = init_device_mesh(device.type, (dist.get_world_size(),))
        self.nodes: DeviceMesh | None = None
        self._warm_up(self._all_ranks.get_group())

    @property
    def share_world(self) -> bool:
        """Whether they are of the process group that there is now."""
        return dist.group.WORLD is self._world

    def add_nodes(self, plan: Plan) -> None:
        """Makes the mesh of nodes, if the plan needs it and it is not there; node by node ranks follow each other."""
        world = dist.group.WORLD
        if self.nodes is not None or not plan.needs_nodes:
            return
        assert world is not None
        assert plan.node_size is not None
        self.nodes = _mesh_of_nodes(world, self._device.type, plan.node_size)
        self._warm_up(self.nodes.get_group("node"))
        if any(_is_in_nodes(mode) for unit in plan.units for mode in unit.sharding_modes):
            internals.mix_meshes()
            if self._device.type != "cpu":
                dist.all_reduce(torch.zeros(1, device=self._device), group=self.nodes.get_group("nodes"))

    def of(self, mode: ShardingMode) -> DeviceMesh:
        """What a unit in this mode is sharded over between steps."""
        if not _is_in_nodes(mode):
            return self._all_ranks
        assert self.nodes is not None
        return self.nodes

    @contextmanager
    def faked(self, groups: Sequence[Any]) -> Iterator[None]:
        """Within it, no collective of these units, or of the default process group, reaches another rank."""
        from torch.testing._internal.distributed import fake_pg  # noqa: F401  # registers the backend "fake"

        world = dist.new_group(backend="fake")
        fakes = {self._all_ranks.get_group(): world}
        if self.nodes is not None:
            for name, ranks in zip(_NAMES, (self.nodes.mesh.T, self.nodes.mesh), strict=True):
                fake, _ = dist.new_subgroups_by_enumeration(ranks.tolist(), backend="fake")
                fakes[self.nodes.get_group(name)] = fake
        real, dist.group.WORLD = dist.group.WORLD, world
        try:
            with internals.on_process_groups(groups, fakes):
                yield
        finally:
            dist.group.WORLD = real
            for fake in fakes.values():
                dist.destroy_process_group(fake)

    def _warm_up(self, group: dist.ProcessGroup) -> None:
        if self._device.type != "cpu":
            warm_up(group, self._device)


@lru_cache
def _mesh_of_nodes(world: dist.ProcessGroup, device_type: str, size: int) -> DeviceMesh:
    """One for all models, for each of its process groups has its threads, or memory of a device."""
    return init_device_mesh(device_type, (world.size() // size, size), mesh_dim_names=_NAMES)


def warm_up(group: dist.ProcessGroup, device: torch.device) -> None:
    """Has a group of ranks take the memory that it keeps: NCCL's does with its first collective of each kind.

    Else it would be taken in the first step, of what a dry run on each rank alone has seen to be free.
    """
    whole, shard = torch.zeros(group.size(), device=device), torch.zeros(1, device=device)
    dist.all_gather_single(whole, shard, group=group)
    dist.reduce_scatter_single(shard, whole, group=group)
    dist.all_reduce(shard, group=group)


def _is_in_nodes(mode: ShardingMode) -> bool:
    return mode.sharded_over == "node"
