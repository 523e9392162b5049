"""Changes of modules before and after ``fully_shard``, and undoing it for a while or for good."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._common_utils import collect_grad_tensors, replace_grad_tensors
from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo, TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import RegisterPostBackwardFunction
from torch.distributed.tensor import DTensor
from typing_extensions import override

from lightning_osdp.apply.internals import access, dtensors, gathering, resident
from lightning_osdp.errors import ConfigurationError
from lightning_osdp.operations.splitting import parameter_like

T = TypeVar("T")
_MARKS = ("_is_fsdp_managed_module", "_fsdp_use_orig_params")
"""Attributes that ``fully_shard`` gives to all modules inside a unit."""


@contextmanager
def scalars_as_rows(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Lets ``fully_shard`` make a unit of modules with parameters without dimensions, which it refuses.

    Within the context each scalar is a row of one element; afterwards it is a `_Scalar`.
    """
    rows: dict[nn.Parameter, nn.Parameter] = {}
    places = set()
    for child in (child for module in modules for child in module.modules()):
        for name, scalar in child._parameters.items():
            if scalar is not None and not scalar.dim() and not isinstance(scalar, DTensor):
                row = nn.Parameter(scalar.detach().view(1), requires_grad=scalar.requires_grad)
                child._parameters[name] = rows.setdefault(scalar, row)
                places.add((child, name))
    yield
    if places:
        access.check_scalars(modules[0])
    for parameter in access.group_of(modules[0]).fsdp_params if places else ():
        if (parameter._module_info.module, parameter._module_info.param_name) in places:
            parameter.__class__ = _Scalar
            parameter.begin()


class _Scalar(FSDPParam):
    """Parameter without dimensions, whole on each rank.

    In collectives of its unit it is one row: all ranks gather the row of rank 0, and its gradient has one row for each
    rank.
    """

    def begin(self) -> None:
        """Takes over from ``fully_shard``, which has just put the one row into the shard of one rank."""
        self._orig_size = self.sharded_size = self.sharded_post_forward_size = torch.Size()
        self._contiguous_orig_stride = self.contiguous_sharded_stride = ()
        self.contiguous_sharded_post_forward_stride = ()
        scalar = self.to_sharded_dtensor(self._sharded_param_data.view(()))
        self._sharding_spec = scalar._spec
        self.sharded_param = nn.Parameter(scalar, requires_grad=self.sharded_param.requires_grad)
        self._setattr_on_modules(self.sharded_param)

    @override
    def reset_sharded_param(self) -> None:
        """Takes over a parameter that somebody has put into the module."""
        scalar: Any = getattr(self._module_info.module, self._module_info.param_name)
        self.sharded_param, self._sharding_spec = scalar, scalar._spec
        self._sharded_param_data = scalar._local_tensor.view(1)

    @override
    def _init_sharded_post_forward_param_metadata(self, param: Tensor) -> None:
        """Does nothing: the scalar is the same in a node as over all ranks."""

    @override
    def to_sharded_dtensor(self, tensor: Tensor) -> DTensor:
        return dtensors.whole_there(tensor, self.mesh_info.mesh)

    @override
    def to_sharded_post_forward_dtensor(self, tensor: Tensor) -> DTensor:
        nodes: Any = self.post_forward_mesh_info
        return DTensor.from_local(tensor, nodes.mesh)

    @override
    def _get_grad_inner_tensor(self, grad: Tensor) -> Tensor:
        return grad.detach().repeat(self.mesh_info.shard_mesh_size)


def pass_inputs(module: nn.Module) -> None:
    """Makes the inputs of a unit arrive as they would without ``fully_shard``, which copies each argument.

    A tensor that is given more than once arrives as one tensor: ``nn.MultiheadAttention``, given one tensor as query,
    key and value, would project its copies three times, and save three of them. Gradients of inputs may have a graph,
    see `_Inputs`. Inputs of a resident unit arrive as they are: the unit is left at the end of backward.
    """
    group = access.group_of(module)
    if group is None or not hasattr(group, "_register_post_backward_hook"):
        return

    def register(args: Any, kwargs: Any) -> Any:
        given = collect_grad_tensors((args, kwargs)) if torch.is_grad_enabled() else ()
        if not given:
            return args, kwargs
        gathering.note_inputs(group)
        if resident.reduces_nothing(group):  # backward has nothing to reduce then, and nothing to free
            return args, kwargs
        once = dict.fromkeys(given)
        made = dict(zip(once, _Inputs.apply(group, *once), strict=True))  # type: ignore[no-untyped-call]
        return replace_grad_tensors((args, kwargs), (made[tensor] for tensor in given))

    group._register_post_backward_hook = register


