"""Overhead of a unit beside its collectives: the runtime's hooks, views and copies, measured on the process group."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from lightning_osdp.core.cluster import Cluster, UnitOverhead
from lightning_osdp.operations.gloo import AllGather, is_by_gloo
from lightning_osdp.operations.reduce_scatter import ReduceScatter
from lightning_osdp.operations.splitting import split
from lightning_osdp.profiler.machine.stopwatch import REPEATS_TOGETHER, fastest_together_s

_SMALL, _MEDIUM, _LARGE = 64, 512, 1024
"""Widths of square float32 layers of 16 KiB, 1 and 4 MiB: overhead is affine in the bytes of a unit."""
_FEW, _MANY = 1, 6
"""Units of a chain."""
_ONE, _SEVERAL = 1, 6
"""Parameters of a unit."""
_CALLS = 24
"""Modules of a chain by which calls are measured."""
_SLICES = 8
"""Slices of a layer by which slices are measured."""
_REPEATS = 4 * REPEATS_TOGETHER
"""Runs of these chains, which are short."""
_UNIT_CALLS, _TENSOR_CALLS = 3.0, 1.0
"""Host time that a resident unit takes in a step for itself, and for each of its parameters, as a multiple of that of
hooks around a call: it shows whole weights and then shards. [Empirical: Python on one core of an AMD EPYC.]"""
_COLLECTIVES = (REPEATS_TOGETHER + 1) * (_FEW + _MANY) * 3
"""Collectives that are timed for each kind of unit: all-gathers of forward alone, all-gathers and reduce-scatters of
forward and backward."""
_PATIENCE_S = 5.0
"""Seconds for collectives of the largest width."""


def measure_unit_overhead(cluster: Cluster, device: torch.device) -> Mapping[str, UnitOverhead]:
    """Seconds of each of `UNIT_PARTS` that neither collectives nor the operators explain.

    Chains of one and of six equal units run, sharded and plain. The difference per unit, less the links' prediction of
    its collectives, is the overhead. Forward alone tells an all-gather from the rest. Units have one parameter of 16
    KiB, six of 16 KiB, or one of 4 MiB; the last has 1 MiB where collectives of 4 MiB take too long. Call it on all
    ranks; all get the values of the slowest.

    On CUDA the host is not ahead of the device here, as it mostly is in a step, so that what it takes for hooks counts:
    steps of one H200 took that longer for each unit, though the device had more to compute than the host to issue.
    [Measured: `benchmarks/one_gpu.py`; why is not known.]

    On CPU, where collectives run beside computing, a step does not wait for peers each time, as these chains do. The
    overhead is then the seconds for which the thread has a core, times what computing of all ranks takes over its own.

    The overhead of a resident unit is not measured, but stated in calls.
    """
    kinds = (_SMALL, _ONE), (_large_width(cluster), _ONE), (_SMALL, _SEVERAL)
    measured = [(_num_bytes(*kind), _measured_s(*kind, cluster, device)) for kind in kinds]
    gc.collect()  # states of fully_shard are in cycles with their modules: without this the chains would stay alive
    resident = UnitOverhead(fixed_s=_UNIT_CALLS * cluster.call_s, seconds_per_tensor=_TENSOR_CALLS * cluster.call_s)
    return {
        part: fitted(*((num_bytes, seconds[part]) for num_bytes, seconds in measured), num_tensors=_SEVERAL)
        for part in measured[0][1]
    } | {"stay": resident}


def parts_s(gather_s: float, dp_s: float, held_s: float) -> dict[str, float]:
    """Seconds of `UNIT_PARTS`, but of what stays, from measurements of one micro-batch, none below 0.

    A micro-batch without collectives takes no longer than one with them: a measurement that says otherwise is noise.

    Args:
        gather_s: one all-gather.
        dp_s: one all-gather, flattening and reducing.
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


def fitted(
    small: tuple[int, float], large: tuple[int, float], several: tuple[int, float], *, num_tensors: int
) -> UnitOverhead:
    """Overhead that explains the seconds of three kinds of units, given as (bytes, seconds); none of its parts below 0.

    Small and large units have one parameter; the third kind has several small ones.

    Example:
        >>> fitted((10, 2.6), (110, 3.6), (30, 6.8), num_tensors=3)
        UnitOverhead(fixed_s=0.5, seconds_per_byte=0.01, seconds_per_tensor=2.0)
    """
    per_byte_s = max(0.0, (large[1] - small[1]) / (large[0] - small[0]))
    rest_s = small[1] - per_byte_s * small[0]
    per_tensor_s = max(0.0, (several[1] - per_byte_s * several[0] - rest_s) / (num_tensors - 1))
    per_tensor_s = min(per_tensor_s, max(0.0, rest_s))
    return UnitOverhead(
        fixed_s=max(0.0, rest_s - per_tensor_s), seconds_per_byte=per_byte_s, seconds_per_tensor=per_tensor_s
    )


def _num_bytes(width: int, num_tensors: int) -> int:
    return 4 * width * width * num_tensors


def _large_width(cluster: Cluster) -> int:
    """Largest width, unless its collectives are predicted to take too long; equal on every rank."""
    links = (cluster.all_gather, cluster.reduce_scatter)
    longest_s = max(link.ring_s(_num_bytes(_LARGE, _ONE), cluster.world_size) for link in links)
    return _LARGE if _COLLECTIVES * longest_s <= _PATIENCE_S else _MEDIUM


