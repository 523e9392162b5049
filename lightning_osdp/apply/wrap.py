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
from lightning_osdp.apply.materialize import UnitInitializer, unit_initializer
from lightning_osdp.core.plan import Plan
from lightning_osdp.errors import ConfigurationError, PlanMismatchError
from lightning_osdp.splitting import split, splittable

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
    modules = dict(module.named_modules())
    _check_units(plan, modules)
    _check_parameters(plan, module)
    _check_slices(plan, module)
    call_layers_in_evaluation(module)
    if "param_init_fn" not in fsdp_kwargs:
        fsdp_kwargs["param_init_fn"] = unit_initializer(module, device)
    strategy: dict[nn.Module, ShardingStrategy] = {}
    for unit in plan.units:
        if unit.name:
            wrapped = _slices(modules[unit.name], unit.num_slices, fsdp_kwargs["param_init_fn"])
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


def _slices(operator: nn.Module, num_slices: int, initializer: object) -> list[nn.Module]:
    """The modules to wrap for a unit: its own, or the slices that it is split into."""
    if num_slices == 1:
        return [operator]
    if isinstance(initializer, UnitInitializer):
        return list(initializer.split(operator, num_slices).slices)
    if initializer is not None and any(parameter.is_meta for parameter in operator.parameters()):
        raise ConfigurationError(
            f"Expected no param_init_fn where {type(operator).__name__} on the meta device is split into {num_slices}"
            " slices: it would initialise each slice as an operator of its own. Leave param_init_fn out."
        )
    return list(split(operator, num_slices).slices)


def call_layers_in_evaluation(module: nn.Module) -> None:
    """Keeps torch's encoder layers off their fast path, which reads weights of layers that may be units not gathered.

    They take it in evaluation unless there are hooks.
    """
    for layer in module.modules():
        if isinstance(layer, nn.TransformerEncoderLayer):
            layer.register_forward_pre_hook(_no_change)


def _no_change(*_: object) -> None:
    """A hook that does nothing."""


def _check_executable(plan: Plan) -> None:
    for unit in plan.units:
        if unit.name == "" and unit.sync != "every":
            raise ConfigurationError(
                f"Expected the root unit to reduce its gradients in every micro-batch, got sync={unit.sync!r}: backward"
                " waits for the others' gradients only if the root reduces its own. Set it to 'every'."
            )


def _check_units(plan: Plan, modules: dict[str, nn.Module]) -> None:
    wrapped = {unit.name for unit in plan.units}
    for unit in plan.units:
        missing = [name for name in (unit.name, *unit.operators) if name not in modules]
        if missing:
            raise PlanMismatchError(
                f"Expected the model to have the modules of the plan's unit {unit.name!r}, but {missing[0]!r} is not"
                " there. Plan anew by leaving out `plan=`."
            )
        for operator in unit.operators:
            holder = _nearest(operator, wrapped)
            if holder != unit.name:
                raise PlanMismatchError(
                    f"Expected operator {operator!r} inside unit {unit.name!r}, as the plan says, but FSDP would put"
                    f" its parameters into unit {holder!r}. Plan anew by leaving out `plan=`."
                )


def _check_slices(plan: Plan, module: nn.Module) -> None:
    split_units = [unit for unit in plan.units if unit.num_slices > 1]
    features = splittable(module) if split_units else {}
    for unit in split_units:
        if unit.operators != (unit.name,):
            raise ConfigurationError(
                f"Expected a unit with {unit.num_slices} slices to be one operator, wrapped itself, but unit"
                f" {unit.name!r} holds {list(unit.operators)}. Give it one slice, or each operator a unit of its own."
            )
        if unit.name not in features:
            raise PlanMismatchError(
                f"Expected operator {unit.name!r} to be one that can be split into {unit.num_slices} slices, but this"
                f" {type(module.get_submodule(unit.name)).__name__} cannot: it is of a class without a splitter,"
                " changed, shares a parameter, or is not called by the module around it. Plan anew by leaving out"
                " `plan=`."
            )
        if unit.num_slices > features[unit.name]:
            raise PlanMismatchError(
                f"Expected operator {unit.name!r} to have a feature for each of its {unit.num_slices} slices, but it"
                f" has {features[unit.name]}. Plan anew by leaving out `plan=`."
            )


def _check_parameters(plan: Plan, module: nn.Module) -> None:
    holders = {operator: unit.name for unit in plan.units for operator in unit.operators}
    first: dict[str, tuple[str, nn.Parameter]] = {}
    for name, parameter in module.named_parameters():
        operator = name.rpartition(".")[0]
        if operator not in holders:
            raise PlanMismatchError(
                f"Expected the plan to say where every parameter goes, but no unit holds the operator of {name!r}."
                " Plan anew by leaving out `plan=`."
            )
        unit = holders[operator]
        other_name, other = first.setdefault(unit, (name, parameter))
        if parameter.dtype != other.dtype:
            raise ConfigurationError(
                f"FSDP keeps the parameters of a unit in one tensor of one dtype, but unit {unit!r} would hold"
                f" {other_name!r} ({other.dtype}) and {name!r} ({parameter.dtype}). Give them one dtype, or make a"
                " module of those that differ and plan with search_space=SearchSpace(min_unit_bytes=0)."
            )


def _nearest(operator: str, wrapped: set[str]) -> str:
    """The unit that FSDP puts an operator's parameters into: the nearest wrapped module at or above it."""
    name = operator
    while name and name not in wrapped:
        name = name.rpartition(".")[0]
    return name
