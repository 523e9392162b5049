"""Everything of torch's ``fully_shard`` that is used and not public: this file, and no other.

Seen in torch 2.13 to 2.15; `check_torch` and `check_units` say clearly what a torch of another version lacks. Most of
that refuses it; what is in `_DISPENSABLE` is done without.
"""

from __future__ import annotations

import gc
import math
import operator
import warnings
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any, NoReturn, TypeVar
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from lightning_osdp.errors import ConfigurationError
from lightning_osdp.splitting import parameter_like

try:
    from torch._C._distributed_c10d import _register_process_group, _unregister_process_group
    from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
    from torch.distributed._composable_state import _get_module_state, _module_state_mapping
    from torch.distributed.fsdp._common_utils import collect_grad_tensors, replace_grad_tensors
    from torch.distributed.fsdp._fully_shard._fsdp_common import HSDPMeshInfo, TrainingState
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup, RegisterPostBackwardFunction
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
except ImportError as error:
    _text = f"Expected a torch with the parts of fully_shard that 2.13 to 2.15 have, got {torch.__version__}: {error}"
    raise ImportError(_text) from error

T = TypeVar("T")

_TRIED = "2.13 to 2.15"
"""Versions of torch whose ``fully_shard`` was read and run."""
_METHODS = {
    FSDPModule: (
        "_orig_cls_mro_index",
        "_set_unshard_async_op",
        "set_reduce_scatter_unused_params",  # public, and of 2.13
    ),
    FSDPState: (
        "_lazy_init",
        "_pre_forward",
        "_post_forward",
        "_pre_backward",
        "_register_pre_backward_hook",
        "_register_root_post_backward_final_callback",
        "_root_post_backward_final_callback",
    ),
    FSDPParamGroup: (
        "_register_post_backward_hook",
        "_to_sharded",
        "_to_sharded_post_forward",
        "is_unsharded",
        "post_backward",
        "post_forward",
        "reshard",
        "wait_for_unshard",
    ),
    FSDPParam: (
        "_init_sharded_post_forward_param_metadata",
        "_get_grad_inner_tensor",
        "_setattr_on_modules",
        "init_unsharded_param",
        "reset_sharded_param",
        "_sharded_local_tensor",
        "to_sharded_dtensor",
        "to_sharded_post_forward_dtensor",
    ),
    TrainingState: ("FORWARD", "PRE_BACKWARD", "POST_BACKWARD", "IDLE"),
}
"""What this file uses of classes."""
_ATTRIBUTES = {
    "state": (
        "_fsdp_param_groups",
        "_modules",
        "_pre_forward_hook_handle",
        "_post_forward_hook_handle",
        "_states_to_forward_prefetch",
        "_comm_ctx.all_gather_copy_in_stream",
        "_comm_ctx.all_gather_state",
        "_comm_ctx.all_gather_stream",
        "_comm_ctx.device_handle",
        "_comm_ctx.post_forward_order",
        "_state_ctx.all_states",
        "_state_ctx.post_backward_final_callback_queued",
        "_training_state",
    ),
    "group": (
        "_all_gather_result",
        "_module_to_pre_load_state_dict_hook_handle",
        "_module_to_pre_save_state_dict_hook_handle",
        "_partial_reduce_output",
        "_post_forward_indices",
        "_reshard_after_forward_event",
        "_training_state",
        "comm_ctx",
        "device_handle",
        "fsdp_params",
        "mesh_info.shard_mesh_rank",
        "mesh_info.shard_mesh_size",
        "mesh_info.shard_process_group",
        "modules",
        "post_forward_mesh_info",
        "reduce_grads",
        "reduce_scatter_unused_params",
    ),
    "parameter": (
        "_contiguous_orig_stride",
        "_module_info",
        "_orig_size",
        "_param_fqn",
        "_post_load_hook_handle",
        "_sharded_param_data",
        "_sharding_spec",
        "all_gather_outputs",
        "contiguous_sharded_stride",
        "orig_dtype",
        "post_forward_mesh_info",
        "reduce_dtype",
        "sharded_param",
        "sharded_size",
        "unsharded_accumulated_grad",
    ),
}
"""What it uses of the objects that make a unit; `_unsharded_param` of a parameter comes with its first all-gather."""
_IN_NODES = "a mode that leaves a shard in each node"
_AHEAD = "asynchronous_unshard, so that steps may take longer than predicted"
_ONCE = "that a tensor given to a unit twice arrives as one"
_WHOLE = "gathered(), and a fit of a model that was evaluated first"
_DISPENSABLE = {
    "FSDPModule._orig_cls_mro_index": _WHOLE,
    "FSDPModule._set_unshard_async_op": _AHEAD,
    "FSDPParam._init_sharded_post_forward_param_metadata": _IN_NODES,
    "FSDPParamGroup._register_post_backward_hook": _ONCE,
    "FSDPParamGroup._to_sharded_post_forward": _IN_NODES,
    "group._module_to_pre_load_state_dict_hook_handle": _WHOLE,
    "group._module_to_pre_save_state_dict_hook_handle": _WHOLE,
    "group.post_forward_mesh_info": _IN_NODES,
    "parameter._post_load_hook_handle": _WHOLE,
    "parameter.post_forward_mesh_info": _IN_NODES,
    "state._modules": _WHOLE,
    "state._post_forward_hook_handle": _WHOLE,
    "state._pre_forward_hook_handle": _WHOLE,
}
"""What trains without it, by name: what there is not then."""
_OF_SCALARS = {
    "group.fsdp_params",
    "parameter._contiguous_orig_stride",
    "parameter._module_info",
    "parameter._orig_size",
    "parameter._sharded_param_data",
    "parameter._sharding_spec",
    "parameter.contiguous_sharded_stride",
    "parameter.sharded_param",
    "parameter.sharded_size",
}
"""What is needed before units are checked, where a model has parameters without dimensions."""
_MARKS = ("_is_fsdp_managed_module", "_fsdp_use_orig_params")
"""Attributes that it gives to all modules inside a unit."""
_FREEING = ("_to_sharded", "_to_sharded_post_forward")
"""Methods of a unit that free what is gathered."""
_SHARD = "_osdp_shard"
"""Attribute of parameters that are shards of a unit."""
_PROCESS_GROUPS = ("shard_process_group", "replicate_process_group")
"""Attributes of a unit's mesh, of which the second is there where several ranks have the same shard."""
_PIECE, _SAMPLED = 2**18, 2**8
"""Elements that are hashed in one go, and those of a parameter of which copies are made in the middle of a step."""


