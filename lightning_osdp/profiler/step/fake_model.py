"""Models without values for a while: fake tensors, on which the model's own training step runs, or the meta device."""

from __future__ import annotations

import copy
import gc
import logging
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import _lru_cache_wrapper
from typing import Any, TypeAlias
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._functorch import config as functorch_config
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_osdp.errors import OSDPError, UntraceableError
from lightning_osdp.operations.splitting import parameter_like
from lightning_osdp.profiler.live_tensors import LiveBytes
from lightning_osdp.profiler.step.snapshot import is_left_alone, tensors_in, untouched

aten = torch.ops.aten
_log = logging.getLogger(__name__)
_Storages: TypeAlias = "list[weakref.ref[torch.UntypedStorage]]"


@contextmanager
def faked(
    module: nn.Module,
    batch: Any,
    device: torch.device,
    *,
    assumes_ones: bool = False,
    changed: set[nn.Parameter] | None = None,
) -> Iterator[Any]:
    """Fake tensors in place of the module's parameters, buffers and other tensors, with gradients on.

    Operations on fakes take the path of real tensors through torch, saved tensors and autocast included, but only work
    out shape, strides, dtype and device of the result; operations without a rule for that run on zeros. Code that asks
    a fake for its address, to launch a kernel of its own, gets an error.
    ``module.parameters()`` returns fakes inside, one for each parameter however often it is registered or kept as an
    attribute, and frozen where the parameter is; hooks on the parameters themselves are left out. Counting modes such
    as `LiveBytes` must be entered inside. On exit the module is as before, see `untouched`, also after an error.
    Outside of the module, fakes are removed from caches of functions, and from dicts and lists of Python's modules and
    classes.

    Args:
        module: the model, real or on the meta device.
        batch: its batch, real or on the meta device; it is not touched.
        device: device on which the model trains, where fakes of tensors on the meta device are; other fakes are on the
            device of the real tensor.
        assumes_ones: True takes a value that the step reads as one, which may lead the step down another path.
        changed: gets the parameters that the step writes to.

    Yields:
        The batch, copied with fakes for its tensors. `resized` gives it another number of samples.

    Raises:
        UntraceableError: the device is not there; or the code inside needs values, cannot be run on fakes, or failed
            for a reason of its own, which is the cause attached. Errors of this package pass through.

    Example:
        >>> layer = nn.Linear(3, 2)
        >>> with faked(layer, torch.ones(5, 3), torch.device("cpu")) as batch:
        ...     layer(batch).sum().backward()
        ...     layer.weight.grad
        FakeTensor(..., size=(2, 3))
        >>> layer.weight.grad is None
        True
    """
    if not torch.get_device_module(device).is_available():
        raise UntraceableError(
            f"Expected {device} to be there, for autograd asks it even about fake tensors, but it is not."
            " Profile on a machine that has it, or for the CPU."
        )
    with functorch_config.patch(fake_tensor_allow_unsafe_data_ptr_access=False):
        mode = FakeTensorMode(allow_non_fake_inputs=True)
    # on a GPU a recurrent layer's weights are views of one buffer, which they are no more once all-gathered
    recurrent = (child for child in module.modules() if isinstance(child, nn.RNNBase))
    apart: set[Tensor] = {
        weight for child in recurrent for weight in child.parameters() if weight.device.type == "cuda"
    }
    stand_ins = _StandIns(mode, device, apart)
    with _fakes_removed(stand_ins) as made, untouched(module):
        try:
            fake_batch = copy.deepcopy(batch, {id(tensor): stand_ins.fake(tensor) for tensor in tensors_in(batch)})
            parameters = list(module.parameters())
            for child in module.modules():
                stand_ins.put_into(vars(child))
            # torch logs a traceback before it raises; callers log the error where that is worth it
            quiet = patch.object(logging.getLogger("torch._subclasses.fake_tensor"), "disabled", new=True)
            with (
                # torch compiles nothing under a mode, and raises for what is to be compiled whole
                torch.compiler.set_stance("force_eager"),
                mode,
                _AsAllocated(assumes_ones=assumes_ones, made=made) as noted,
                torch.enable_grad(),
                quiet,
                # it compares addresses, which fakes lack; equal addresses would leave it nothing to do
                patch.object(nn.RNNBase, "flatten_parameters", lambda _: None),
                _cast_before_recurrent_layers(),
            ):
                yield fake_batch
            if changed is not None:
                changed |= {p for p in parameters if stand_ins.fake(p).untyped_storage()._cdata in noted.written}
        except OSDPError:
            raise
        except Exception as error:  # a training step may do anything, and so may fail in any way
            raise UntraceableError(
                f"Expected the training step of {type(module).__name__} to run on fake tensors, which have shapes but"
                f" no values, but it failed: {error!r}. Let it read no values (.item(), .tolist(), NumPy, shapes that"
                " depend on data), or profile it with real parameters."
            ) from error


