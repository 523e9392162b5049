"""Storage and values for tensors on the meta device, for one unit at a time, right before the unit is sharded."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from typing_extensions import override

from lightning_osdp.errors import ConfigurationError, ProfileError
from lightning_osdp.operations.splitting import SplitModule, parameter_like, split
from lightning_osdp.operations.stationary import is_stationary


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
    missing = {name for name, _, _, tensor in tensors_of(module) if tensor.is_meta}
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
    for full_name, child, name, _ in tensors_of(module):
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
        for full_name, child, name, tensor in list(tensors_of(module)):
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


def tensors_of(module: nn.Module) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
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
