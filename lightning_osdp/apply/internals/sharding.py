"""Changes of modules around ``fully_shard``: what it refuses or loses, and its undoing, for a while or for good."""

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
from torch.distributed.tensor import DTensor, Replicate
from typing_extensions import override

from lightning_osdp.apply.internals.access import WHOLE, check_scalars, do_nothing, group_of, require, state_of
from lightning_osdp.apply.internals.dtensors import local, write_rows
from lightning_osdp.apply.internals.gathering import gather_after
from lightning_osdp.errors import ConfigurationError
from lightning_osdp.splitting import parameter_like

T = TypeVar("T")
_MARKS = ("_is_fsdp_managed_module", "_fsdp_use_orig_params")
"""Attributes that it gives to all modules inside a unit."""


@contextmanager
def taking_scalars(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Within it, ``fully_shard`` makes a unit of modules that have parameters without dimensions, which it refuses."""
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
        check_scalars(modules[0])
    for parameter in group_of(modules[0]).fsdp_params if places else ():
        if (parameter._module_info.module, parameter._module_info.param_name) in places:
            parameter.__class__ = _Scalar
            parameter.begin()


class _Scalar(FSDPParam):
    """A parameter without dimensions, all of which each rank has.

    In collectives of its unit it is a row. All gather that of rank 0; its gradient is one row for each rank.
    """

    def begin(self) -> None:
        """Is called where ``fully_shard`` has just taken it for one row, which is in the shard of one rank."""
        self._orig_size = self.sharded_size = self.sharded_post_forward_size = torch.Size()
        self._contiguous_orig_stride = self.contiguous_sharded_stride = ()
        self.contiguous_sharded_post_forward_stride = ()
        scalar = self.to_sharded_dtensor(self._sharded_param_data.view(()))
        self._sharding_spec = scalar._spec
        self.sharded_param = nn.Parameter(scalar, requires_grad=self.sharded_param.requires_grad)
        self._setattr_on_modules(self.sharded_param)

    @override
    def reset_sharded_param(self) -> None:
        """After somebody has changed what the module has."""
        own: Any = getattr(self._module_info.module, self._module_info.param_name)
        self.sharded_param, self._sharding_spec = own, own._spec
        self._sharded_param_data = own._local_tensor.view(1)

    @override
    def _init_sharded_post_forward_param_metadata(self, param: Tensor) -> None:
        """Nothing: it is the same in a node as over all ranks."""

    @override
    def to_sharded_dtensor(self, tensor: Tensor) -> DTensor:
        mesh: Any = self.mesh_info.mesh
        return DTensor.from_local(tensor, mesh, [Replicate()] * mesh.ndim)

    @override
    def to_sharded_post_forward_dtensor(self, tensor: Tensor) -> DTensor:
        nodes: Any = self.post_forward_mesh_info
        return DTensor.from_local(tensor, nodes.mesh)

    @override
    def _get_grad_inner_tensor(self, grad: Tensor) -> Tensor:
        return grad.detach().repeat(self.mesh_info.shard_mesh_size)


def pass_inputs(module: nn.Module) -> None:
    """Has tensors that are given to a unit arrive as without ``fully_shard``, which makes a new one of each argument.

    One that is given more than once arrives as one: ``nn.MultiheadAttention``, given one tensor as query, key and
    value, would project it three times, and save three copies. And gradients of it may have a graph, see `_Inputs`.
    """
    group = group_of(module)
    if group is None or not hasattr(group, "_register_post_backward_hook"):
        return

    def register(args: Any, kwargs: Any) -> Any:
        given = collect_grad_tensors((args, kwargs)) if torch.is_grad_enabled() else ()
        if not given:
            return args, kwargs
        once = dict.fromkeys(given)
        made = dict(zip(once, _Inputs.apply(group, *once), strict=True))  # type: ignore[no-untyped-call]
        return replace_grad_tensors((args, kwargs), (made[tensor] for tensor in given))

    group._register_post_backward_hook = register


def typed_as_local(function: T) -> T:
    """Has spmd_types, with which a newer torch checks its own tensors if it is installed, take a function for local."""
    with suppress(ImportError):
        from spmd_types import register_local_autograd_function

        register_local_autograd_function(function)
    return function


@typed_as_local
class _Inputs(RegisterPostBackwardFunction):
    """Inputs of a unit, with which its backward ends.

    Where gradients of them have a graph (``create_graph=True``), a later backward begins with these gradients and uses
    the unit's weights, which this one has freed: it gathers them again.
    """

    @staticmethod
    @override
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        state = state_of(ctx.param_group.modules[0])
        for gradient in gradients if torch.is_grad_enabled() else ():
            if gradient.requires_grad:
                gradient.register_hook(state._pre_backward)
        return RegisterPostBackwardFunction.backward(ctx, *gradients)


def carry_hooks(groups: Sequence[Any]) -> None:
    """Gives the hooks of ``register_hook()`` on shards to the whole parameters, which get the gradients.

    Both have one dictionary of hooks, also where there are none yet: what is registered or removed later counts, too.
    """
    for group in groups:
        for parameter in group.fsdp_params:
            sharded: Any = parameter.sharded_param
            if sharded._backward_hooks is None:
                sharded._backward_hooks = OrderedDict()  # as the first register_hook() does
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param._backward_hooks = sharded._backward_hooks
            else:
                parameter.init_unsharded_param = partial(_begin_with_hooks, parameter)


def _begin_with_hooks(parameter: Any) -> None:
    del parameter.init_unsharded_param  # torch's own, from now on
    parameter.init_unsharded_param()
    parameter._unsharded_param._backward_hooks = parameter.sharded_param._backward_hooks


@contextmanager
def plain(module: nn.Module, groups: Sequence[Any], *, writes: bool) -> Iterator[None]:
    """Within it, a module has whole parameters, and runs forward and is copied like any other, with no collective.

    Args:
        module: any inside the root.
        groups: of all units of the root, nothing of which is unsharded.
        writes: whether the shards take over this rank's rows of the parameters as they are at the end; after an
            error they do not.
    """
    inside = set(module.modules())
    units = [child for child in inside if isinstance(child, FSDPModule)]
    states = list(dict.fromkeys(map(state_of, units)))
    require(WHOLE, states, groups)
    whole = {}
    for group in groups:
        for parameter in group.fsdp_params:
            info = parameter._module_info
            if not inside.isdisjoint((info.module, *info.shared_modules)):
                whole[parameter] = _whole_parameter(parameter.sharded_param)
    with ExitStack() as stack:
        stack.callback(_gather_again, groups)  # when all are units again
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
                write_rows(parameter.sharded_param, value.detach())
        finally:
            for parameter in whole:
                parameter._setattr_on_modules(parameter.sharded_param)


def _gather_again(groups: Sequence[Any]) -> None:
    """Has units whose forward goes on be unsharded, and others be so later, with what was written to shards."""
    if groups:
        gather_after(groups[0].comm_ctx)
    for group in groups:
        if group._training_state == TrainingState.FORWARD:
            group.modules[0].unshard()


def _whole_parameter(sharded: DTensor, *, copies: bool = False) -> nn.Parameter:
    """All of a parameter, with what users have set on it; in memory of its own, if need be by copying."""
    value = sharded.full_tensor().detach()
    is_shard = value.data_ptr() == local(sharded).data_ptr()
    return parameter_like(value.clone() if copies or is_shard else value, sharded)


@contextmanager
def _unmarked(module: nn.Module) -> Iterator[None]:
    """Within it, nothing tells that a module is sharded: it has its own class, so that it can be copied.

    ``generate()`` of transformers would wait for other ranks.
    """
    kind, own = type(module), vars(module)
    kept = {name: own.pop(name) for name in (*_MARKS, STATE_KEY, REGISTRY_KEY, "_apply") if name in own}
    if issubclass(kind, FSDPModule):
        module.__class__ = _own_class(module)
    try:
        yield
    finally:
        module.__class__ = kind
        own.update(kept)


def _own_class(module: Any) -> Any:
    """The class that a unit's module had before ``fully_shard``."""
    return type(module).__mro__[type(module)._orig_cls_mro_index]


def refuse_copies(module: nn.Module) -> None:
    """Has ``copy.deepcopy`` of a unit's module, outside of `plain`, say what to do."""
    type(module).__deepcopy__ = refuse_copy  # type: ignore[attr-defined]  # a class that torch has made for its units


def refuse_copy(*_: object) -> NoReturn:
    """Raises a `ConfigurationError`, in place of a copy of shards."""
    raise ConfigurationError(
        "Expected whole parameters to copy, but each rank has only its shards of a model that is sharded. Copy it on"
        " all ranks within `with trainer.strategy.gathered(): ...`, and read its parameters there; for an average of"
        " the weights, use Lightning's WeightAveraging."
    )


@contextmanager
def _without(handle: Any) -> Iterator[None]:
    """Within it, a hook does nothing, and keeps its place among the others."""
    handles = getattr(handle, "handles", (handle,))  # of a unit of several modules
    kept = [(each.hooks_dict_ref(), each.id) for each in handles]
    hooks = [registered[number] for registered, number in kept]
    for registered, number in kept:
        registered[number] = do_nothing
    try:
        yield
    finally:
        for (registered, number), hook in zip(kept, hooks, strict=True):
            registered[number] = hook


def copy_from_first(module: nn.Module) -> None:
    """Has ranks that have the same of a unit have what the first of them has: they may begin unlike.

    Of a scalar that is rank 0, and of a unit that each node has all of the rank in the first node.
    """
    group = group_of(module)
    for parameter in () if group is None else group.fsdp_params:
        if parameter.sharded_param.is_meta:
            continue
        if isinstance(parameter, _Scalar):
            dist.broadcast(parameter._sharded_local_tensor, src=0)
        elif isinstance(group.mesh_info, HSDPMeshInfo):
            dist.broadcast(parameter._sharded_local_tensor, group=group.mesh_info.replicate_process_group, group_src=0)


def keep_attributes(module: nn.Module) -> None:
    """Has ``module.to(...)`` and the like leave what is set on parameters, which torch drops of DTensors."""
    apply: Any = module._apply

    def kept(*args: Any, **kwargs: Any) -> Any:
        attributes = [(parameter, dict(vars(parameter))) for parameter in module.parameters()]
        result = apply(*args, **kwargs)
        for parameter, own in attributes:
            vars(parameter).update(own)
        return result

    module._apply = kept  # type: ignore[method-assign]  # of this module alone: its class may be that of others


def make_plain(module: nn.Module) -> None:
    """Undoes ``fully_shard`` for a module and all inside it: whole parameters, no hooks, its own class."""
    whole, handles = {}, list[Any]()
    states = list(dict.fromkeys(state_of(child) for child in module.modules() if isinstance(child, FSDPModule)))
    require(WHOLE, states, [group for state in states for group in state._fsdp_param_groups])
    for state in states:
        handles += [state._pre_forward_hook_handle, state._post_forward_hook_handle]
        for group in state._fsdp_param_groups:
            handles += group._module_to_pre_save_state_dict_hook_handle.values()
            handles += group._module_to_pre_load_state_dict_hook_handle.values()
            group._to_sharded()
            for parameter in group.fsdp_params:
                whole[parameter] = _whole_parameter(parameter.sharded_param, copies=True)
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