@contextmanager
def _cast_before_recurrent_layers() -> Iterator[None]:
    """Casts what recurrent layers are given on a GPU under autocast, which itself asks for addresses of the copies."""

    def casting(function: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any) -> Any:
            if not (args[0].is_cuda and torch.is_autocast_enabled("cuda")):
                return function(*args)
            dtype = torch.get_autocast_dtype("cuda")
            args = tree_map_only(Tensor, lambda given: given.to(dtype) if given.is_floating_point() else given, args)
            with torch.autocast("cuda", enabled=False):
                return function(*args)

        return called

    with ExitStack() as patches:
        for name in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
            patches.enter_context(patch.object(torch._VF, name, casting(getattr(torch._VF, name))))
        yield


class _StandIns:
    """Fakes of tensors, one for each; tensors that share a storage have fakes that share one, but for some."""

    def __init__(self, mode: FakeTensorMode, device: torch.device, apart: set[Tensor]) -> None:
        self.mode, self._device, self._apart = mode, device, apart
        self._fakes: dict[Tensor, Tensor] = {}
        self._visited: set[int] = set()

    def fake(self, tensor: Tensor) -> Tensor:
        """Fake of a tensor, as a leaf of autograd."""
        if tensor not in self._fakes:
            self._fakes[tensor] = self._make(tensor)
        return self._fakes[tensor]

    def _make(self, tensor: Tensor) -> Tensor:
        device = tensor.device if tensor in self._apart else self._device
        if tensor in self._apart:
            tensor = stand_in(tensor)
        if not tensor.is_meta:
            return self.mode.from_tensor(tensor if tensor.is_leaf else tensor.detach())
        fake = self.mode.fake_tensor_converter.from_meta_and_device(self.mode, tensor.detach(), device)
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(fake, requires_grad=tensor.requires_grad)
        return fake.requires_grad_(tensor.requires_grad and tensor.is_leaf)

    def forget(self) -> None:
        """Frees fakes that nobody else holds, and their gradients."""
        self._fakes.clear()

    def put_into(self, container: Any) -> None:
        """Replaces tensors in a container, and in those inside it, without replacing the containers."""
        if id(container) in self._visited:
            return
        self._visited.add(id(container))
        if isinstance(container, set):
            items = [self._replaced(item) for item in container]
            container.clear()
            container.update(items)
            return
        for key, item in list(container.items() if isinstance(container, dict) else enumerate(container)):
            replaced = self._replaced(item)
            if replaced is not item:
                container[key] = replaced

    def _replaced(self, item: Any) -> Any:
        if isinstance(item, Tensor):
            return self.fake(item)
        if isinstance(item, weakref.ref) and isinstance(referent := item(), Tensor):
            return weakref.ref(self.fake(referent))  # recurrent layers compare their weights with these
        if isinstance(item, torch.device) and item.type == "meta":
            return self._device  # Lightning's modules and metrics note theirs
        if isinstance(item, (dict, list, deque, set)):
            self.put_into(item)
        elif isinstance(item, tuple):
            replaced = [self._replaced(inner) for inner in item]
            if any(new is not old for new, old in zip(replaced, item, strict=True)):
                return type(item)(*replaced) if hasattr(item, "_fields") else type(item)(replaced)
        return item


