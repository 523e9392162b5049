"""Wraps a module in FSDP1 units exactly as a plan says; nothing is decided here."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch, FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.wrap import CustomPolicy

from lightning_osdp.apply.activations import apply_activations
from lightning_osdp.apply.materialize import unit_initializer
from lightning_osdp.apply.prepare import prepared, slices_of
from lightning_osdp.core.plan import Plan
from lightning_osdp.errors import ConfigurationError

STRATEGIES = {"ZDP": ShardingStrategy.FULL_SHARD, "DP": ShardingStrategy.SHARD_GRAD_OP}
_PREFETCH = {"pre": BackwardPrefetch.BACKWARD_PRE, "post": BackwardPrefetch.BACKWARD_POST, "none": None}


def apply_plan(module: nn.Module, plan: Plan, *, device: torch.device, **fsdp_kwargs: Any) -> FullyShardedDataParallel:
    """The module as an FSDP root whose units and modes are those of the plan.

    The module's children are replaced in place, operators with several slices are split (see
    `lightning_osdp.splitting`), and blocks get another forward (see `apply_activations`). Call it on all ranks of the
    default process group.

    Where any rank has tensors on the meta device, all ranks start with rank 0's values: those that rank 0 has, and what
    ``reset_parameters`` of the modules makes there of the others. Each unit gets storage only when it is to be sharded.

    Args:
        module: the unwrapped model that the plan was made for.
        plan: what to wrap how. The root unit stays gathered from forward to the end of backward whatever its mode.
        device: where the parameters go.
        **fsdp_kwargs: further arguments of ``FullyShardedDataParallel``, such as ``mixed_precision``. With a
            ``param_init_fn`` of the caller's, meta tensors are left to it.

    Raises:
        PlanMismatchError: the module of a unit or block is not there or cannot be one, operators' parameters would end
            up in another unit, or the model has parameters that the plan does not know.
        ConfigurationError: the plan asks for what this version or FSDP cannot execute.
        ProfileError: a module on the meta device cannot initialise itself, or initialises another unit.
    """
    _check_executable(plan)
    modules = prepared(module, plan, is_one_tensor=True)
    if "param_init_fn" not in fsdp_kwargs:
        fsdp_kwargs["param_init_fn"] = unit_initializer(module, device)
    strategy: dict[nn.Module, ShardingStrategy] = {}
    for unit in plan.units:
        if unit.name:
            wrapped = slices_of(modules[unit.name], unit.num_slices, fsdp_kwargs["param_init_fn"])
            strategy.update(zip(wrapped, (STRATEGIES[mode] for mode in unit.modes), strict=True))
    apply_activations(module, plan.blocks, device=device, units=[unit.name for unit in plan.units])

    def policy(child: nn.Module) -> bool | dict[str, Any]:
        return {"sharding_strategy": strategy[child]} if child in strategy else False

    return _wrapped(
        module,
        device,
        sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,
        auto_wrap_policy=CustomPolicy(policy),
        backward_prefetch=_PREFETCH[plan.backward_prefetch],
        forward_prefetch=plan.forward_prefetch,
        **fsdp_kwargs,
    )


def wrap_whole(module: nn.Module, *, device: torch.device, **fsdp_kwargs: Any) -> FullyShardedDataParallel:
    """The module as one unit, where there is no plan; arguments, meta tensors and ranks as in `apply_plan`."""
    return _wrapped(module, device, **fsdp_kwargs)


def forget_zeroed_gradients(units: Iterable[FullyShardedDataParallel]) -> None:
    """Drops reduced gradients of units that ``optimizer.zero_grad()`` has set to None; call it before backward.

    FSDP does so itself when backward reaches its root. Where a unit returns the loss itself, backward reaches that
    unit first, which then takes the gradients of the step before for accumulated ones.
    """
    for unit in units:
        if unit._handle is not None:
            unit._handle._reset_flat_param_grad_info_if_needed()


def _wrapped(module: nn.Module, device: torch.device, **fsdp_kwargs: Any) -> FullyShardedDataParallel:
    if "param_init_fn" not in fsdp_kwargs:
        fsdp_kwargs["param_init_fn"] = unit_initializer(module, device)
    with warnings.catch_warnings():
        # With one rank there is nothing to shard; the plan's table says so in its own words.
        warnings.filterwarnings("ignore", "FSDP is switching to use `NO_SHARD`", UserWarning)
        warnings.filterwarnings("ignore", "The `NO_SHARD` sharding strategy is deprecated", FutureWarning)
        return FullyShardedDataParallel(module, device_id=device, **{"use_orig_params": True, **fsdp_kwargs})


def _check_executable(plan: Plan) -> None:
    for unit in plan.units:
        if unit.name == "" and unit.sync != "every":
            raise ConfigurationError(
                f"Expected the root unit to reduce its gradients in every micro-batch, got sync={unit.sync!r}: backward"
                " waits for the others' gradients only if the root reduces its own. Set it to 'every'."
            )
