"""Checks of a module before it is sharded: that ``fully_shard`` can take it, and that it is the one of the plan."""

from __future__ import annotations

import logging

import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecision

from lightning_osdp.apply.internals import access
from lightning_osdp.apply.preparing.initialize import tensors_of
from lightning_osdp.apply.units import ShardedUnit, policy_of
from lightning_osdp.core.plans.parts import Unit
from lightning_osdp.core.plans.plan import Plan
from lightning_osdp.core.text.names import upwards
from lightning_osdp.errors import ConfigurationError, PlanMismatchError
from lightning_osdp.operations.splitting import compiled_whole, splittable
from lightning_osdp.operations.stationary import refusal
from lightning_osdp.planner.engine import effects_of

_log = logging.getLogger(__name__)


def check_shardable(module: nn.Module) -> None:
    """Raises `ConfigurationError` if ``fully_shard`` cannot take all parameters of a module, or has some already."""
    for name, child in module.named_modules():
        if isinstance(child, FSDPModule):
            raise ConfigurationError(
                f"Expected a model that nothing has sharded, but {name or 'the model'!r} is under fully_shard already."
                " Leave that call out: the plan decides it."
            )
    for name, parameter in module.named_parameters():
        if parameter._post_accumulate_grad_hooks:
            raise ConfigurationError(
                f"Expected no register_post_accumulate_grad_hook before the model is sharded, got one of {name!r}:"
                " gradients of a sharded model add up elsewhere. Register it in on_fit_start, where the parameter is a"
                " DTensor and its hook sees the mean over all ranks, or change gradients in on_before_optimizer_step;"
                " hooks of parameter.register_hook() are carried over."
            )
        if parameter.requires_grad and not parameter.numel():
            raise ConfigurationError(
                f"Expected parameters with elements, got {name!r} of shape {tuple(parameter.shape)}, whose gradient"
                " fully_shard cannot reduce. Leave it out, make it a buffer, or freeze it with requires_grad_(False)."
            )
        if not parameter.is_contiguous() and not _has_own_memory(parameter, module):
            raise ConfigurationError(
                f"Expected parameters with memory of their own, which fully_shard cuts into rows, got strides"
                f" {tuple(parameter.stride())} for shape {tuple(parameter.shape)} of {name!r}, in memory that holds"
                " something else, too. Give it its own: parameter.data = parameter.data.contiguous()."
            )


def make_contiguous(module: nn.Module) -> None:
    """Makes parameters contiguous, such as weights in channels_last; says so on rank 0."""
    strided = [name for name, parameter in module.named_parameters() if not parameter.is_contiguous()]
    for name in strided:
        parameter = module.get_parameter(name)
        parameter.data = parameter.data.contiguous()
    if strided and (not dist.is_initialized() or dist.get_rank() == 0):
        _log.warning(
            "OSDP: fully_shard needs contiguous parameters: %s is made so, of %d that were not. Where that was"
            " channels_last, give it to inputs, x.to(memory_format=torch.channels_last), and convolutions keep to it.",
            strided[0],
            len(strided),
        )


def _has_own_memory(parameter: nn.Parameter, module: nn.Module) -> bool:
    """True if a parameter fills its storage, and no other tensor of the module is in it."""
    storage = parameter.untyped_storage()
    others = (tensor for _, _, _, tensor in tensors_of(module) if tensor is not parameter)
    return storage.nbytes() == parameter.nbytes and all(
        other.untyped_storage()._cdata != storage._cdata for other in others
    )


def prepared(module: nn.Module, plan: Plan, precision: MixedPrecision | None) -> dict[str, nn.Module]:
    """Checks that a module is the one of the plan; returns its modules by name.

    Raises:
        PlanMismatchError: the plan is for another model, see `apply_plan`.
        ConfigurationError: a unit has trainable parameters of several dtypes, or slices and several operators, or its
            shard is to be on the host though it is trained, or cannot be replicated; or it is inside a module that is
            compiled whole, or a block is.
    """
    modules = dict(module.named_modules())
    _check_units(plan, modules)
    _check_parameters(plan, module)
    _check_compiled(plan, module)
    _check_slices(plan, module)
    _check_exchanges(plan, module)
    _check_host_shards(plan, modules)
    _check_replicated(plan, modules, precision)
    call_layers_in_evaluation(module)
    return modules


def call_layers_in_evaluation(module: nn.Module) -> None:
    """Keeps torch's encoder layers off their fast path, which reads weights of layers that may be units and resharded.

    They take the fast path in evaluation unless they have hooks.
    """
    for layer in module.modules():
        if isinstance(layer, nn.TransformerEncoderLayer):
            layer.register_forward_pre_hook(access.do_nothing)


def _check_units(plan: Plan, modules: dict[str, nn.Module]) -> None:
    unit_at = {name: unit.name for unit in plan.units for name in unit.wrapped_modules}
    for unit in plan.units:
        missing = [name for name in (*unit.wrapped_modules, *unit.operators) if name not in modules]
        if missing:
            raise PlanMismatchError(
                f"Expected the model to have the modules of the plan's unit {unit.name!r}, but {missing[0]!r} is not"
                " there. Plan anew by leaving out `plan=`."
            )
        for operator in unit.operators:
            holder = unit_at[next((name for name in upwards(operator) if name in unit_at), "")]
            if holder != unit.name:
                raise PlanMismatchError(
                    f"Expected operator {operator!r} inside unit {unit.name!r}, as the plan says, but fully_shard"
                    f" would put its parameters into unit {holder!r}. Plan anew by leaving out `plan=`."
                )