def check_torch() -> None:
    """Raises `ConfigurationError` where the classes of this torch lack something that training needs."""
    _refuse(name for name in _lacking((), ()) if name not in _DISPENSABLE)


def check_units(root: nn.Module) -> None:
    """The same of the objects that ``fully_shard`` has made of a module; rank 0 warns of what there is not."""
    states = list(dict.fromkeys(state_of(child) for child in root.modules() if isinstance(child, FSDPModule)))
    groups = [group for state in states for group in getattr(state, "_fsdp_param_groups", ())]
    if any(len(getattr(state, "_fsdp_param_groups", ())) > 1 for state in states):
        raise ConfigurationError(
            f"Expected fully_shard to gather all parameters of a unit together, but in torch {torch.__version__}"
            f" {len(states)} units have {len(groups)} groups of parameters. Install torch {_TRIED}."
        )
    lacking = _lacking(states, groups)
    _refuse(name for name in lacking if name not in _DISPENSABLE)
    told = f"OSDP: torch {torch.__version__} was not tried ({_TRIED} were)" if _version() > (2, 15) else ""
    if lacking:
        without = dict.fromkeys(_DISPENSABLE[name] for name in lacking)
        told = f"OSDP: torch {torch.__version__} lacks {', '.join(lacking)}: there is not {'; nor '.join(without)}"
    if told and dist.get_rank() == 0:
        warnings.warn(f"{told}. Training goes on.", stacklevel=2)


def _version() -> tuple[int, ...]:
    return tuple(map(int, torch.__version__.split(".")[:2]))


def _lacking(states: Sequence[Any], groups: Sequence[Any]) -> list[str]:
    """Names that this file uses of classes and of these objects, and that are not there."""
    classes = [(kind.__name__, name, kind) for kind, names in _METHODS.items() for name in names]
    parameters = [parameter for group in groups for parameter in getattr(group, "fsdp_params", ())]
    objects = {"state": states, "group": groups, "parameter": parameters}
    used = [(kind, path, each) for kind, found in objects.items() for path in _ATTRIBUTES[kind] for each in found]
    return list(dict.fromkeys(f"{kind}.{path}" for kind, path, each in (*classes, *used) if not _has(each, path)))


def _has(found: Any, path: str) -> bool:
    first, _, inner = path.partition(".")
    return hasattr(found, first) and (not inner or _has(getattr(found, first), inner))


def _require(what: str, states: Sequence[Any] = (), groups: Sequence[Any] = ()) -> None:
    """Raises `ConfigurationError` where torch lacks something that one of the values of `_DISPENSABLE` needs."""
    _refuse((name for name in _lacking(states, groups) if _DISPENSABLE.get(name) == what), f", for {what}")


def _refuse(missing: Iterable[str], use: str = "") -> None:
    if names := ", ".join(missing):
        raise ConfigurationError(
            f"Expected a torch whose fully_shard is built as that of {_TRIED}{use}, got {torch.__version__} without"
            f" {names}. Install torch {_TRIED}."
        )


def read_whole_values() -> None:
    """Has ``item()`` and ``float()`` of a DTensor give the value over all ranks, which must all call it.

    torch gives this rank's part of it, so that ``float(parameter.grad.norm())`` is the norm of the shard.
    """
    item = torch.ops.aten._local_scalar_dense.default
    _handlers().setdefault(item, lambda operation, args, _: operation(args[0].full_tensor()))


def set_values() -> None:
    """Has ``parameter.data = value`` of a shard, as `mark_shard` marks it, put this rank's rows of the value there.

    torch changes what it says of a DTensor, and neither the rows nor what a unit gathers. Others stay as they are.
    """
    if "data" not in vars(DTensor):
        DTensor.data = property(Tensor.data.__get__, _set_data)  # type: ignore[assignment, attr-defined]


def mark_shard(parameter: Tensor) -> None:
    """Has the ``data`` of a parameter be set as `set_values` says."""
    vars(parameter)[_SHARD] = True


def _set_data(tensor: DTensor, value: Any) -> None:
    if _SHARD not in vars(tensor):
        Tensor.data.__set__(tensor, value)  # type: ignore[attr-defined]
        return
    if not isinstance(value, Tensor) or (value.shape, value.dtype) != (tensor.shape, tensor.dtype):
        told = f"{value.dtype}{list(value.shape)}" if isinstance(value, Tensor) else repr(type(value))
        raise ConfigurationError(
            f"Expected the data of a parameter to be set to all of it, {tensor.dtype}{list(tensor.shape)}, got {told}."
            " Set it to a result of operations on parameters, or to the whole tensor on every rank."
        )
    with torch.no_grad():
        if isinstance(value, DTensor):
            tensor.copy_(value)
        else:
            _write_rows(tensor, value)


