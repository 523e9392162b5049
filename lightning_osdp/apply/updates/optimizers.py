"""Which optimizers can update what ``fully_shard`` has cut over ranks: those that take the step of whole parameters."""

from __future__ import annotations

import copy
import warnings
from collections import OrderedDict, defaultdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from lightning_osdp.apply.meshes import ONE_MESH
from lightning_osdp.apply.updates.local_step import on_rows
from lightning_osdp.errors import ConfigurationError

_NUM_STEPS = 2
_TOLERANCE = 0.05
"""Of the largest step: Muon rounds to bfloat16, and norms of two shards are off by a third."""


def try_optimizer(optimizer: Optimizer) -> None:
    """Returns if copies of the optimizer take the same steps on small parameters, whole and cut like the real ones.

    Their rows are uneven, and in each group one is tried for each number of dimensions on each mesh. Neither the
    optimizer nor a hook of it is called, and random numbers go on as if nothing had been. Call it on all ranks.

    Raises:
        ConfigurationError: it cannot step on shards, or takes the shards for the whole of a vector, as L-BFGS does.
    """
    name = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigurationError(
            "Expected an optimizer that updates each parameter by itself, got LBFGS, which takes inner products over"
            " all of them and would see shards alone. Use AdamW, or DDPStrategy for a model that fits whole."
        )
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    devices = sorted({p.device.index for p in parameters if p.device.type == "cuda"})
    with torch.random.fork_rng(devices), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected, failure = _attempt(optimizer, is_cut=False)
        again, _ = _attempt(optimizer, is_cut=False)
        found, sharded_failure = _attempt(optimizer, is_cut=True)
    if failure is not None:
        warnings.warn(
            f"OSDP: whether {name} can update parameters that are cut over ranks could not be tried, for a copy of it"
            f" cannot update whole ones either: {_told(failure)}. Compare losses with those under DDPStrategy.",
            stacklevel=2,
        )
    elif sharded_failure is not None:
        remedy = next(
            (text for said, text in ONE_MESH.items() if said in str(sharded_failure)),
            "Use another one or another of its implementations (foreach=True, fused=False).",
        )
        raise ConfigurationError(
            f"Expected an optimizer that can update parameters that are cut over ranks, but {name} cannot:"
            f" {_told(sharded_failure)}. {remedy}"
        ) from sharded_failure
    elif _is_same(expected, again) and not _is_close(expected, found):
        raise ConfigurationError(
            f"Expected an optimizer that updates parameters that are cut over ranks as it does whole ones, but {name}"
            " takes other steps: it reads values of this rank's rows alone, as to_local() does, and takes them for all."
            " Compute with the DTensors themselves, or use DDPStrategy for a model that fits whole."
        )


def _attempt(optimizer: Optimizer, *, is_cut: bool) -> tuple[list[Tensor], Exception | None]:
    """What `_stepped` returns or raises."""
    try:
        return _stepped(optimizer, is_cut=is_cut), None
    except Exception as error:
        return [], error


def _stepped(optimizer: Optimizer, *, is_cut: bool) -> list[Tensor]:
    """What steps of a copy of the optimizer add to small parameters, whole ones or such as are cut over ranks."""

    def made(values: Tensor, parameter: DTensor) -> Tensor:
        return distribute_tensor(values, parameter.device_mesh, parameter.placements) if is_cut else values

    trial: Any = object.__new__(type(optimizer))
    attributes = {**vars(optimizer), "state": defaultdict(dict)}  # whatever the state is, it need not be copied
    attributes.pop("step", None)  # a schedule's, which would step the optimizer itself
    attributes |= {name: OrderedDict() for name in attributes if name.endswith("_hooks")}
    memo: dict[int, object] = {id(optimizer): trial}
    memo |= {id(value): value for value in attributes.values() if isinstance(value, nn.Module)}
    tried: list[list[nn.Parameter]] = []
    starts: list[tuple[Tensor, nn.Parameter]] = []
    for group in optimizer.param_groups:
        by_kind: dict[Any, nn.Parameter] = {}
        for parameter in group["params"]:
            memo[id(parameter)] = parameter
            if isinstance(parameter, DTensor) and parameter.requires_grad:
                kind = (parameter.dim(), parameter.device_mesh, parameter.placements)
                if kind not in by_kind:
                    start, gradient = _small(parameter)
                    by_kind[kind] = small = nn.Parameter(made(start.clone(), parameter))
                    small.grad = made(gradient, parameter)
                    starts.append((start, small))
                memo[id(parameter)] = by_kind[kind]
        tried.append(list(by_kind.values()))
    trial.__dict__ = copy.deepcopy(attributes, memo)
    for group, parameters in zip(trial.param_groups, tried, strict=True):
        group["params"] = parameters
    trial.param_groups[:] = [group for group in trial.param_groups if group["params"]]
    step: Any = type(optimizer).step
    if getattr(step, "hooked", False):  # around it are hooks of all optimizers
        step = step.__wrapped__
    for _ in range(_NUM_STEPS):
        with on_rows(trial):
            step(trial, closure=lambda: torch.zeros(()))
    ends = [small.detach() for _, small in starts]
    wholes = [end.full_tensor() if isinstance(end, DTensor) else end for end in ends]
    return [whole - start for whole, (start, _) in zip(wholes, starts, strict=True)]


def _small(parameter: DTensor) -> tuple[Tensor, Tensor]:
    """Values with few rows, more than ranks and unevenly many, and a gradient."""
    shape = (2 * parameter.device_mesh.size() + 1, *(3 for _ in range(parameter.dim() - 1)))
    places = torch.arange(torch.Size(shape).numel(), device=parameter.device, dtype=torch.float64).view(shape)
    return places.square().cos().to(parameter.dtype), places.square().sin().to(parameter.dtype)  # of full rank


def _is_same(steps: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.equal(step, other) for step, other in zip(steps, others, strict=True))


def _is_close(steps: list[Tensor], others: list[Tensor]) -> bool:
    """Whether they differ by rounding, which weights of about one do, too."""
    return all(
        bool((step - other).abs().max() <= _TOLERANCE * step.abs().max() + 4 * torch.finfo(step.dtype).eps)
        for step, other in zip(steps, others, strict=True)
    )


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