@contextmanager
def _fakes_removed(stand_ins: _StandIns) -> Iterator[_Storages]:
    """Removes fakes that a step leaves outside of its module, on exit: later steps on real tensors would find them.

    Caches of functions (``functools.lru_cache``) with fakes are cleared. Global dicts and lists, and those that are
    attributes of classes, lose their fakes.

    Yields:
        List for storages that operations make; nothing is searched where none of them is alive on exit.
    """
    made: _Storages = []
    try:
        yield made
    finally:
        stand_ins.forget()
        if any(storage() is not None for storage in made):
            _remove_fakes(stand_ins.mode)


def _remove_fakes(mode: FakeTensorMode) -> None:
    objects = gc.get_objects()
    # `type(each)` and not `isinstance`: a proxy for another object may claim to be a tensor, or fail
    fakes = {id(each) for each in objects if issubclass(type(each), FakeTensor) and each.fake_mode is mode}
    fakes |= {id(each) for each in objects if type(each) in (tuple, list) and not fakes.isdisjoint(map(id, each))}
    for each in objects:
        if type(each) is _lru_cache_wrapper and not fakes.isdisjoint(map(id, tensors_in(gc.get_referents(each)))):
            each.cache_clear()
    modules = [module for name, module in [*sys.modules.items()] if not is_left_alone(name)]
    classes = [each for each in objects if issubclass(type(each), type) and not is_left_alone(str(each.__module__))]
    for value in [value for holder in (*modules, *classes) for value in [*getattr(holder, "__dict__", {}).values()]]:
        if type(value) is dict:
            for key in [key for key, item in [*value.items()] if id(item) in fakes]:
                del value[key]
        elif type(value) is list and not fakes.isdisjoint(map(id, value)):
            value[:] = [item for item in value if id(item) not in fakes]


@contextmanager
def without_values(module: nn.Module) -> Iterator[None]:
    """Puts tensors on the meta device in place of parameters and buffers while it is active.

    Names, ties, dtypes, ``requires_grad`` and attributes of parameters stay as they are.
    """
    registries: list[Any] = [each for child in module.modules() for each in (child._parameters, child._buffers)]
    kept = [dict(registry) for registry in registries]
    stand_ins: dict[Tensor, Tensor] = {}
    for registry in registries:
        for name, tensor in registry.items():
            if tensor is not None and not tensor.is_meta:
                registry[name] = stand_ins.setdefault(tensor, stand_in(tensor))
    try:
        yield
    finally:
        for registry, tensors in zip(registries, kept, strict=True):
            registry.update(tensors)


def stand_in(tensor: Tensor) -> Tensor:
    """Tensor on the meta device in place of another; a parameter, with its attributes, in place of a parameter."""
    empty = torch.empty_like(tensor, device="meta")
    return parameter_like(empty, tensor) if isinstance(tensor, nn.Parameter) else empty


