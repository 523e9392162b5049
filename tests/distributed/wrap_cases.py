"""What the ranks run to check apply and measure_cluster."""

import sys
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent.parent / "profiler"))

from wrapped import compare
from wrapped_units import Nested, plan, units_of

from lightning_osdp.apply import apply_plan
from lightning_osdp.profiler import measure_cluster
from lightning_osdp.profiler.machine import cluster

CPU = torch.device("cpu")


def gradients_differ_by(name, modes):
    """Largest difference of loss and gradients from the unwrapped model's, and the units' names."""
    return compare(name, world_size=dist.get_world_size(), modes=modes)


def nested_units(units, node_size=None):
    """Units, their parameters and modes, after applying these of `Nested`; gradients of what is frozen and is not."""
    root = apply_plan(Nested(), plan(units, dist.get_world_size(), node_size), device=CPU)
    root(torch.ones(4, 4)).sum().backward()
    frozen = [p.grad is None for name, p in root.named_parameters() if "frozen" in name]
    return units_of(root), all(frozen)


def measured_cluster(available_bytes):
    """measure_cluster where this rank may use its entry of ``available_bytes``."""
    with mock.patch.object(cluster, "default_memory_limit_bytes", return_value=available_bytes[dist.get_rank()]):
        return measure_cluster(CPU, local_ranks=dist.get_world_size())


def memory_beside_groups(node_size):
    """Limit of `measure_cluster` on a device of 100 bytes, of which each process group takes one; groups afterwards."""
    live = dist.distributed_c10d._world.pg_map

    def free_bytes(*_, **__):
        return 100 - len(live)

    with mock.patch.object(cluster, "default_memory_limit_bytes", new=free_bytes):
        found = measure_cluster(CPU, local_ranks=dist.get_world_size(), node_size=node_size)
    return found.memory_bytes, len(live)