def mix_meshes() -> None:
    """Has tensors that are on several meshes be added, stacked, averaged and used by all ranks, who must all do so.

    ``clip_grad_norm_`` and ``get_total_norm`` of torch do that with norms of gradients, and people with weights
    that they average; DTensors refuse it. Sums and stacks of norms are plain tensors. Of other operands those are
    gathered, one at a time, that are not on the mesh of the first one with most dimensions, which is what an operation
    in place changes. What is on one mesh is left to torch, and so is what autograd is to go back through.
    """

    def added(operation: Any, args: Any, kwargs: Any) -> Any:
        if _are_numbers(args):
            return operation(*(each.full_tensor() for each in args), **kwargs)
        return moved(operation, args, kwargs)

    def moved(operation: Any, args: Any, kwargs: Any) -> Any:
        mesh = max(_tensors(args), key=Tensor.dim).device_mesh
        return operation(*(_on_mesh(each, mesh) for each in args), **kwargs)

    def stacked(operation: Any, args: Any, kwargs: Any) -> Any:
        (tensors, *others), places = args, defaultdict(list)
        for place, tensor in enumerate(tensors):
            places[tensor.device_mesh].append(place)
        values: dict[int, Tensor] = {}
        for same in places.values():
            alike: Any = torch.stack([tensors[place] for place in same])
            values.update(zip(same, alike.full_tensor(), strict=True))
        return operation([values[place] for place in range(len(tensors))], *others, **kwargs)

    def scaled(operation: Any, args: Any, _: Any) -> None:
        tensors, factor = args
        operation([local(tensor) for tensor in tensors], factor)

    def one_by_one(operation: Any, _: Any, args: Any, kwargs: Any) -> None:
        tensors, others, *rest = args
        for tensor, other in zip(tensors, others, strict=True):
            operation(tensor, other, *rest, **kwargs)

    aten = torch.ops.aten
    _handle_meshes(aten.add.Tensor, lambda args: args if _are_numbers(args) else _untaped(args), added)
    _handle_meshes(aten.stack.default, lambda args: args[0], stacked)
    _handle_meshes(aten._foreach_mul_.Tensor, lambda args: args[0], scaled)
    _handle_meshes(aten._foreach_add_.List, _pair_apart, partial(one_by_one, aten.add_.Tensor))
    _handle_meshes(aten._foreach_lerp_.Scalar, _pair_apart, partial(one_by_one, aten.lerp_.Scalar))
    of_two = [getattr(aten, name).Tensor for name in ("add_", "sub", "sub_", "mul", "mul_", "div", "div_")]
    for operation in (*of_two, aten.lerp.Scalar, aten.lerp_.Scalar, aten.copy_.default):
        _handle_meshes(operation, _untaped, moved)


def _handle_meshes(
    operation: Any, tensors_of: Callable[[Any], Sequence[Any]], handle: Callable[[Any, Any, Any], Any]
) -> None:
    """Has an operation be this where those of its arguments are DTensors, and not all on one mesh."""

    def handled(operation: Any, args: Any, kwargs: Any) -> Any:
        meshes = [each.device_mesh if isinstance(each, DTensor) else None for each in tensors_of(args)]
        if None not in meshes and any(mesh != meshes[0] for mesh in meshes):
            return handle(operation, args, kwargs)
        own = _handlers().pop(operation)  # so that torch does as it ever does
        try:
            return operation(*args, **kwargs)
        finally:
            _handlers()[operation] = own

    _handlers().setdefault(operation, handled)


def _tensors(args: Any) -> list[Any]:
    return [each for each in args if isinstance(each, Tensor)]


def _are_numbers(args: Any) -> bool:
    return all(isinstance(each, Tensor) and each.dim() == 0 for each in args)


def _untaped(args: Any) -> list[Any]:
    """Tensors among arguments; none where autograd needs them, whose gradients would be on one mesh."""
    found = _tensors(args)
    return [] if torch.is_grad_enabled() and any(each.requires_grad for each in found) else found


def _pair_apart(args: Any) -> Sequence[Any]:
    """The first two of two lists that are not on the same mesh."""
    pairs = (pair for pair in zip(*args[:2], strict=True) if all(isinstance(each, DTensor) for each in pair))
    return next((pair for pair in pairs if pair[0].device_mesh != pair[1].device_mesh), ())


def _on_mesh(value: Any, mesh: DeviceMesh) -> Any:
    """A DTensor, whole on each rank where it is on another mesh; anything else as it is."""
    if not isinstance(value, DTensor) or value.device_mesh == mesh:
        return value
    return DTensor.from_local(value.full_tensor(), mesh, [Replicate()] * mesh.ndim)


def _handlers() -> Any:
    """By operation, what DTensors do in its place."""
    return DTensor._op_dispatcher._custom_op_handlers


def state_of(module: Any) -> Any:
    """The state of a unit, given any of its modules, also while it is a `plain` one."""
    state = _get_module_state(module)
    assert isinstance(state, FSDPState)
    return state


def group_of(module: Any) -> Any:
    """The parameters that a unit gathers together; None where it has none."""
    groups = state_of(module)._fsdp_param_groups
    return groups[0] if groups else None


def set_owner(root: nn.Module, owner: object) -> None:
    """Has the state of a root lead to what drives it."""
    state_of(root).lightning_osdp_owner = owner


def owner_of(root: nn.Module) -> Any:
    """What `set_owner` gave; None where there is nothing."""
    return getattr(state_of(root), "lightning_osdp_owner", None) if isinstance(root, FSDPModule) else None


def begin(root: nn.Module) -> None:
    """Makes this module the root of the units inside it, whichever of them forward is going to call first."""
    state_of(root)._lazy_init()


def _reduce_unfrozen(groups: Sequence[Any]) -> None:
    """Has units whose parameters were all frozen reduce gradients like the others once somebody has unfrozen them.

    In which dtype gradients are reduced and kept torch 2.13 learns before a first forward, or in ``unshard()``, from
    parameters that are trained then: those of such units would stay in low precision (pytorch#186998, fixed in 2.14).
    """
    for group in groups if _version() < (2, 14) else ():
        found = {
            (each.orig_dtype, each.reduce_dtype) for each in group.fsdp_params if each.orig_dtype.is_floating_point
        }
        if group._orig_dtype is None and len(found) == 1:
            ((group._orig_dtype, group._reduce_dtype),) = found


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
        _refuse(name for name in _lacking([state_of(modules[0])], ()) if name == "state._fsdp_param_groups")
        _refuse(name for name in _lacking((), [group_of(modules[0])]) if name in _OF_SCALARS)
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