def typed_as_local(function: T) -> T:
    """Registers a function with spmd_types as local: a newer torch checks its own tensors with it, if installed."""
    with suppress(ImportError):
        from spmd_types import register_local_autograd_function

        register_local_autograd_function(function)
    return function


@typed_as_local
class _Inputs(RegisterPostBackwardFunction):
    """Inputs of a unit, whose backward is the end of the backward of the unit.

    With ``create_graph=True`` their gradients have a graph. A later backward begins with these gradients and needs the
    weights of the unit, which this backward has freed: a hook gathers them again.
    """

    @staticmethod
    @override
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        for gradient in gradients if torch.is_grad_enabled() else ():
            if gradient.requires_grad:
                gradient.register_hook(access.state_of(ctx.param_group.modules[0])._pre_backward)
        return RegisterPostBackwardFunction.backward(ctx, *gradients)


def carry_hooks(groups: Sequence[Any]) -> None:
    """Shares the hooks of ``register_hook()`` on shards with unsharded parameters, which get the gradients.

    Both have one dictionary of hooks, which is made if there is none: hooks that are registered or removed later count,
    too.
    """
    for group in groups:
        for parameter in group.fsdp_params:
            sharded: Any = parameter.sharded_param
            if sharded._backward_hooks is None:
                sharded._backward_hooks = OrderedDict()  # as the first register_hook() would
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param._backward_hooks = sharded._backward_hooks
            else:
                parameter.init_unsharded_param = partial(_begin_with_hooks, parameter)


def _begin_with_hooks(parameter: Any) -> None:
    del parameter.init_unsharded_param  # the method of the class is called from now on
    parameter.init_unsharded_param()
    parameter._unsharded_param._backward_hooks = parameter.sharded_param._backward_hooks


@contextmanager
def without_fully_shard(module: nn.Module, groups: Sequence[Any], *, writes: bool) -> Iterator[None]:
    """Gives a module whole parameters and its own classes, so that it runs and is copied without collectives.

    Args:
        module: any module inside the root.
        groups: groups of all units of the root, all of them resharded.
        writes: copy this rank's rows of the parameters to the shards at the end; not done after an error.
    """
    inside = set(module.modules())
    states = access.states_in(module)
    access.require(access.WHOLE, states, groups)
    whole = {}
    for group in groups:
        for parameter in group.fsdp_params:
            info = parameter._module_info
            if not inside.isdisjoint((info.module, *info.shared_modules)):
                whole[parameter] = whole_parameter(parameter.sharded_param)
    with ExitStack() as stack:
        stack.callback(_gather_again, groups)  # called last, when all modules are units again
        for state in states:
            for handle in (state._pre_forward_hook_handle, state._post_forward_hook_handle):
                stack.enter_context(_without(handle))
        for child in inside:
            stack.enter_context(_unmarked(child))
        for parameter, value in whole.items():
            parameter._setattr_on_modules(value)
        try:
            yield
            for parameter, value in whole.items() if writes else ():
                dtensors.write_rows(parameter.sharded_param, value.detach())
        finally:
            for parameter in whole:
                parameter._setattr_on_modules(parameter.sharded_param)


def _gather_again(groups: Sequence[Any]) -> None:
    """Unshards units whose forward goes on, after the shards are written."""
    if groups:
        gathering.gather_after(groups[0].comm_ctx)
    for group in groups:
        if group._training_state == TrainingState.FORWARD:
            group.modules[0].unshard()


def whole_parameter(sharded: DTensor, *, copies: bool = False) -> nn.Parameter:
    """Whole parameter of a shard, with attributes that users have set, in memory that is not the shard."""
    value = dtensors.on_mesh_device(sharded).full_tensor().detach()
    is_shard = value.data_ptr() == dtensors.local(sharded).data_ptr()
    return parameter_like(value.clone() if copies or is_shard else value, sharded)


