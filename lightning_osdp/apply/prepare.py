"""What is done with a module before it is sharded: checks that it can be, as planned, and operators that are split."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn
from torch.distributed.fsdp import FSDPModule

from lightning_osdp.apply.internals import do_nothing
from lightning_osdp.apply.materialize import UnitInitializer
from lightning_osdp.core.plans.plan import Plan, Unit
from lightning_osdp.errors import ConfigurationError, PlanMismatchError
from lightning_osdp.splitting import compiled_whole, split, splittable


def check_shardable(module: nn.Module) -> None:
    """Returns if ``fully_shard`` can have all parameters of a module.

    Raises:
        ConfigurationError: somebody sharded a part of it already, or a parameter is a scalar, not contiguous, or has a
            hook that runs where gradients add up.
    """
    for name, child in module.named_modules():
        if isinstance(child, FSDPModule):
            raise ConfigurationError(
                f"Expected a model that nothing has sharded, but {name or 'the model'!r} is under fully_shard already."
                " Leave that call out: the plan decides it."
            )
    for name, parameter in module.named_parameters():
        if parameter.dim() == 0:
            raise ConfigurationError(
                f"Expected parameters with at least one dimension, which fully_shard cuts into rows, got a scalar,"
                f" {name!r}. Make it a tensor of one element, torch.nn.Parameter(value.reshape(1))."
            )
        if parameter._post_accumulate_grad_hooks:
            raise ConfigurationError(
                f"Expected no register_post_accumulate_grad_hook before the model is sharded, got one of {name!r}:"
                " gradients of a sharded model add up elsewhere. Register it in on_fit_start, where the parameter is a"
                " DTensor and its hook sees the mean over all ranks, or change gradients in on_before_optimizer_step;"
                " hooks of parameter.register_hook() are carried over."
            )
        if not parameter.is_contiguous():
            raise ConfigurationError(
                f"Expected contiguous parameters, which fully_shard needs, got strides {tuple(parameter.stride())} for"
                f" shape {tuple(parameter.shape)} of {name!r}. Make it contiguous: parameter.data ="
                " parameter.data.contiguous()."
            )


def prepared(module: nn.Module, plan: Plan) -> dict[str, nn.Module]:
    """The module's own modules by name, if the plan is for it.

    Raises:
        PlanMismatchError: the module of a unit or block is not there or cannot be one, operators' parameters would end
            up in another unit, or the model has parameters that the plan does not know.
        ConfigurationError: a unit has trainable parameters of several dtypes, or slices and several operators, or is
            inside a module that is compiled whole.
    """
    modules = dict(module.named_modules())
    _check_units(plan, modules)
    _check_parameters(plan, module)
    _check_compiled(plan, module)
    _check_slices(plan, module)
    call_layers_in_evaluation(module)
    return modules


def modules_of(unit: Unit) -> tuple[str, ...]:
    """Names of the modules that a unit consists of."""
    return unit.modules or (unit.name,)


def slices_of(operator: nn.Module, num_slices: int, initialize: object) -> list[nn.Module]:
    """The slices that an operator is split into, each a unit to shard."""
    if isinstance(initialize, UnitInitializer):
        return list(initialize.split(operator, num_slices).slices)
    if any(parameter.is_meta for parameter in operator.parameters()):
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
            layer.register_forward_pre_hook(do_nothing)


def _check_units(plan: Plan, modules: dict[str, nn.Module]) -> None:
    unit_at = {name: unit.name for unit in plan.units for name in modules_of(unit)}
    for unit in plan.units:
        missing = [name for name in (*modules_of(unit), *unit.operators) if name not in modules]
        if missing:
            raise PlanMismatchError(
                f"Expected the model to have the modules of the plan's unit {unit.name!r}, but {missing[0]!r} is not"
                " there. Plan anew by leaving out `plan=`."
            )
        for operator in unit.operators:
            holder = unit_at[_nearest(operator, unit_at)]
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
        for unit in plan.units:
            inside = next((name for name in modules_of(unit) if name.startswith(f"{whole}.")), None)
            if inside is not None:
                raise ConfigurationError(
                    f"Expected no unit inside {whole!r}, which is compiled with fullgraph=True, but the plan has"
                    f" {inside!r}: nothing can be all-gathered within one graph. Plan anew by leaving out `plan=`, or"
                    " compile without fullgraph."
                )


def _nearest(operator: str, units: Collection[str]) -> str:
    """The unit that an operator's parameters go into: the nearest module at or above it that is one."""
    name = operator
    while name and name not in units:
        name = name.rpartition(".")[0]
    return name
