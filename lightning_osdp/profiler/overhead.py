"""What a unit costs beside its collectives: the runtime's hooks, views and copies, measured on the process group."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, ShardingStrategy, fully_shard

from lightning_osdp.core.cluster import UNIT_PARTS, Cluster, UnitOverhead
from lightning_osdp.profiler.fastest import REPEATS, fastest_s

_SMALL, _MEDIUM, _LARGE = 64, 512, 1024
"""Widths of square float32 layers of 16 KiB, 1 and 4 MiB: overhead is affine in the bytes of a unit."""
_FEW, _MANY = 1, 6
_COLLECTIVES = (REPEATS + 1) * (_FEW + _MANY) * 3
"""Timed for each width: gathers of forward alone, gathers and reduces of forward and backward."""
_PATIENCE_S = 5.0
"""For collectives of the largest width."""


def measure_unit_overhead(cluster: Cluster, device: torch.device, *, engine: str) -> Mapping[str, UnitOverhead]:
    """Seconds of each of `UNIT_PARTS` that neither collectives nor the operators explain.

    Chains of one and of six equal units are run, wrapped and plain; the difference per unit, less the links' prediction
    of its collectives, is the overhead. Forward alone tells a gather from all the rest. Units of 16 KiB and of 4 MiB
    are measured, or of 1 MiB where collectives of so many bytes take too long. Call it on all ranks.

    Args:
        cluster: with the links.
        device: where to run.
        engine: what shards: ``fsdp1`` or ``fsdp2``.

    Returns:
        The same values on every rank: those of the slowest. Empty with one rank.
    """
    if cluster.world_size == 1:
        return {}
    small, large = (_at_width(width, cluster, device, engine) for width in (_SMALL, _large_width(cluster)))
    gc.collect()  # what shards a module refers to it and to itself: nothing of the chains outlives this
    return {part: _fitted((small[0], small[1][part]), (large[0], large[1][part])) for part in UNIT_PARTS}


def parts_s(gather_s: float, dp_s: float, held_s: float) -> dict[str, float]:
    """Seconds of the parts that make up what was measured of one micro-batch: none is less than nothing.

    Without collectives there is less to do than with them: what says otherwise is noise. Flattening and reducing are
    not told apart further than the difference shows.

    Args:
        gather_s: one gather.
        dp_s: one gather, flattening and reducing.
        held_s: flattening and accumulating.

    Example:
        >>> parts_s(2.0, 5.0, 1.0)
        {'gather': 2.0, 'flatten': 1.0, 'reduce': 2.0, 'accumulate': 0.0}
    """
    gather_s = max(0.0, gather_s)
    backward_s = max(0.0, dp_s - gather_s)
    held_s = min(max(0.0, held_s), gather_s + backward_s)
    flatten_s = min(held_s, backward_s)
    return {
        "gather": gather_s,
        "flatten": flatten_s,
        "reduce": backward_s - flatten_s,
        "accumulate": held_s - flatten_s,
    }


def _large_width(cluster: Cluster) -> int:
    """The largest one, unless its collectives are predicted to take too long; the same on every rank."""
    num_bytes, links = 4 * _LARGE * _LARGE, (cluster.all_gather, cluster.reduce_scatter)
    longest_s = max(link.ring_s(num_bytes, cluster.world_size) for link in links)
    return _LARGE if _COLLECTIVES * longest_s <= _PATIENCE_S else _MEDIUM


def _at_width(width: int, cluster: Cluster, device: torch.device, engine: str) -> tuple[int, dict[str, float]]:
    """Bytes of a unit, and seconds of each part."""
    num_bytes = 4 * width * width
    gather_s = cluster.all_gather.ring_s(num_bytes, cluster.world_size)
    reduce_s = cluster.reduce_scatter.ring_s(num_bytes, cluster.world_size)
    few, many = (_chain_s(width, num_units, device, engine) for num_units in (_FEW, _MANY))
    gathered, dp, held = ((many[name] - few[name]) / (_MANY - _FEW) for name in ("gathered", "dp", "held"))
    return num_bytes, parts_s(gathered - gather_s, dp - gather_s - reduce_s, held)


def _fitted(small: tuple[int, float], large: tuple[int, float]) -> UnitOverhead:
    (small_bytes, small_s), (large_bytes, large_s) = small, large
    slope = max(0.0, (large_s - small_s) / (large_bytes - small_bytes))
    return UnitOverhead(fixed_s=max(0.0, small_s - slope * small_bytes), seconds_per_byte=slope)


def _chain_s(width: int, num_units: int, device: torch.device, engine: str) -> dict[str, float]:
    """Seconds that wrapping a chain of layers adds to forward, to a step, and to one without collectives."""
    plain = nn.Sequential(*_layers(width, num_units, device))
    batch = torch.ones(1, width, device=device)
    forward_s = fastest_s(partial(_forward, plain, batch), device)
    step_s = fastest_s(partial(_step, plain, batch), device)
    sharded = _wrapped if engine == "fsdp1" else _fully_sharded
    zdp = sharded(_layers(width, num_units, device), device, keeps=False)
    gathered_s = fastest_s(partial(_forward, zdp, batch), device)
    dp = sharded(_layers(width, num_units, device), device, keeps=True)
    dp_s = fastest_s(partial(_step, dp, batch), device)
    for unit in dp.modules():  # they keep what they have gathered, and add up gradients
        if isinstance(unit, FSDPModule):
            unit.set_requires_gradient_sync(False, recurse=False)
            unit.set_reshard_after_backward(False, recurse=False)
        elif isinstance(unit, FullyShardedDataParallel) and unit is not dp:
            unit._sync_gradients = False  # type: ignore[assignment]  # a bool, of which FSDP's annotations do not know
    held_s = fastest_s(partial(_step, dp, batch, accumulates=True), device)
    _free_flat(zdp)
    _free_flat(dp)
    return {"gathered": gathered_s - forward_s, "dp": dp_s - step_s, "held": held_s - step_s}


def _layers(width: int, num_layers: int, device: torch.device) -> list[nn.Linear]:
    return [nn.Linear(width, width, bias=False, device=device) for _ in range(num_layers)]


def _fully_sharded(layers: list[nn.Linear], device: torch.device, *, keeps: bool) -> nn.Module:
    """A chain of units of FSDP2."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for layer in layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=not keeps)
    chain = nn.Sequential(*layers)
    fully_shard(chain, mesh=mesh)
    return chain


def _wrapped(layers: list[nn.Linear], device: torch.device, *, keeps: bool) -> nn.Module:
    """A chain of units of FSDP1."""
    strategy = ShardingStrategy.SHARD_GRAD_OP if keeps else ShardingStrategy.FULL_SHARD
    units = [
        FullyShardedDataParallel(layer, sharding_strategy=strategy, device_id=device, use_orig_params=True)
        for layer in layers
    ]
    return FullyShardedDataParallel(
        nn.Sequential(*units),
        sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
        device_id=device,
        use_orig_params=True,
    )


def _free_flat(chain: nn.Module) -> None:
    """Frees the shards of FSDP1, which torch keeps alive."""
    for unit in chain.modules():
        if isinstance(unit, FullyShardedDataParallel) and unit._handle is not None:
            unit._handle.flat_param._local_shard.untyped_storage().resize_(0)


@torch.no_grad()
def _forward(module: nn.Module, batch: Tensor) -> None:
    module(batch)


def _step(module: nn.Module, batch: Tensor, *, accumulates: bool = False) -> None:
    if not accumulates:
        module.zero_grad()
    module(batch).sum().backward()
