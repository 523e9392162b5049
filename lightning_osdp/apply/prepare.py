"""Preparation of a module for sharding: checks against the plan, splits, and storage and values for tensors on meta.

Tensors on the meta device get storage for one unit at a time, right before the unit is sharded.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from typing_extensions import override

from lightning_osdp.apply.internals import access
from lightning_osdp.core.plans.plan import Plan
from lightning_osdp.errors import ConfigurationError, PlanMismatchError, ProfileError
from lightning_osdp.operations.splitting import SplitModule, compiled_whole, parameter_like, split, splittable
from lightning_osdp.operations.stationary import is_stationary, refusal
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
    others = (tensor for _, _, _, tensor in _tensors(module) if tensor is not parameter)
    return storage.nbytes() == parameter.nbytes and all(
        other.untyped_storage()._cdata != storage._cdata for other in others
    )


def prepared(module: nn.Module, plan: Plan) -> dict[str, nn.Module]:
    """Checks that a module is the one of the plan; returns its modules by name.

    Raises:
        PlanMismatchError: the plan is for another model, see `apply_plan`.
        ConfigurationError: a unit has trainable parameters of several dtypes, or slices and several operators, or is
            inside a module that is compiled whole.
    """
    modules = dict(module.named_modules())
    _check_units(plan, modules)
    _check_parameters(plan, module)
    _check_compiled(plan, module)
    _check_slices(plan, module)
    _check_exchanges(plan, module)
    call_layers_in_evaluation(module)
    return modules


def slices_of(operator: nn.Module, num_slices: int, initialize: object) -> list[nn.Module]:
    """Splits an operator; returns its slices, each a unit to shard."""
    if isinstance(initialize, UnitInitializer):
        return list(initialize.split(operator, num_slices).slices)
    if any(parameter.is_meta for parameter in operator.parameters()):
        raise ConfigurationError(
            f"Expected no param_init_fn where {type(operator).__name__} on the meta device is split into {num_slices}"
            " slices: it would initialise each slice as an operator of its own. Leave param_init_fn out."
        )
    return list(split(operator, num_slices).slices)


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
            inside = next((name for name in unit.wrapped_modules if name.startswith(f"{whole}.")), None)
            if inside is not None:
                raise ConfigurationError(
                    f"Expected no unit inside {whole!r}, which is compiled with fullgraph=True, but the plan has"
                    f" {inside!r}: nothing can be all-gathered within one graph. Plan anew by leaving out `plan=`, or"
                    " compile without fullgraph."
                )


def _nearest(operator: str, units: Collection[str]) -> str:
    """Unit that takes the parameters of an operator: the nearest module at or above the operator that is a unit."""
    name = operator
    while name and name not in units:
        name = name.rpartition(".")[0]
    return name


def unit_initializer(module: nn.Module, device: torch.device) -> UnitInitializer | None:
    """Initialiser for modules of a unit; None where no rank has tensors on meta. Call it on all ranks.

    Tensors of a unit get storage, then the values of rank 0, or those that ``reset_parameters`` of their modules makes
    there. Values that a rank has are taken from the module at once and come back with their unit. Ties stay ties.
    Initialised values depend on the random state of rank 0 alone, neither on the units nor on the ranks. Errors are
    those of `check_initializable`.
    """
    missing = check_initializable(module, device)
    return None if missing is None else UnitInitializer(module, device, missing)


def check_initializable(module: nn.Module, device: torch.device) -> set[str] | None:
    """Names of the tensors that have no values on rank 0; None where no rank has meta tensors. Call it on all ranks.

    Raises:
        ProfileError: a module that owns such tensors has no ``reset_parameters`` to initialise them with.
    """
    missing = {name for name, _, _, tensor in _tensors(module) if tensor.is_meta}
    if dist.is_initialized() and dist.get_world_size() > 1:
        is_meta = torch.tensor(float(bool(missing)), device=device)
        dist.all_reduce(is_meta, dist.ReduceOp.MAX)
        if not is_meta:
            return None
        names: list[Any] = [missing]
        dist.broadcast_object_list(names, src=0)
        missing = names[0]
    elif not missing:
        return None
    for full_name, child, name, _ in _tensors(module):
        if full_name in missing and _reset(child) is None:
            path = full_name.removesuffix(name).rstrip(".")
            raise ProfileError(
                f"Expected every module on the meta device to have reset_parameters(), which initialises it, but"
                f" {path or 'the model itself'} ({type(child).__name__}) has none. Write one, or create the module on a"
                " real device, on rank 0 at least."
            )
    return missing


class UnitInitializer:
    """Initialiser of `unit_initializer`; it moves the whole model to the meta device.

    ``missing`` are the names of the tensors that have no values on rank 0.
    """

    def __init__(self, module: nn.Module, device: torch.device, missing: set[str]) -> None:
        self._device = device
        self._paths = {child: path for path, child in module.named_modules()}
        seed = int(torch.randint(2**62, ()))
        self._seeds = {child: seed + index for index, child in enumerate(module.modules())}
        self._missing: set[Tensor] = set()
        stand_ins: dict[Tensor, Tensor] = {}
        for full_name, child, name, tensor in list(_tensors(module)):
            stand_in = tensor
            if not tensor.is_meta:
                stand_in = stand_ins.setdefault(tensor, _empty(tensor, torch.device("meta")))
                setattr(child, name, stand_in)
            if full_name in missing:
                self._missing.add(stand_in)
        self._kept = {stand_in: tensor for tensor, stand_in in stand_ins.items()}
        self._real: dict[Tensor, Tensor] = {}
        self._wholes: dict[nn.Module, tuple[nn.Module, SplitModule]] = {}

    def split(self, operator: nn.Module, num_slices: int) -> SplitModule:
        """Splits an operator of the model in place; its slices will be parts of the initialised operator."""
        whole = copy.copy(operator)
        whole._parameters = dict(operator._parameters)
        self._seeds[whole] = self._seeds[operator]
        module = split(operator, num_slices)
        for index, part in enumerate(module.slices):
            self._paths[part] = f"{self._paths[module]}.slices.{index}"
            self._wholes[part] = whole, module
        return module

    def __call__(self, unit: nn.Module) -> None:
        """Initialises a unit, given its module; calls for modules inside find nothing left to do.

        One slice of an operator initialises all of them.
        """
        if unit in self._wholes:
            whole, module = self._wholes[unit]
            self(whole)
            module.fill(whole._parameters)
            for part in module.slices:
                self._wholes.pop(part)
            return
        modules = list(children_first(unit))
        if not any(tensor.is_meta for child in modules for _, tensor in _own(child)):
            return
        generators = [self._device] if self._device.type == "cuda" else []
        with torch.no_grad(), torch.random.fork_rng(generators), self._device, self._units_hidden(modules):
            for child in modules:
                self._initialize(child)
        if dist.is_initialized() and dist.get_world_size() > 1:
            for tensor in dict.fromkeys(tensor for child in modules for _, tensor in _own(child)):
                _copy_from_rank_zero(tensor.detach())
        # Real parameters are not needed any more: units may share a buffer, but never a parameter.
        self._real = {key: real for key, real in self._real.items() if not isinstance(real, nn.Parameter)}

    def _initialize(self, module: nn.Module) -> None:
        tensors = list(_own(module))
        fresh = {tensor for _, tensor in tensors if tensor in self._missing and tensor not in self._real}
        for name, tensor in tensors:
            if tensor.is_meta:
                setattr(module, name, self._with_storage(tensor))
        if fresh:
            known = [self._real[tensor] for _, tensor in tensors if tensor not in fresh]
            values = [tensor.clone() for tensor in known]
            torch.manual_seed(self._seeds[module])
            _reset(module)()
            for tensor, value in zip(known, values, strict=True):
                tensor.copy_(value)

    def _with_storage(self, tensor: Tensor) -> Tensor:
        if tensor not in self._real:
            real = self._kept.pop(tensor, None)
            if real is None:
                real = _empty(tensor, self._device)
            else:
                real.data = real.data.to(self._device)
            self._real[tensor] = real
        return self._real[tensor]

    @contextmanager
    def _units_hidden(self, modules: list[nn.Module]) -> Iterator[None]:
        """Hides sharded units from ``reset_parameters``, which would fill each shard with the same values."""
        units = [
            (parent, name, child) for parent in modules for name, child in parent._modules.items() if _is_done(child)
        ]
        for parent, name, unit in units:
            parent._modules[name] = _Sharded(self._paths[unit])
        try:
            yield
        finally:
            for parent, name, unit in units:
                parent._modules[name] = unit


def _is_done(module: object) -> bool:
    """Tells if a module has been made a unit, or to move activations."""
    return isinstance(module, FSDPModule) or is_stationary(module)


class _Sharded(nn.Module):
    """Stand-in for a unit that is sharded already; it raises where anything looks into it."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.__dict__["path"] = path

    def __getattr__(self, name: str) -> NoReturn:
        raise ProfileError(
            "Expected reset_parameters() of a module on the meta device to initialise what the module itself owns, but"
            f" one asked for {name!r} of {self.path}, which is a unit of its own and sharded already. Let"
            f" {self.path} initialise itself, or create the model with its values on rank 0."
        )

    @override
    def apply(self, fn: object) -> NoReturn:
        self.__getattr__("apply")

    @override
    def named_modules(self, *args: object, **kwargs: object) -> NoReturn:
        self.__getattr__("modules")


