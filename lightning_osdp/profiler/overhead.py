"""What a unit costs beside its collectives: the runtime's hooks, views and copies, measured on the process group."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

from lightning_osdp.core.cluster import Cluster, UnitOverhead
from lightning_osdp.core.modes import DP, MODES
from lightning_osdp.profiler.timing import synchronize

_STRATEGIES = {"ZDP": ShardingStrategy.FULL_SHARD, "DP": ShardingStrategy.SHARD_GRAD_OP}
_HELD = "held"
"""Between the first and the last micro-batch of a window, a DP unit that accumulates: without any collective."""
_WIDTHS = (64, 512)
"""Square float32 layers of 16 KiB and 1 MiB: overhead is affine in the bytes that are copied."""
_FEW, _MANY = 1, 6
_REPEATS = 5


def measure_unit_overhead(cluster: Cluster, device: torch.device) -> Mapping[str, UnitOverhead]:
    """Seconds of each of `UNIT_PARTS` that neither collectives nor the operators explain.

    Chains of one and of six equal units are run forward and backward, wrapped and plain; the difference per unit, less
    the links' prediction of its collectives, is the overhead. Call it on all ranks.

    Returns:
        The same values on every rank: those of the slowest. Empty with one rank.
    """
    if cluster.world_size == 1:
        return {}
    points: dict[str, list[tuple[int, float]]] = {}
    with torch.random.fork_rng(devices=[]):  # layers are initialised on the CPU
        for width in _WIDTHS:
            num_bytes = 4 * width * width
            gather_s = cluster.all_gather.ring_s(num_bytes, cluster.world_size)
            reduce_s = cluster.reduce_scatter.ring_s(num_bytes, cluster.world_size)
            collectives_s = {name: mode.num_all_gathers() * gather_s + reduce_s for name, mode in MODES.items()}
            for name, seconds in _per_unit_s(width, device).items():
                points.setdefault(name, []).append((num_bytes, max(0.0, seconds - collectives_s.get(name, 0.0))))
    measured = {name: _fitted(*of_name) for name, of_name in points.items()}
    fixed_s = parts_s(*(measured[name].fixed_s for name in ("ZDP", "DP", _HELD)))
    per_byte_s = parts_s(*(measured[name].seconds_per_byte for name in ("ZDP", "DP", _HELD)))
    return {part: UnitOverhead(fixed_s=fixed_s[part], seconds_per_byte=per_byte_s[part]) for part in fixed_s}


def parts_s(zdp_s: float, dp_s: float, held_s: float) -> dict[str, float]:
    """Seconds of the parts that make up what was measured of one micro-batch: none is less than nothing.

    ZDP does all that DP does and gathers once more, and without collectives there is less to do than with them: what
    says otherwise is noise. Flattening and reducing are not told apart further than the difference shows.

    Args:
        zdp_s: two gathers, flattening and reducing.
        dp_s: one gather, flattening and reducing.
        held_s: flattening and accumulating.

    Example:
        >>> parts_s(7.0, 5.0, 1.0)
        {'gather': 2.0, 'flatten': 1.0, 'reduce': 2.0, 'accumulate': 0.0}
    """
    dp_s = min(max(dp_s, zdp_s / 2), zdp_s)
    held_s = min(held_s, dp_s)
    gather_s = zdp_s - dp_s
    flatten_s = min(held_s, dp_s - gather_s)
    return {
        "gather": gather_s,
        "flatten": flatten_s,
        "reduce": dp_s - gather_s - flatten_s,
        "accumulate": held_s - flatten_s,
    }


def _fitted(small: tuple[int, float], large: tuple[int, float]) -> UnitOverhead:
    (small_bytes, small_s), (large_bytes, large_s) = small, large
    slope = max(0.0, (large_s - small_s) / (large_bytes - small_bytes))
    return UnitOverhead(fixed_s=max(0.0, small_s - slope * small_bytes), seconds_per_byte=slope)


def _per_unit_s(width: int, device: torch.device) -> dict[str, float]:
    """Seconds that one more unit adds to forward and backward, less what its layer takes unwrapped."""
    few, many = (_chain_s(width, num_units, device) for num_units in (_FEW, _MANY))
    slowest = torch.tensor([many[name] - few[name] for name in many], dtype=torch.float64, device=device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return dict(zip(many, (slowest / (_MANY - _FEW)).tolist(), strict=True))


def _chain_s(width: int, num_units: int, device: torch.device) -> dict[str, float]:
    """Seconds that wrapping a chain of layers adds to its forward and backward."""
    seconds = {}
    for name, strategy in _STRATEGIES.items():
        plain = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(num_units))).to(device)
        plain_s = _fastest_s(plain, width, device)
        units = [
            FullyShardedDataParallel(layer, sharding_strategy=strategy, device_id=device, use_orig_params=True)
            for layer in plain
        ]
        wrapped = FullyShardedDataParallel(
            nn.Sequential(*units),
            sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
            device_id=device,
            use_orig_params=True,
        )
        seconds[name] = _fastest_s(wrapped, width, device) - plain_s
        if name == DP.name:
            seconds[_HELD] = _fastest_s(wrapped, width, device, holding=units) - plain_s
    return seconds


def _fastest_s(
    module: nn.Module, width: int, device: torch.device, holding: Iterable[FullyShardedDataParallel] = ()
) -> float:
    """Seconds of forward and backward; units that hold what they have gathered keep it, and add up gradients."""
    units = list(holding)
    for unit in units:
        unit._sync_gradients = False  # type: ignore[assignment]  # a bool, of which FSDP's annotations do not know
    batch = torch.ones(1, width, device=device)
    best = float("inf")
    for _ in range(_REPEATS + 1):
        if not units:
            module.zero_grad()
        dist.barrier()
        synchronize(device)
        start = time.perf_counter()
        module(batch).sum().backward()
        synchronize(device)
        best = min(best, time.perf_counter() - start)
    return best