class _AsAllocated(TorchDispatchMode):
    """Gives results of operations on fake tensors the storages that kernels allocate, inside a ``FakeTensorMode``.

    [Empirical: rules were found by comparing fake with real results, with torch 2.13 on CPU.]
    """

    def __init__(self, *, assumes_ones: bool = False, made: _Storages | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._assumes_ones = assumes_ones
        self._made: _Storages = [] if made is None else made
        self.written: set[int] = set()  # addresses of storages that operations have written to

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        if self._assumes_ones and func is aten._local_scalar_dense.default:
            _log.info("OSDP: the training step reads a value, which a fake tensor does not have; it is taken as 1.")
            with unset_fake_temporarily():
                return torch.ones((), dtype=args[0].dtype).item()
        if func._schema.is_mutable:
            self.written |= {tensor.untyped_storage()._cdata for tensor in written_by(func, args, kwargs or {})}
        result = func(*args, **(kwargs or {}))
        if (rule := _RULES.get(func)) is not None:
            result = rule(result, *args)
        if func in _WITH_WORKSPACE:
            made = [each for each in tree_leaves(result) if isinstance(each, Tensor)]
            if made and made[0].device.type == "cuda":
                workspace = _workspace_bytes(func, args, kwargs or {}, made[0].device)
                LiveBytes.pass_through(workspace + sum(each.untyped_storage().nbytes() for each in made), "cuda")
        returns = func._schema.returns
        for returned, value in zip(returns, result if len(returns) > 1 else (result,), strict=False):
            if returned.alias_info is None:
                tensors = (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))
                self._made += [weakref.ref(each.untyped_storage()) for each in tensors if each.layout is torch.strided]
        return result