def _reset(module: nn.Module) -> Any:
    """Initialisation method of a module, under either name that torch gives it; None without one."""
    return getattr(module, "reset_parameters", getattr(module, "_reset_parameters", None))


def children_first(module: nn.Module) -> Iterator[nn.Module]:
    """Modules of one unit in the order in which constructors initialise them: a parent has the last word."""
    for child in module.children():
        if not _is_done(child):
            yield from children_first(child)
    yield module


def _tensors(module: nn.Module) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    """Parameters and buffers, tied ones under every name: whole name, owner, name there, tensor."""
    for path, child in module.named_modules():
        for name, tensor in _own(child):
            yield f"{path}.{name}".lstrip("."), child, name, tensor


def _own(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers of the module itself, by name."""
    for tensors in (module._parameters, module._buffers):
        yield from ((name, tensor) for name, tensor in tensors.items() if tensor is not None)


def _empty(tensor: Tensor, device: torch.device) -> Tensor:
    """Tensor without values on a device, with the attributes that users have set; a parameter for a parameter."""
    empty = torch.empty_like(tensor, device=device)
    if isinstance(tensor, nn.Parameter):
        return parameter_like(empty, tensor)
    vars(empty).update(vars(tensor))
    return empty


def _copy_from_rank_zero(tensor: Tensor) -> None:
    """Broadcasts a tensor as bytes, so of any dtype, and in memory order, so of any strides."""
    if not tensor.numel():
        return
    flat = tensor.reshape(-1)
    dist.broadcast(flat.view(torch.uint8), src=0)
    if not tensor.is_contiguous() and dist.get_rank() > 0:
        tensor.copy_(flat.view_as(tensor))