def gather_for_training(groups: Sequence[Any]) -> None:
    """Has units that are first gathered in inference mode be gathered for training later, too.

    What torch allocates at the first all-gather is what all others fill, and inference tensors are filled in that mode
    alone.
    """
    for group in groups:
        group.wait_for_unshard = partial(_outside_inference_mode, group.wait_for_unshard)


def _outside_inference_mode(call: Callable[[], None]) -> None:
    if not torch.is_inference_mode_enabled():
        call()
        return
    with torch.inference_mode(mode=False), torch.no_grad():
        call()


def _wrap(group: Any, names: Iterable[str], around: Callable[[Any], None]) -> None:
    """Has a unit call something with its own method, wherever torch calls one of these, as far as there are such."""
    for name in names:
        if hasattr(group, name):
            setattr(group, name, partial(around, getattr(group, name)))


class Freezing:
    """Has whole parameters of a unit and its shards need gradients alike, whichever of them somebody freezes.

    Code that runs while a unit is gathered finds whole parameters in its module, optimizers have the shards, and torch
    looks at the shards alone, where it gathers the unit.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self._needed: list[bool] = []  # when both were last alike, while they are gathered
        _wrap(group, ("wait_for_unshard", *_FREEING), self._around)

    def _around(self, change: Callable[[], None]) -> None:
        was_gathered = self._group.is_unsharded
        if was_gathered:
            self._make_alike()
        change()
        if self._group.is_unsharded and not was_gathered:
            self._needed = [parameter.sharded_param.requires_grad for parameter in self._group.fsdp_params]

    def _make_alike(self) -> None:
        for place, parameter in enumerate(self._group.fsdp_params):
            whole, sharded = parameter._unsharded_param, parameter.sharded_param
            if whole.requires_grad != sharded.requires_grad:
                whole.requires_grad_(not self._needed[place])
                sharded.requires_grad_(not self._needed[place])
            self._needed[place] = sharded.requires_grad


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
    _require(_WHOLE, states, groups)
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
                _write_rows(parameter.sharded_param, value.detach())
        finally:
            for parameter in whole:
                parameter._setattr_on_modules(parameter.sharded_param)


def _gather_again(groups: Sequence[Any]) -> None:
    """Has units whose forward goes on be unsharded, and others be so later, with what was written to shards."""
    if groups:
        _gather_after(groups[0].comm_ctx)
    for group in groups:
        if group._training_state == TrainingState.FORWARD:
            group.modules[0].unshard()


def _gather_after(context: Any) -> None:
    """Has all-gathers wait for what the device has been given so far: to write shards, or to read what is freed now.

    They run on streams of their own, which torch has wait for others where a forward of the root begins.
    """
    current = context.device_handle.current_stream()
    for stream in (context.all_gather_copy_in_stream, context.all_gather_stream):
        stream.wait_stream(current)


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


def _write_rows(sharded: DTensor, whole: Tensor) -> None:
    """Puts this rank's rows of a whole tensor into a shard."""
    rows = distribute_tensor(whole, sharded.device_mesh, sharded.placements, src_data_rank=None)
    with torch.no_grad():
        sharded.to_local().copy_(rows.to_local())


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


def do_nothing(*_: object, **__: object) -> None:
    """In place of a hook, or of a method that is not to run."""


def reshard_after_forward(module: Any, *, is_kept: bool, nodes: DeviceMesh | None) -> None:
    """Says what forward leaves of a unit: all, a shard in each row of the mesh (nodes, ranks of a node), or nothing."""
    module.set_reshard_after_forward(not is_kept, recurse=False)
    group = group_of(module)
    if nodes is None or is_kept or group is None:
        return
    _require(_IN_NODES, groups=[group])
    # As fully_shard's own int has it, which cannot be changed later, and makes process groups for each unit.
    group.post_forward_mesh_info = HSDPMeshInfo(nodes, shard_mesh_dim=1, replicate_mesh_dim=0)
    for parameter in group.fsdp_params:
        parameter.post_forward_mesh_info = group.post_forward_mesh_info
        parameter._init_sharded_post_forward_param_metadata(torch.empty(parameter._orig_size, device="meta"))


def gather_ahead(module: Any, following: Sequence[Any]) -> None:
    """Has a unit gather others when it is called; run again, in backward, none of them that backward has come to."""
    state_of(module)._states_to_forward_prefetch = _NotReached(map(state_of, following))


class _NotReached(list[Any]):
    """States of units, without those that the present backward has come to: they are gathered, or not needed again."""

    @override
    def __iter__(self) -> Iterator[Any]:
        return (state for state in super().__iter__() if state._training_state != TrainingState.PRE_BACKWARD)


def set_asynchronous(root: nn.Module, *, is_asynchronous: bool) -> None:
    """Whether all-gathers are waited for where they are needed, and not where they are issued."""
    assert isinstance(root, FSDPModule)
    if hasattr(root, "_set_unshard_async_op"):
        root._set_unshard_async_op(is_asynchronous)


def run_as_forward(root: nn.Module, step: Callable[..., Any], args: Any, kwargs: Any, own: Callable[[Any], Any]) -> Any:
    """Runs a step as if it were the forward of the root; ``own`` is applied to what it returns."""
    state = state_of(root)
    args, kwargs = state._pre_forward(root, args, kwargs)
    return state._post_forward(root, args, own(step(*args, **kwargs)))