def _measured_s(width: int, num_tensors: int, cluster: Cluster, device: torch.device) -> dict[str, float]:
    """Seconds of each of `parts_s` for a unit of so many square parameters."""
    num_bytes = _num_bytes(width, num_tensors)
    is_hidden = cluster.overlaps and device.type == "cpu"
    gather_s = 0.0 if is_hidden else cluster.all_gather.ring_s(num_bytes, cluster.world_size)
    reduce_s = 0.0 if is_hidden else cluster.reduce_scatter.ring_s(num_bytes, cluster.world_size)
    make = partial(_unit, width, num_tensors, device)
    few, many = (_chain_s(make, num_units, device, is_hidden=is_hidden) for num_units in (_FEW, _MANY))
    gathered, dp, held = ((many[name] - few[name]) / (_MANY - _FEW) for name in ("gathered", "dp", "held"))
    return parts_s(gathered - gather_s, dp - gather_s - reduce_s, held)


def _chain_s(
    make: Callable[[], nn.Module], num_units: int, device: torch.device, *, is_hidden: bool = False
) -> dict[str, float]:
    """Seconds that sharding a chain of units adds to forward, to a step, and to a step without collectives."""
    timed = partial(fastest_together_s, device=device, is_busy_only=is_hidden, is_ahead=False)
    plain = nn.Sequential(*(make() for _ in range(num_units)))
    batch = torch.ones(1, next(plain.parameters()).shape[1], device=device)
    forward_s = timed(partial(_forward, plain, batch))
    step_s, slowdown = _plain_s(plain, batch, device, is_hidden=is_hidden)
    zdp = _sharded([make() for _ in range(num_units)], device, keeps=False)
    gathered_s = timed(partial(_forward, zdp, batch))
    dp = _sharded([make() for _ in range(num_units)], device, keeps=True)
    dp_s = timed(partial(_step, dp, batch))
    for unit in dp.modules():  # no collectives from here on: parameters stay gathered, and gradients add up
        if isinstance(unit, FSDPModule):
            unit.set_requires_gradient_sync(False, recurse=False)
            unit.set_reshard_after_backward(False, recurse=False)
    held_s = timed(partial(_step, dp, batch, accumulates=True))
    added = {"gathered": gathered_s - forward_s, "dp": dp_s - step_s, "held": held_s - step_s}
    return {name: slowdown * seconds for name, seconds in added.items()}


def _plain_s(
    plain: nn.Module, batch: Tensor, device: torch.device, *, is_hidden: bool, repeats: int = REPEATS_TOGETHER
) -> tuple[float, float]:
    """Seconds of a step that is not sharded, and by which factor waiting for a core lengthens what is hidden."""
    step = partial(_step, plain, batch)
    timed = partial(fastest_together_s, step, device, repeats=repeats, is_ahead=False)
    step_s = timed(is_busy_only=is_hidden)
    return step_s, max(1.0, timed() / step_s) if is_hidden else 1.0


def measure_call_s(cluster: Cluster, device: torch.device) -> float:
    """Seconds that hooks which find nothing to do add to a call of a module, in forward and backward.

    Call it on all ranks; all get those of the slowest.
    """
    is_hidden = cluster.overlaps and device.type == "cpu"
    plain, hooked = (_unit(_SMALL, _CALLS, device) for _ in range(2))
    for module in hooked.children():
        module.register_forward_pre_hook(_enter, with_kwargs=True)
        module.register_forward_hook(_leave)
    batch = torch.ones(1, _SMALL, device=device)
    step_s, slowdown = _plain_s(plain, batch, device, is_hidden=is_hidden, repeats=_REPEATS)
    hooked_s = fastest_together_s(
        partial(_step, hooked, batch), device, repeats=_REPEATS, is_busy_only=is_hidden, is_ahead=False
    )
    return slowdown * max(0.0, hooked_s - step_s) / _CALLS


def measure_slice_s(device: torch.device) -> float:
    """Seconds of each further slice of an operator, in forward and backward, beside what the operator computes.

    Call it on all ranks; all get those of the slowest.
    """
    whole, sliced = (_unit(_SMALL, _SEVERAL, device) for _ in range(2))
    for layer in sliced.children():
        split(layer, _SLICES)
    batch = torch.ones(1, _SMALL, device=device)
    whole_s, sliced_s = (
        fastest_together_s(partial(_step, chain, batch), device, repeats=_REPEATS) for chain in (whole, sliced)
    )
    return max(0.0, sliced_s - whole_s) / (_SEVERAL * (_SLICES - 1))


@torch.compiler.disable  # type: ignore[untyped-decorator]  # as the hooks of units are
def _enter(*_: object) -> None:
    """Stands in for the hook before a call."""


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _leave(_: nn.Module, __: Any, output: Tensor) -> None:
    """Stands in for the hook after a call, which has one more run where backward comes to the output."""
    output.register_hook(_enter)


def _unit(width: int, num_tensors: int, device: torch.device) -> nn.Module:
    return nn.Sequential(*(nn.Linear(width, width, bias=False, device=device) for _ in range(num_tensors)))


def _sharded(units: list[nn.Module], device: torch.device, *, keeps: bool) -> nn.Module:
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for unit in units:
        fully_shard(unit, mesh=mesh, reshard_after_forward=not keeps)
    chain = nn.Sequential(*units)
    fully_shard(chain, mesh=mesh)
    if is_by_gloo(mesh.get_group(), device):
        gather, scatter = AllGather(), ReduceScatter()
        for unit in units:
            fsdp: Any = unit
            fsdp.set_custom_all_gather(gather)
            fsdp.set_custom_reduce_scatter(scatter)
    return chain


@torch.no_grad()
def _forward(module: nn.Module, batch: Tensor) -> None:
    module(batch)


def _step(module: nn.Module, batch: Tensor, *, accumulates: bool = False) -> None:
    if not accumulates:
        module.zero_grad()
    module(batch).sum().backward()