def written_by(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """Arguments that an operation in place changes."""
    for index, argument in enumerate(func._schema.arguments):
        if argument.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            yield from (each for each in tree_leaves(value) if isinstance(each, Tensor))


def _keeps_all_elements(result: Tensor, input: Tensor, target: Tensor, *_: Any) -> Tensor:  # noqa: A002
    """Loss that is reduced in place: its storage has room for every element's loss as long as it lives."""
    elements = torch.broadcast_shapes(input.shape, target.shape).numel() if result.dim() == 0 else result.numel()
    result.untyped_storage().resize_(elements * result.element_size())
    return result


def _statistics_like_weight(result: Any, _: Tensor, *options: Any) -> Any:
    """Statistics of a normalisation, which have the weight's dtype on CPU: autocast leaves that alone."""
    output, mean, deviation = result
    weight = next((option for option in options if isinstance(option, Tensor)), None)
    if weight is None or weight.device.type != "cpu" or weight.dtype == mean.dtype:
        return result
    return output, torch.empty_like(mean, dtype=weight.dtype), torch.empty_like(deviation, dtype=weight.dtype)


def _needed_gradients(result: Any, *args: Any) -> Any:
    """Gradients without those of inputs that need none."""
    wanted = args[-1]
    return tuple(gradient if is_wanted else None for gradient, is_wanted in zip(result, wanted, strict=True))


def _called(function: Any, args: tuple[Any, ...]) -> Any:
    """Results of an operation on zeros, on the device of its arguments, for their shapes."""
    with unset_fake_temporarily():
        return function(*tree_map_only(Tensor, lambda t: torch.zeros(t.shape, dtype=t.dtype, device=t.device), args))


_workspaces: dict[str, int] = {}
"""Operation and its arguments, as text -> bytes."""


def _workspace_bytes(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> int:
    """Bytes that a kernel of a GPU's library takes beside its results, in the second of two calls on zeros.

    cuDNN takes the algorithm that it finds best for a shape, and asks torch's allocator for what that needs.
    """
    given = tree_map_only(Tensor, lambda t: (tuple(t.shape), tuple(t.stride()), t.dtype, t.device), (args, kwargs))
    key = f"{function} {given} {torch.backends.cudnn.enabled} {torch.backends.cudnn.benchmark}"
    if key not in _workspaces:
        with unset_fake_temporarily(), torch.no_grad(), torch.cuda.device(device):
            positional, named = tree_map_only(
                Tensor,
                lambda t: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device).zero_(),
                (args, kwargs),
            )
            function(*positional, **named)  # libraries' own buffers come with their first call
            torch.cuda.reset_peak_memory_stats(device)
            before = torch.cuda.memory_allocated(device)
            result = function(*positional, **named)
            kept = torch.cuda.memory_allocated(device) - before
            _workspaces[key] = torch.cuda.max_memory_allocated(device) - before - kept
            del result
    return _workspaces[key]


def _as_called(function: Any, *places: int, copied: int | None = None, train: int | None = None) -> Callable[..., Any]:
    """Rule for tensors that a library makes beside results, of a size that only a call tells.

    Fake tensors take some of these for empty (``_cudnn_rnn`` in torch/_meta_registrations.py); backward would read
    beyond such a tensor's end. [For cuDNN right to the byte on an H200, torch 2.11.]

    Args:
        function: the operation.
        places: places of the results that are as large as in a call.
        copied: place of the argument that training does not give, so that the call copies it: weights of a recurrent
            layer in one buffer, which parameters that were all-gathered are not.
        train: place of the argument that tells if there is a backward, which needs the first of ``places``.
    """

    def another(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)

    def rule(result: Any, *args: Any) -> Any:
        made = _called(function, tuple(None if place == copied else arg for place, arg in enumerate(args)))
        if train is not None and args[train] and made[places[0]].numel() == 0:
            raise UntraceableError(
                f"Expected {function} to say how much it keeps for backward, but a call of it keeps nothing."
                " Profile the model with real parameters."
            )
        return tuple(another(made[place]) if place in places else each for place, each in enumerate(result))

    return rule


def _contiguous_input_gradient(result: Any, *_: Any) -> Any:
    """Gradient of an input that is contiguous, for the kernel makes its inputs contiguous first."""
    gradient, *others = result
    return None if gradient is None else torch.empty_like(gradient, memory_format=torch.contiguous_format), *others


def _two_biases(result: Any, *_: Any) -> Any:
    """Gradients of a recurrent layer's two biases as two tensors, where fake ones share one."""
    return *result[:4], torch.empty_like(result[4]), *result[5:]


def _seeds_on_host(result: Any, *_: Any) -> Any:
    """Seed and offset of dropout on the host, where the kernel of backward reads them.

    Fake tensors have them on the device, where they are while a graph is captured ("Seed and Offset" in
    torch/_meta_registrations.py). [Unvalidated on CUDA: written by torch's sources, and tested without a device.]
    """
    output, logsumexp, _, _, *others = result
    seed, offset = (torch.empty((), dtype=torch.int64, device="cpu") for _ in range(2))
    return output, logsumexp, seed, offset, *others


_WITH_WORKSPACE = {
    aten.convolution.default,
    aten.convolution_backward.default,
    aten.cudnn_convolution.default,
    aten.cudnn_convolution_transpose.default,
    aten._cudnn_rnn.default,
    aten._cudnn_rnn_backward.default,
}
"""Operations whose kernels on a GPU take memory beside their results."""

_RULES: dict[Any, Callable[..., Any]] = {
    aten.mse_loss.default: _keeps_all_elements,
    aten.smooth_l1_loss.default: _keeps_all_elements,
    aten.soft_margin_loss.default: _keeps_all_elements,
    aten.binary_cross_entropy.default: _keeps_all_elements,
    aten.native_layer_norm.default: _statistics_like_weight,
    aten.native_group_norm.default: _statistics_like_weight,
    aten.native_batch_norm.default: _statistics_like_weight,
    aten.native_layer_norm_backward.default: _contiguous_input_gradient,
    aten.native_batch_norm_backward.default: _needed_gradients,
    # a call without gradients returns no workspace
    aten.mkldnn_rnn_layer.default: _as_called(aten.mkldnn_rnn_layer.default, 3),
    aten.mkldnn_rnn_layer_backward.default: _two_biases,
    aten._cudnn_rnn.default: _as_called(aten._cudnn_rnn.default, 3, 4, copied=3, train=12),
    aten.miopen_rnn.default: _as_called(aten.miopen_rnn.default, 3, 4, train=10),
    aten.cudnn_batch_norm.default: _as_called(aten.cudnn_batch_norm.default, 3),
    aten._scaled_dot_product_efficient_attention.default: _seeds_on_host,
    aten._efficient_attention_forward.default: _seeds_on_host,
}