def reshard(root: nn.Module, groups: Sequence[Any]) -> None:
    """Frees unsharded parameters, and results of all-gathers that nobody waited for; gradients stay.

    A pending all-gather would be copied out by the next forward, with the values of its time.
    """
    context = state_of(root)._comm_ctx
    _gather_after(context)
    context.all_gather_state = None
    for group in groups:
        if (result := group._all_gather_result) is not None:
            if result.all_gather_event is not None:
                torch.accelerator.current_stream().wait_event(result.all_gather_event)
            if isinstance(result.all_gather_work, dist.Work):
                result.all_gather_work.wait()
            group._all_gather_result = None
        group._to_sharded()
        _drop_retained(group)
        if group._training_state != TrainingState.FORWARD:  # else the order is that of a forward that goes on
            group._post_forward_indices.clear()
    context.post_forward_order.clear()


def _drop_retained(group: Any) -> None:
    """Frees what forward has left of a unit in each node; torch does so only where it gathers the unit from there."""
    for parameter in group.fsdp_params:
        if getattr(parameter, "_sharded_post_forward_param_data", None) is not None:
            parameter._sharded_post_forward_param = parameter._sharded_post_forward_param_data = None


def forget_step(root: nn.Module, groups: Sequence[Any]) -> None:
    """Gives up whatever a step was in the middle of, gradients that wait included."""
    assert isinstance(root, FSDPModule)
    root.reset_iter_state()
    forget_gradients(groups)


def forget_gradients(groups: Sequence[Any]) -> None:
    """Drops gradients that are not reduced yet, or not between nodes; those of shards stay."""
    for group in groups:
        group._partial_reduce_output = None
        for parameter in group.fsdp_params:
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None
            if parameter.unsharded_accumulated_grad is not None:  # since torch 2.15 it is the one above
                parameter.unsharded_accumulated_grad = None


class WaitingForwards:
    """Forwards that backward has not come to: what units have returned, for as long as its graph lives."""

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._outputs: WeakSet[_Output] = WeakSet()
        for state in state_of(root)._state_ctx.all_states:
            state._register_pre_backward_hook = partial(self._register, state._register_pre_backward_hook)

    @property
    def are_there(self) -> bool:
        """Whether there is one."""
        if self._outputs:
            gc.collect()  # a graph that nobody can reach any more may still be there
        return bool(self._outputs)

    def forget(self) -> None:
        """Nobody is going to call backward for what there is."""
        self._outputs.clear()

    def _register(self, register: Callable[[Any], Any], output: Any) -> Any:
        output = register(output)
        if torch.is_grad_enabled() and not is_in_backward(self._root):  # in backward, blocks only run again
            noted = _Output(self._outputs)
            for tensor in tree_leaves(output):
                if isinstance(tensor, Tensor) and tensor.grad_fn is not None:
                    tensor.register_hook(noted)
        return output


class _Output:
    """What a unit returned at a call: a hook of its tensors, which their graph holds."""

    def __init__(self, waiting: WeakSet[_Output]) -> None:
        self._waiting = waiting
        waiting.add(self)

    def __call__(self, _: Tensor) -> None:
        self._waiting.discard(self)


class GatheredWrites:
    """Has shards take over what somebody writes to parameters that are gathered: a step that moves averages, or clips.

    Torch frees what is gathered, and gathers the shards again. No version tells of ``p.data.mul_()``, or of writes by
    NumPy. So before a unit is freed, its shards get this rank's rows, whether somebody has written to them or not: a
    read and a write of what this rank holds, which wait for nothing.

    What is gathered in another precision than it is kept in cannot be taken over. There, rows are compared with shards
    on their device; what that finds is read a step later, for a step is not to wait for its device. Copies of all rows
    are not in the plan, so in each step other elements are compared, which no one write to many of them escapes.

    Attributes:
        is_paused: whether all that is written is dropped.
    """

    def __init__(self, groups: Sequence[Any]) -> None:
        self.is_paused = False
        self._groups, self._rows = groups, [_Rows(group) for group in groups]
        for group, rows in zip(groups, self._rows, strict=True):
            _wrap(group, _FREEING, partial(self._free, rows))
            _wrap(group, ("wait_for_unshard",), rows.note)

    def begin_fit(self) -> None:
        """Training begins, and nothing counts of a fit that ended with an error."""
        for rows in self._rows:
            rows.are_written = rows.was_told = None

    def told(self) -> list[int]:
        """Of each unit, whether somebody has written to what is gathered in low precision, as far as it is known."""
        return [rows.told() for rows in self._rows]

    def check(self, told: Sequence[int]) -> None:
        """Raises a `ConfigurationError` of the first unit that some rank tells of."""
        for group, is_written in zip(self._groups, told, strict=True):
            if is_written:
                low = next(each for each in group.fsdp_params if each.all_gather_outputs[0].dtype != each.orig_dtype)
                dtype = low.all_gather_outputs[0].dtype
                raise ConfigurationError(
                    f"Expected a step to leave parameters as they are that are gathered in {dtype} and kept in"
                    f" {low.orig_dtype}, but it has written to those of {name_of(low)!r} or of others in its unit."
                    " Change weights in a hook, such as on_train_batch_start or on_train_batch_end, or train in the"
                    " precision in which they are kept."
                )

    def _free(self, rows: _Rows, free: Callable[[], None]) -> None:
        try:
            rows.take_over(drops=self.is_paused)
        finally:
            free()