def _check_slices(plan: Plan, module: nn.Module) -> None:
    split_units = [unit for unit in plan.units if unit.num_slices > 1]
    features = splittable(module) if split_units else {}
    for unit in split_units:
        if unit.operators != (unit.name,):
            raise ConfigurationError(
                f"Expected a unit with {unit.num_slices} slices to be one operator, sharded by itself, but unit"
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


def _check_exchanges(plan: Plan, module: nn.Module) -> None:
    """Raises a `ConfigurationError` where a unit is to move activations, and its operators cannot."""
    for unit in plan.units:
        if not effects_of(unit.treatments[0]).exchanges:
            continue
        why = "it is the root" if not unit.name else refusal(module, unit.exchange, unit.operators)
        if not why and unit.wrapped_modules != unit.operators:
            why = f"its modules are {list(unit.wrapped_modules)} and its operators {list(unit.operators)}"
        blocks = [block.name for block in plan.blocks if block.name in unit.operators]
        if not why and blocks:
            why = f"{blocks[0]!r} is a block that keeps less"
        if why:
            raise ConfigurationError(
                f"Expected unit {unit.name!r} to be able to move activations as {unit.exchange!r}, as the plan says,"
                f" but {why}. Plan anew by leaving out `plan=`, or have the unit move weights."
            )


def _check_host_shards(plan: Plan, modules: dict[str, nn.Module]) -> None:
    """Raises a `ConfigurationError` where a unit whose shard is to be on the host is trained in part, or not there."""
    for unit in plan.units:
        effects = [effects_of(each) for each in unit.treatments if effects_of(each).shard_on_host]
        if not effects:
            continue
        parameters = [(name, each) for name in unit.operators for each in modules[name].named_parameters(recurse=False)]
        trained = [f"{name}.{own}" for name, (own, each) in parameters if each.requires_grad]
        is_updated = all(each.updates_on_host for each in effects)
        if trained and not (is_updated and len(trained) == len(parameters)):
            raise ConfigurationError(
                f"Expected nothing to be trained of unit {unit.name!r}, whose shard the plan has on the host, or all of"
                f" it with states on the host, but {trained[0]!r} is. Freeze it with requires_grad_(False), or plan"
                " anew by leaving out `plan=`."
            )


def _check_replicated(plan: Plan, modules: dict[str, nn.Module], precision: MixedPrecision | None) -> None:
    """Raises a `ConfigurationError` where each rank is to have all of a unit whose weights its shard cannot be."""
    for unit in plan.units:
        if not effects_of(unit.treatments[0]).is_replicated:
            continue
        why = _why_not_replicated(unit, modules, precision) if unit.name else "it is the root"
        if why:
            raise ConfigurationError(
                f"Expected unit {unit.name!r} to be one of which each rank can have all, with home='one' (replicated)"
                f" as the plan says, but {why}. Give it another 'home', or plan anew by leaving out `plan=`."
            )


def _why_not_replicated(unit: Unit, modules: dict[str, nn.Module], precision: MixedPrecision | None) -> str:
    """Reason why weights of a unit cannot be views of its shard; empty where they can."""
    policy = policy_of(ShardedUnit(unit.name, tuple(modules[name] for name in unit.wrapped_modules)), precision)
    for name in unit.operators:
        for own, parameter in modules[name].named_parameters(prefix=name, recurse=False):
            if not parameter.dim():
                return f"{own!r} has no dimensions"
            if parameter.is_floating_point() and policy.param_dtype not in {None, parameter.dtype}:
                return f"{own!r} is kept in {parameter.dtype} and cast to {policy.param_dtype} for computing"
    return ""


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
        if not parameter.requires_grad:
            continue
        unit = holders[operator]
        other_name, other = first.setdefault(unit, (name, parameter))
        if parameter.dtype != other.dtype:
            raise ConfigurationError(
                f"fully_shard reduces the gradients of a unit in one tensor of one dtype, but unit {unit!r} would hold"
                f" {other_name!r} ({other.dtype}) and {name!r} ({parameter.dtype}). Give them one dtype, or make a"
                " module of those that differ and plan with"
                " search_space=SearchSpace(min_unit_bytes=0)."
            )


def _check_compiled(plan: Plan, module: nn.Module) -> None:
    for whole in compiled_whole(module):
        block = next((each.name for each in plan.blocks if not whole or each.name.startswith(f"{whole}.")), None)
        if block is not None:
            raise ConfigurationError(
                f"Expected no block that recomputes or offloads inside {repr(whole) if whole else 'the model'}, which"
                f" is compiled with fullgraph=True, but the plan has {block!r}: nothing can be dropped within a graph."
                " Plan anew by leaving out `plan=`, or compile without fullgraph."
            )
        for unit in plan.units:
            inside = next((name for name in unit.wrapped_modules if name.startswith(f"{whole}.")), None)
            if inside is not None:
                raise ConfigurationError(
                    f"Expected no unit inside {whole!r}, which is compiled with fullgraph=True, but the plan has"
                    f" {inside!r}: nothing can be all-gathered within one graph. Plan anew by leaving out `plan=`, or"
                    " compile without fullgraph."
                )
