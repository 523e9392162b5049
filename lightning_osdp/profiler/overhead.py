"""What a unit costs beside its collectives: the runtime's hooks, views and copies, measured on the process group."""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

from lightning_osdp.core.cluster import Cluster, UnitOverhead
from lightning_osdp.core.modes import MODES
from lightning_osdp.profiler.timing import synchronize

_STRATEGIES = {"ZDP": ShardingStrategy.FULL_SHARD, "DP": ShardingStrategy.SHARD_GRAD_OP}
_WIDTHS = (64, 512)
"""Square float32 layers of 16 KiB and 1 MiB: overhead is affine in the bytes that are copied."""
_FEW, _MANY = 1, 6
_REPEATS = 5


def measure_unit_overhead(cluster: Cluster, device: torch.device) -> Mapping[str, UnitOverhead]:
    """Seconds per unit and micro-batch, by mode, that neither collectives nor the operators explain.

    Chains of one and of six equal units are run forward and backward, wrapped and plain; the difference per unit, less
    the links' prediction of its collectives, is the overhead. Call it on all ranks.

    Returns:
        The same values on every rank: those of the slowest. Empty with one rank.
    """
    if cluster.world_size == 1:
        return {}
    with torch.random.fork_rng(devices=[]):  # layers are initialised on the CPU
        measured = {name: _measure_mode(name, cluster, device) for name in MODES}
    # ZDP does all that DP does, and more: what says otherwise is noise, and would make plans shard for nothing.
    dp, zdp = measured["DP"], measured["ZDP"]
    return {
        "ZDP": zdp,
        "DP": UnitOverhead(
            fixed_s=min(dp.fixed_s, zdp.fixed_s), seconds_per_byte=min(dp.seconds_per_byte, zdp.seconds_per_byte)
        ),
    }


def _measure_mode(name: str, cluster: Cluster, device: torch.device) -> UnitOverhead:
    points = []
    for width in _WIDTHS:
        num_bytes = 4 * width * width
        seconds = _per_unit_s(name, width, device)
        gathers = MODES[name].num_all_gathers() * cluster.all_gather.ring_s(num_bytes, cluster.world_size)
        reduces = MODES[name].num_reduce_scatters() * cluster.reduce_scatter.ring_s(num_bytes, cluster.world_size)
        points.append((num_bytes, max(0.0, seconds - gathers - reduces)))
    (small, small_s), (large, large_s) = points
    slope = max(0.0, (large_s - small_s) / (large - small))
    return UnitOverhead(fixed_s=max(0.0, small_s - slope * small), seconds_per_byte=slope)


def _per_unit_s(name: str, width: int, device: torch.device) -> float:
    """Seconds that one more unit adds to forward and backward, less what its layer takes unwrapped."""
    seconds = {}
    for num_units in (_FEW, _MANY):
        plain = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(num_units))).to(device)
        unwrapped_s = _fastest_s(plain, width, device)
        for index, layer in enumerate(plain):
            plain[index] = FullyShardedDataParallel(
                layer, sharding_strategy=_STRATEGIES[name], device_id=device, use_orig_params=True
            )
        wrapped = FullyShardedDataParallel(
            plain, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP, device_id=device, use_orig_params=True
        )
        seconds[num_units] = _fastest_s(wrapped, width, device) - unwrapped_s
    slowest = torch.tensor((seconds[_MANY] - seconds[_FEW]) / (_MANY - _FEW), dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return float(slowest.item())


def _fastest_s(module: nn.Module, width: int, device: torch.device) -> float:
    batch = torch.ones(1, width, device=device)
    best = float("inf")
    for _ in range(_REPEATS + 1):
        module.zero_grad()
        dist.barrier()
        synchronize(device)
        start = time.perf_counter()
        module(batch).sum().backward()
        synchronize(device)
        best = min(best, time.perf_counter() - start)
    return best