class _Rows:
    """This rank's rows of the parameters of a unit, in its shards and, while it is gathered, among all others.

    Attributes:
        are_written: whether somebody has written to rows of another precision than the shards'; None: not looked at.
        was_told: the same on its way to the host, and what tells that it is there.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self.are_written: Tensor | None = None
        self.was_told: tuple[Tensor, Any] | None = None
        self._versions: list[int] = []  # of shards, when they were gathered
        self._shards: list[Tensor] = []
        self._same: tuple[list[Tensor], list[Tensor]] = [], []
        self._low: list[tuple[Tensor, Tensor]] = []
        self._turn = 0
        self._samples: tuple[list[Tensor], list[Tensor]] | None = None  # of rows and shards, in this turn

    def note(self, wait_for_unshard: Callable[[], None]) -> None:
        """Around what copies rows out of an all-gather."""
        was_there = self._group.is_unsharded
        wait_for_unshard()
        if self._group.is_unsharded and not was_there:
            self._versions = self._versions_now()

    @torch.no_grad()
    def take_over(self, *, drops: bool) -> None:
        """Before rows are freed among all others: copies them to shards of the same precision, compares the others."""
        group = self._group
        if not group.is_unsharded:
            return
        for parameter in group.fsdp_params:
            if _has_other_memory(parameter):
                _move_back(parameter)
            if not parameter.all_gather_outputs[0].untyped_storage().resizable():
                _renew(parameter)
                self._shards = []
        # a shard that somebody has changed while it was gathered stays as it is, and the gathered one is outdated
        if drops or self._versions_now() != self._versions:
            return
        self._find()
        if self._same[0]:
            torch._foreach_copy_(*self._same)
            # the next all-gather, in a stream of its own, waits for it
            group._reshard_after_forward_event = group.device_handle.Event()
            group._reshard_after_forward_event.record()
        if not self._low:
            return
        if self._samples is None:
            rows, shards = zip(*self._low, strict=True)
            self._samples = (
                [_sampled(each, self._turn) for each in rows],
                [_sampled(each, self._turn) for each in shards],
            )
        found = _are_apart(*map(torch.cat, self._samples))
        self.are_written = found if self.are_written is None else self.are_written.logical_or_(found)

    def told(self) -> bool:
        """Whether rows are known to be written to; of this step the device may tell at the next call."""
        self._turn, self._samples = self._turn + 1, None
        before, self.was_told = self.was_told, None
        if self.are_written is not None:
            event = self._group.device_handle.Event()
            self.was_told = self.are_written.to("cpu", non_blocking=True), event
            event.record()
        if before is None:
            return False
        before[1].synchronize()
        return bool(before[0].tolist())  # of the host, which nothing waits for

    def _versions_now(self) -> list[int]:
        return [parameter.sharded_param._version for parameter in self._group.fsdp_params]

    def _find(self) -> None:
        """Where rows are, which is the same until shards are other tensors."""
        parameters = self._group.fsdp_params
        shards = [parameter._sharded_local_tensor for parameter in parameters]
        if len(shards) == len(self._shards) and all(map(operator.is_, shards, self._shards)):
            return
        self._shards = shards
        # by data, so that their versions, which autograd looks at, stay as they are
        pairs = [(_own_rows(self._group, each), shard.data) for each, shard in zip(parameters, shards, strict=True)]
        same = [(shard, rows) for rows, shard in pairs if rows.dtype == shard.dtype]
        self._same = [shard for shard, _ in same], [rows for _, rows in same]
        self._low = [(rows.flatten(), shard.flatten()) for rows, shard in pairs if rows.dtype != shard.dtype]
        self._samples = None


def _has_other_memory(parameter: Any) -> bool:
    """Whether a gathered parameter is not where its unit has gathered it, as after ``p.data = value``."""
    (gathered,) = parameter.all_gather_outputs
    return bool(parameter._unsharded_param.data_ptr() != gathered.data_ptr())


def _gathered(parameter: Any) -> Tensor:
    """What a unit has gathered of a parameter."""
    (gathered,) = parameter.all_gather_outputs
    found: Tensor = gathered.data.as_strided(parameter._orig_size, parameter._contiguous_orig_stride)
    return found


def _move_back(parameter: Any) -> None:
    """Has a gathered parameter be where its unit has gathered it, with the values that it has."""
    own = _gathered(parameter)
    own.copy_(parameter._unsharded_param.detach())
    parameter._unsharded_param.data = own


def _renew(parameter: Any) -> None:
    """Has a gathered parameter be in other memory from now on: what NumPy looks at cannot be freed."""
    (gathered,) = parameter.all_gather_outputs
    gathered.data = gathered.data.clone()
    parameter._unsharded_param.data = _gathered(parameter)


def _own_rows(group: Any, parameter: Any) -> Tensor:
    """This rank's rows of a gathered parameter."""
    whole, mesh = _gathered(parameter), group.mesh_info
    if not whole.dim():
        return whole
    first = min(mesh.shard_mesh_rank * -(-len(whole) // mesh.shard_mesh_size), len(whole))  # as torch.chunk cuts
    return whole.narrow(0, first, len(parameter._sharded_local_tensor))


def _sampled(flat: Tensor, turn: int) -> Tensor:
    """Elements that lie evenly apart, others in the next turn."""
    step = -(-len(flat) // _SAMPLED) or 1
    return flat[turn % step :: step]


def _are_apart(rows: Tensor, shards: Tensor) -> Tensor:
    """Whether shards have other bits in the precision of rows; on their device."""
    return (rows.view(torch.uint8) != shards.to(rows.dtype).view(torch.uint8)).any()


class BackwardWatch:
    """Tells when backward is through with units, and has what no loss reaches reduced once, at its end.

    ``fully_shard`` is through with a unit at each call of it that backward undoes, and autograd gives parameters their
    gradients with the last of them. Zeros in place of gradients that are yet to come would be reduced for nothing, and
    gradients of a reentrant checkpoint, whose backward runs by itself, may come when torch takes the unit for done.

    ``torch.autograd.grad`` is a backward, too, in which no parameter gets a gradient. Inside a step, forward goes on
    after it: nothing is reduced then, and of units that is there which forward leaves.

    ``note`` is called with the number of a group and, for each parameter, whether it got a gradient.

    Attributes:
        is_announced: whether the next backward is one that all ranks reduce after, whatever has got a gradient here.
    """

    def __init__(self, root: nn.Module, groups: Sequence[Any], note: Callable[[int, list[bool]], None]) -> None:
        self.is_announced, self._is_ending = False, False
        self._root, self._note, self._groups = root, note, groups
        self._before: list[Any] | None = None  # gradients of each group, where a backward came unannounced
        self._transformed: set[Any] = set()
        """Groups that ``torch.func`` has called in this step."""
        for index, group in enumerate(groups):
            group.post_forward = partial(self._post_forward, group, group.post_forward)
            group.post_backward = partial(self._post_backward, group, group.post_backward, index)
        for state in state_of(root)._state_ctx.all_states:
            begin = state._register_root_post_backward_final_callback
            state._register_root_post_backward_final_callback = partial(self._begin, begin)
            state._root_post_backward_final_callback = partial(self._end, state._root_post_backward_final_callback)

    def _begin(self, begin: Callable[[], None]) -> None:
        if not is_in_backward(self._root):  # it is called for each unit
            _reduce_unfrozen(self._groups)
            self._before = None if self.is_announced else list(map(_versions_of_gradients, self._groups))
        begin()

    def _has_got(self, index: int) -> bool:
        """Whether parameters of a group have got gradients in this backward, or it was announced."""
        return self._before is None or _versions_of_gradients(self._groups[index]) != self._before[index]

    def _post_forward(self, group: Any, post_forward: Callable[..., Any], *args: Any) -> Any:
        """Leaves a unit gathered to the end of backward that ``torch.func`` calls.

        What it takes derivatives of hides from hooks of the unit's outputs, and backward comes to it at any time.
        """
        if torch._C._functorch.peek_interpreter_stack() is None:
            return post_forward(*args)
        self._transformed.add(group)
        group.reshard = do_nothing
        try:
            return post_forward(*args)
        finally:
            del group.reshard

    def _post_backward(self, group: Any, post_backward: Callable[..., None], index: int, *unused: Any) -> None:
        if group in self._transformed and not self._is_ending:
            return
        if not (self._is_ending or self._has_got(index)):
            _leave_as_forward(group)
            return
        have = [has_whole_gradient(parameter) for parameter in group.fsdp_params]
        self._note(index, have)
        _make_dense(group)
        if any(have) or self._is_ending:
            post_backward(*unused)
            return
        group.reduce_scatter_unused_params = False
        try:
            post_backward(*unused)
        finally:
            group.reduce_scatter_unused_params = True
        group._training_state = TrainingState.IDLE  # so that the end of backward comes to it again

    def _end(self, end: Callable[[], None]) -> None:
        if not any(map(self._has_got, range(len(self._groups)))):
            self._go_on()
            return
        self.is_announced = False
        self._is_ending = True
        for group in self._groups:
            is_through = group.reduce_grads and group._training_state == TrainingState.POST_BACKWARD
            if is_through and any(has_whole_gradient(parameter) for parameter in group.fsdp_params):
                group._training_state = TrainingState.PRE_BACKWARD  # torch then takes it for one that is left
        try:
            end()
        finally:
            self._is_ending = False
            self._transformed.clear()
        for group in self._groups:
            _drop_retained(group)

    def _go_on(self) -> None:
        """After ``torch.autograd.grad``: units that it has reached may be called, and be reached, again."""
        context = state_of(self._root)._state_ctx
        context.post_backward_final_callback_queued = False
        for state in context.all_states:
            if state._training_state == TrainingState.PRE_BACKWARD:
                state._training_state = TrainingState.IDLE
        for group in self._groups:
            if group in self._transformed:
                group._training_state = TrainingState.IDLE
            elif group._training_state == TrainingState.PRE_BACKWARD:  # its inputs need no gradients
                _leave_as_forward(group)


def _make_dense(group: Any) -> None:
    """Has gradients that are sparse, as of an embedding, be what a reduce-scatter can cut into rows."""
    for parameter in group.fsdp_params:
        whole = getattr(parameter, "_unsharded_param", None)
        if whole is not None and whole.grad is not None and whole.grad.layout != torch.strided:
            whole.grad = whole.grad.to_dense()


def _versions_of_gradients(group: Any) -> list[tuple[int, int]]:
    """What is another list as soon as a parameter has got a gradient, or more of one; of what is not reduced yet."""
    parameters = [each for each in group.fsdp_params if has_whole_gradient(each)]
    pairs = ((each.unsharded_accumulated_grad, each._unsharded_param.grad) for each in parameters)
    return [(id(each), each._version) for pair in pairs for each in pair if each is not None]


def _leave_as_forward(group: Any) -> None:
    """Has a unit that is gathered for backward be as forward leaves it: whole, a shard in each node, or its rows."""
    if group._training_state == TrainingState.FORWARD:
        return  # a call of it goes on
    if group.is_unsharded:
        group._training_state = TrainingState.FORWARD  # in which resharding is that of forward
        group.reshard()
    group._training_state = TrainingState.IDLE


def on_collectives(group: Any, note: Callable[[bool], None]) -> None:
    """Calls ``note`` before each all-gather (False) and reduce-scatter (True) of a unit."""

    def gather(output_tensor: Tensor, input_tensor: Tensor, **kwargs: Any) -> Any:
        note(False)
        return dist.all_gather_single(output_tensor, input_tensor, **kwargs)

    def reduce(output_tensor: Tensor, input_tensor: Tensor, **kwargs: Any) -> Any:
        note(True)
        return dist.reduce_scatter_single(output=output_tensor, input=input_tensor, **kwargs)

    group.modules[0].set_custom_all_gather(_Collective(gather))
    group.modules[0].set_custom_reduce_scatter(_Collective(reduce))


def has_whole_gradient(parameter: Any) -> bool:
    """Whether one of `parameters_of` has a gradient that is not reduced yet."""
    if parameter.unsharded_accumulated_grad is not None:
        return True
    whole = getattr(parameter, "_unsharded_param", None)
    return whole is not None and whole.grad is not None


def has_waiting_gradients(module: nn.Module) -> bool:
    """Whether a unit has gradients that are not reduced yet, or not between nodes."""
    group = group_of(module)
    return group is not None and (
        has_partial_gradients(group) or any(has_whole_gradient(parameter) for parameter in group.fsdp_params)
    )


def has_partial_gradients(group: Any) -> bool:
    """Whether a unit has gradients that are reduced inside of nodes alone; they are those of all its parameters."""
    return group._partial_reduce_output is not None


def parameters_of(group: Any) -> list[tuple[nn.Parameter, Any]]:
    """The DTensors of a unit, each with what ``fully_shard`` knows of it."""
    return [(parameter.sharded_param, parameter) for parameter in group.fsdp_params]


def sharded_zeros(group: Any) -> Iterator[tuple[nn.Parameter, DTensor]]:
    """For each trainable parameter, a gradient of zeros such as a reduce-scatter leaves."""
    for parameter in group.fsdp_params:
        if parameter.sharded_param.requires_grad:
            zeros = torch.zeros_like(parameter._sharded_local_tensor)
            yield parameter.sharded_param, parameter.to_sharded_dtensor(zeros)


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


def name_of(parameter: Any) -> str:
    """The name in the root of one of `parameters_of`."""
    name: str = parameter._param_fqn
    return name


def hash_of_rows(parameter: Any) -> int:
    """`hash_of` this rank's rows of one of `parameters_of`."""
    return hash_of(parameter._sharded_local_tensor)


def hash_of(tensor: Tensor) -> int:
    """A number below 2^31 - 1 that tensors with the same bits have, and others hardly ever."""
    flat = tensor.detach().flatten()
    bits = flat.view(torch.int16 if flat.itemsize > 1 else torch.int8)
    return int(sum(piece.sum() for piece in bits.split(_PIECE))) % (2**31 - 1)


def is_in_nodes(tensor: Tensor) -> bool:
    """Whether each node has all of a tensor."""
    return isinstance(tensor, DTensor) and tensor.device_mesh.ndim > 1


def num_copies(tensor: Tensor) -> int:
    """How many ranks hold what this one holds of a tensor."""
    if not isinstance(tensor, DTensor):
        return 1
    copied = [dim for dim, placement in enumerate(tensor.placements) if placement.is_replicate()]
    return math.prod(tensor.device_mesh.size(dim) for dim in copied)


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def of_rows(rows: Tensor, like: DTensor) -> DTensor:
    """The tensor of which this rank has these rows, and others the rest, as they have of another one."""
    mesh, placements = like.device_mesh, like.placements
    found: DTensor = DTensor.from_local(rows, mesh, placements, shape=like.shape, stride=like.stride())
    return found


def is_cut_alike(value: Tensor, parameter: DTensor) -> bool:
    """Whether each rank holds of a tensor, as a plain one, the rows that it holds of a parameter."""
    if not isinstance(value, DTensor) or type(value._local_tensor) is not Tensor:  # nothing that is still on its way
        return False
    spec, other = value._spec, parameter._spec
    return spec is other or (
        value.shape == parameter.shape and spec.placements == other.placements and spec.mesh == other.mesh
    )


def call_first(optimizer: Optimizer, handle: RemovableHandle) -> None:
    """Has a hook run right after the optimizer's step, before the hooks that others have registered."""
    hooks: Any = optimizer._optimizer_step_post_hooks  # an OrderedDict
    hooks.move_to_end(handle.id, last=False)


def whole_storages(module: nn.Module) -> Iterator[Tensor]:
    """Tensors that have storage only while units inside a module are unsharded."""
    for child in module.modules():
        group = group_of(child) if isinstance(child, FSDPModule) else None
        for parameter in () if group is None else group.fsdp_params:
            yield from parameter.all_gather_outputs


@contextmanager
def on_process_groups(groups: Sequence[Any], others: Mapping[dist.ProcessGroup, dist.ProcessGroup]) -> Iterator[None]:
    """Within it, units and DTensors run their collectives on other process groups, given by those that they run on."""
    kept = []
    for group in groups:
        in_forward = getattr(group, "post_forward_mesh_info", None)
        for info in {id(info): info for info in (group.mesh_info, in_forward)}.values():
            found = {name: getattr(info, name) for name in _PROCESS_GROUPS if hasattr(info, name)}
            kept += [(info, name, own) for name, own in found.items()]
    try:
        for info, name, own in kept:
            setattr(info, name, others[own])
        for own, other in others.items():
            _name_group(own, other)
        yield
    finally:
        for info, name, own in kept:
            setattr(info, name, own)
        for own in others:
            _name_group(own, own)


def _name_group(named: dist.ProcessGroup, group: dist.ProcessGroup) -> None:
    """Has a group be found by the name of one: so do DTensors, whose meshes may be those of any model before."""
    _unregister_process_group(named.group_name)
    _register_process_group(named.group_name, group)


def phase_of(module: nn.Module) -> str:
    """``forward``, ``backward`` or nothing: what a unit is in, or was in this step."""
    found = (group_of(module) or state_of(module))._training_state
    if found in {TrainingState.PRE_BACKWARD, TrainingState.POST_BACKWARD}:
        return "backward"
    return "forward" if found == TrainingState.FORWARD else ""


def is_in_backward(root: nn.Module) -> bool:
    """Whether a backward is going on."""
    return bool(state_of(root)._state_ctx.post_backward_final_callback_queued)


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
    _require(_WHOLE, states, [group for state in states for group in state._fsdp_param_groups])
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


class _Collective:
    """An all-gather or reduce-scatter of units, in memory as torch's own."""

    def __init__(self, run: Callable[..., Any]) -> None:
        self._run = run

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Memory that the collective fills, or reads."""
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs one."""
        return self._run(*args, **kwargs)