@contextmanager
def _unmarked(module: nn.Module) -> Iterator[None]:
    """Hides, within the context, that a module is sharded; with its own class it can be copied.

    ``generate()`` of transformers would wait for other ranks.
    """
    kind, attributes = type(module), vars(module)
    kept = {name: attributes.pop(name) for name in (*_MARKS, STATE_KEY, REGISTRY_KEY, "_apply") if name in attributes}
    if issubclass(kind, FSDPModule):
        module.__class__ = _own_class(module)
    try:
        yield
    finally:
        module.__class__ = kind
        attributes.update(kept)


def _own_class(module: Any) -> Any:
    """Class that the module of a unit had before ``fully_shard``."""
    return type(module).__mro__[type(module)._orig_cls_mro_index]


def refuse_copies(module: nn.Module) -> None:
    """Makes ``copy.deepcopy`` of the module of a unit raise, outside of `without_fully_shard`, and say what to do."""
    type(module).__deepcopy__ = refuse_copy  # type: ignore[attr-defined]  # the class is one that torch has made for units


def refuse_copy(*_: object) -> NoReturn:
    """Raises a `ConfigurationError`, in place of a copy of shards."""
    raise ConfigurationError(
        "Expected whole parameters to copy, but each rank has only its shards of a model that is sharded. Copy it on"
        " all ranks within `with trainer.strategy.gathered(): ...`, and read its parameters there; for an average of"
        " the weights, use Lightning's WeightAveraging."
    )


@contextmanager
def _without(handle: Any) -> Iterator[None]:
    """Disables a hook within the context; it keeps its place among the others."""
    handles = getattr(handle, "handles", (handle,))  # a unit of several modules has several
    kept = [(each.hooks_dict_ref(), each.id) for each in handles]
    hooks = [registered[number] for registered, number in kept]
    for registered, number in kept:
        registered[number] = access.do_nothing
    try:
        yield
    finally:
        for (registered, number), hook in zip(kept, hooks, strict=True):
            registered[number] = hook


def copy_replicas(module: nn.Module) -> None:
    """Copies the shards of a unit from the first rank that has them to the others, whose values may differ.

    The first rank of a scalar is rank 0. The first rank of a shard that each node has is in the first node.
    """
    group = access.group_of(module)
    for parameter in () if group is None else group.fsdp_params:
        if parameter.sharded_param.is_meta:
            continue
        shard = parameter._sharded_local_tensor
        if isinstance(parameter, _Scalar):
            there = shard.to(group.device)  # which it may not be on
            dist.broadcast(there, src=0)
            shard.copy_(there)
        elif isinstance(group.mesh_info, HSDPMeshInfo):
            dist.broadcast(shard, group=group.mesh_info.replicate_process_group, group_src=0)


def keep_attributes(module: nn.Module) -> None:
    """Makes ``module.to(...)`` keep attributes of parameters, which torch drops from DTensors."""
    apply: Any = module._apply

    def kept(*args: Any, **kwargs: Any) -> Any:
        attributes = [(parameter, dict(vars(parameter))) for parameter in module.parameters()]
        result = apply(*args, **kwargs)
        for parameter, kept_attributes in attributes:
            vars(parameter).update(kept_attributes)
        return result

    module._apply = kept  # type: ignore[method-assign]  # on the instance: other modules may have its class


def undo_fully_shard(module: nn.Module) -> None:
    """Undoes ``fully_shard`` for a module and all inside it: whole parameters, no hooks, its own class."""
    whole, handles = {}, list[Any]()
    states = access.states_in(module)
    access.require(access.WHOLE, states, [group for state in states for group in state._fsdp_param_groups])
    for state in states:
        handles += [state._pre_forward_hook_handle, state._post_forward_hook_handle]
        for group in state._fsdp_param_groups:
            handles += group._module_to_pre_save_state_dict_hook_handle.values()
            handles += group._module_to_pre_load_state_dict_hook_handle.values()
            group._to_sharded()
            for parameter in group.fsdp_params:
                whole[parameter] = whole_parameter(parameter.sharded_param, copies=True)
                handles.append(parameter._post_load_hook_handle)
    for parameter, value in whole.items():
        parameter._setattr_on_modules(value)
    for handle in handles:
        handle.remove()
    for state in states:
        for child in state._modules:
            child.__dict__.pop("_apply", None)
            child.__class__ = _own_class(child)
            del child.__dict__[STATE_KEY], child.__dict__[REGISTRY_KEY], _module_state_mapping[child]
    for child in module.modules():
        for name in _MARKS:
            child.__dict__.pop(name, None)
