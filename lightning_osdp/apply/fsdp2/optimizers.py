"""Which optimizers can update what ``fully_shard`` has cut over ranks: those that can take one step of it."""

from __future__ import annotations

import copy
from collections import defaultdict
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from lightning_osdp.errors import ConfigurationError


def try_optimizer(optimizer: Optimizer) -> None:
    """Returns if a copy of the optimizer can step on small parameters that are cut like the real ones.

    Their rows are uneven, and one is tried for each number of dimensions in each group. Call it on all ranks.

    Raises:
        ConfigurationError: it cannot, or takes the shards for the whole of a vector, as L-BFGS does.
    """
    name = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ConfigurationError(
            "Expected an optimizer that updates each parameter by itself, got LBFGS, which takes inner products over"
            " all of them and would see shards alone. Use AdamW, or DDPStrategy for a model that fits whole."
        )
    stand_ins: dict[int, object] = {}
    tried: list[list[nn.Parameter]] = []
    for group in optimizer.param_groups:
        by_dims: dict[int, nn.Parameter] = {}
        for parameter in group["params"]:
            if isinstance(parameter, DTensor) and parameter.requires_grad:
                by_dims.setdefault(parameter.dim(), _small(parameter))
                stand_ins[id(parameter)] = by_dims[parameter.dim()]
            else:
                stand_ins[id(parameter)] = parameter
        tried.append(list(by_dims.values()))
    fresh: defaultdict[Any, Any] = defaultdict(dict)  # whatever the state is, it need not be copied
    trial = copy.copy(optimizer)
    trial.__dict__ = copy.deepcopy({**vars(optimizer), "state": fresh}, stand_ins)
    for group, parameters in zip(trial.param_groups, tried, strict=True):
        group["params"] = parameters
    trial.param_groups = [group for group in trial.param_groups if group["params"]]
    try:
        trial.step(lambda: 0.0)
    except Exception as error:
        raise ConfigurationError(
            f"Expected an optimizer that can update parameters that are cut over ranks, but {name} cannot:"
            f" {type(error).__name__}: {str(error).partition(chr(10))[0]}. Use another one or another of its"
            " implementations (foreach=True, fused=False), or engine='fsdp1'."
        ) from error


def _small(parameter: DTensor) -> nn.Parameter:
    """One with few rows, more than ranks and unevenly many, and a gradient."""
    mesh = parameter.device_mesh
    shape = (2 * mesh.size() + 1, *(3 for _ in range(parameter.dim() - 1)))
    values = torch.ones(shape, dtype=parameter.dtype, device=parameter.device)
    small = nn.Parameter(distribute_tensor(values, mesh, parameter.placements))
    small.grad = distribute_tensor(values, mesh, parameter.placements)
    return small
