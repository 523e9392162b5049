"""Backward of a step: when it is through with units, and gradients that are not reduced yet."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import compress
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from lightning_osdp.apply.internals import access, dtensors, gathering, host_shards, resident
from lightning_osdp.errors import ConfigurationError
from lightning_osdp.operations.stationary.exchanges import is_in_torch_func


def _reduce_unfrozen(groups: Sequence[Any]) -> None:
    """Sets the dtypes in which units reduce gradients that were frozen at first and are trained now.

    torch 2.13 learns these dtypes before a first forward, or in ``unshard()``, from parameters that are trained then.
    Gradients of units without any would stay in low precision (pytorch#186998, fixed in 2.14).
    """
    for group in groups if access.version() < (2, 14) else ():
        if group._orig_dtype is not None:
            continue
        dtypes = {
            (each.orig_dtype, each.reduce_dtype) for each in group.fsdp_params if each.orig_dtype.is_floating_point
        }
        if len(dtypes) == 1:
            ((group._orig_dtype, group._reduce_dtype),) = dtypes


def forget_step(root: nn.Module, groups: Sequence[Any]) -> None:
    """Gives up a step that was broken off, with its gradients that are not reduced yet."""
    assert isinstance(root, FSDPModule)
    root.reset_iter_state()
    forget_gradients(groups)


def forget_gradients(groups: Sequence[Any]) -> None:
    """Drops gradients that are not reduced yet, or not between nodes; gradients of shards stay."""
    for group in groups:
        group._partial_reduce_output = None
        for parameter in compress(group.fsdp_params, have_unreduced_gradients(group)):
            if hasattr(parameter, "_unsharded_param"):
                parameter._unsharded_param.grad = None
            if parameter.unsharded_accumulated_grad is not None:  # since torch 2.15 it is the one above
                parameter.unsharded_accumulated_grad = None


def copy_gradients(groups: Sequence[Any], others: Sequence[nn.Parameter]) -> Callable[[], None]:
    """Copies gradients to the host, reduced or not, before a micro-batch; returns a function that puts them back.

    The function is called once `forget_step` has given up the micro-batch.

    Args:
        groups: parameters of units.
        others: parameters of no unit.
    """
    parameters = [each for group in groups for each in group.fsdp_params]
    shards = [*(each.sharded_param for each in parameters), *others]
    reduced = [
        (shard, shard.grad, dtensors.local(shard.grad).to("cpu", copy=True))
        for shard in shards
        if shard.grad is not None
    ]
    without = [shard for shard in shards if shard.grad is None]
    holders = [(each._unsharded_param, "grad") for each in parameters if hasattr(each, "_unsharded_param")]
    holders += [(each, "unsharded_accumulated_grad") for each in parameters]  # since torch 2.15 it is the one above
    holders += [(group, "_partial_reduce_output") for group in groups]
    waiting = {id(value): (*holder, value) for holder in reversed(holders) if (value := getattr(*holder)) is not None}
    unreduced = [(holder, name, value.device, value.to("cpu", copy=True)) for holder, name, value in waiting.values()]
    del waiting  # backward frees gradients once they are reduced

    @torch.no_grad()
    def restore() -> None:
        for shard, gradient, values in reduced:
            shard.grad = gradient
            dtensors.local(gradient).copy_(values)
        for shard in without:
            shard.grad = None
        for holder, name, device, values in unreduced:
            setattr(holder, name, values.to(device))

    return restore


class WaitingForwards:
    """Outputs of units that backward has not come to, for as long as their graphs live.

    ``note`` is given the outputs of each call that have gradients.
    """

    def __init__(self, root: nn.Module, note: Callable[[Sequence[Tensor]], None]) -> None:
        self._note, self._step = note, access.state_of(root)._state_ctx
        self._outputs: WeakSet[_Output] = WeakSet()
        for state in self._step.all_states:
            state._register_pre_backward_hook = partial(self._register, state._register_pre_backward_hook)

    @property
    def are_there(self) -> bool:
        """True if there are such outputs."""
        if self._outputs:
            gc.collect()  # may free graphs that nothing refers to any more
        return bool(self._outputs)

    def forget(self) -> None:
        """Forgets all outputs, because nobody is going to call backward for them."""
        self._outputs.clear()

    def _register(self, register: Callable[[Any], Any], output: Any) -> Any:
        output = register(output)
        # in backward, blocks only recompute
        if torch.is_grad_enabled() and not self._step.post_backward_final_callback_queued:
            noted = _Output(self._outputs)
            leaves = (output,) if isinstance(output, Tensor) else tree_leaves(output)
            tensors = [each for each in leaves if isinstance(each, Tensor) and each.grad_fn is not None]
            for tensor in tensors:
                tensor.register_hook(noted)
            if not is_in_torch_func():
                self._note(tensors)
        return output


class _Output:
    """Output of a unit at one call: a hook of its tensors, which their graph keeps alive."""

    def __init__(self, waiting: WeakSet[_Output]) -> None:
        self._waiting = waiting
        waiting.add(self)

    def __call__(self, _: Tensor) -> None:
        self._waiting.discard(self)


class BackwardWatch:
    """Tells when backward is through with units, and reduces once, at its end, units that no loss reaches.

    ``fully_shard`` ends a unit at each call of it that backward undoes, and autograd gives parameters their gradients
    with the last of these calls. Zeros in place of gradients that are yet to come would be reduced for nothing.
    Gradients of a reentrant checkpoint, whose backward runs by itself, may come after torch has ended the unit.

    ``torch.autograd.grad`` is a backward, too, in which no parameter gets a gradient. Inside a step, forward goes on
    after it: nothing is reduced then, and units are left as forward leaves them.

    ``note`` is called with the number of a group and, for each parameter, whether it got a gradient.

    Attributes:
        is_announced: True if all ranks reduce after the next backward, even a rank on which nothing got a gradient.
    """

    def __init__(self, root: nn.Module, groups: Sequence[Any], note: Callable[[int, list[bool]], None]) -> None:
        self.is_announced, self._is_ending = False, False
        self._step, self._note, self._groups = access.state_of(root)._state_ctx, note, groups
        self._versions: list[Any] | None = None  # gradients of each group before an unannounced backward
        self._transformed: set[Any] = set()
        """Groups that ``torch.func`` has called in this step."""
        for index, group in enumerate(groups):
            group.post_forward = partial(self._post_forward, group, group.post_forward)
            group.post_backward = torch.compiler.disable(
                partial(self._post_backward, group, group.post_backward, index)
            )
        for state in self._step.all_states:
            begin = state._register_root_post_backward_final_callback
            state._register_root_post_backward_final_callback = partial(self._begin, begin)
            state._root_post_backward_final_callback = partial(self._end, state._root_post_backward_final_callback)

    def _begin(self, begin: Callable[[], None]) -> None:
        if not self._step.post_backward_final_callback_queued:  # torch calls this once per unit
            _reduce_unfrozen(self._groups)
            self._versions = None if self.is_announced else list(map(_versions_of_gradients, self._groups))
        begin()

    def _has_got(self, index: int) -> bool:
        """True if parameters of a group have got gradients in this backward, or it was announced."""
        return self._versions is None or _versions_of_gradients(self._groups[index]) != self._versions[index]

    def _post_forward(self, group: Any, post_forward: Callable[..., Any], *args: Any) -> Any:
        """Leaves a unit that ``torch.func`` calls unsharded until backward ends.

        Hooks of the outputs of the unit do not run for tensors that ``torch.func`` differentiates, and backward comes
        to the unit at any time.
        """
        if not is_in_torch_func():
            return post_forward(*args)
        self._transformed.add(group)
        group.reshard = access.do_nothing
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
        if resident.reduces_nothing(group):
            group._training_state = TrainingState.IDLE
            return
        have = have_unreduced_gradients(group)
        self._note(index, have)
        if any(have):
            _make_dense(group)
        if any(have) or (self._is_ending and _is_trained(group)):
            post_backward(*unused)
            return
        # torch would reduce zeros for what is trained, and wait for the reduce-scatter before where all is frozen
        group._training_state = TrainingState.POST_BACKWARD
        if group.reshard_after_backward:
            group.reshard()
        group._training_state = TrainingState.IDLE  # makes the end of backward come to it again

    def _end(self, end: Callable[[], None]) -> None:
        if not any(map(self._has_got, range(len(self._groups)))):
            self._reset_reached()
            return
        self.is_announced = False
        self._is_ending = True
        for group in self._groups:
            is_through = group.reduce_grads and group._training_state == TrainingState.POST_BACKWARD
            if is_through and any(have_unreduced_gradients(group)):
                group._training_state = TrainingState.PRE_BACKWARD  # torch then reduces it at the end of backward
        try:
            end()
        finally:
            self._is_ending = False
            self._transformed.clear()
        for group in self._groups:
            gathering.drop_retained(group)

    def _reset_reached(self) -> None:
        """Lets units that ``torch.autograd.grad`` has reached be called, and be reached, again."""
        self._step.post_backward_final_callback_queued = False
        for state in self._step.all_states:
            if state._training_state == TrainingState.PRE_BACKWARD:
                state._training_state = TrainingState.IDLE
        for group in self._groups:
            if group in self._transformed:
                group._training_state = TrainingState.IDLE
            elif group._training_state == TrainingState.PRE_BACKWARD:  # nothing ends it if no input needs a gradient
                _leave_as_forward(group)


def _is_trained(group: Any) -> bool:
    """True if any parameter of a unit may have a gradient in this backward."""
    return any(getattr(each, "_unsharded_param", each.sharded_param).requires_grad for each in group.fsdp_params)


def _make_dense(group: Any) -> None:
    """Makes sparse gradients, such as those of an embedding, dense: a reduce-scatter cuts them into rows."""
    for parameter in group.fsdp_params:
        whole = getattr(parameter, "_unsharded_param", None)
        if whole is not None and whole.grad is not None and whole.grad.layout != torch.strided:
            whole.grad = whole.grad.to_dense()


def _versions_of_gradients(group: Any) -> list[tuple[int, int]]:
    """Identities and versions of unreduced gradients; they change with each gradient that is added."""
    parameters = [*compress(group.fsdp_params, have_unreduced_gradients(group))]
    pairs = ((each.unsharded_accumulated_grad, each._unsharded_param.grad) for each in parameters)
    return [(id(each), each._version) for pair in pairs for each in pair if each is not None]


def _leave_as_forward(group: Any) -> None:
    """Reshards a unit that is unsharded for backward to the state in which forward leaves it."""
    if group._training_state == TrainingState.FORWARD:
        return  # a call of the unit goes on
    if group.is_unsharded:
        group._training_state = TrainingState.FORWARD  # makes reshard() leave what forward leaves
        group.reshard()
    group._training_state = TrainingState.IDLE


def have_unreduced_gradients(group: Any) -> list[bool]:
    """True for each parameter of a group that has a gradient which is not reduced yet."""
    wholes = [(each, getattr(each, "_unsharded_param", None)) for each in group.fsdp_params]
    return [
        each.unsharded_accumulated_grad is not None or (whole is not None and whole.grad is not None)
        for each, whole in wholes
    ]


def are_given_gradients(group: Any) -> list[bool]:
    """True for each parameter that the end of backward gives a gradient: zeros, where it is trained and has none."""
    are_trained = [
        hasattr(each, "_unsharded_param") and each._unsharded_param.requires_grad for each in group.fsdp_params
    ]
    with_zeros = group.reduce_scatter_unused_params
    return [
        has or (with_zeros and is_trained)
        for has, is_trained in zip(have_unreduced_gradients(group), are_trained, strict=True)
    ]


def has_unreduced_gradients(module: nn.Module) -> bool:
    """True if a unit has gradients that are not reduced yet, or not between nodes."""
    group = access.group_of(module)
    return group is not None and (has_partial_gradients(group) or any(have_unreduced_gradients(group)))


def has_partial_gradients(group: Any) -> bool:
    """True if a unit has gradients of all its parameters that are reduced inside of nodes alone."""
    return group._partial_reduce_output is not None


def sharded_zeros(group: Any) -> Iterator[tuple[nn.Parameter, DTensor]]:
    """Pairs of a trainable parameter and a gradient of zeros, with the layout that a reduce-scatter gives."""
    for parameter in group.fsdp_params:
        if parameter.sharded_param.requires_grad:
            with _disable_current_modes() if host_shards.is_kept(parameter) else nullcontext():  # which count
                zeros = torch.zeros_like(parameter._sharded_local_tensor)
            yield parameter.sharded_param, parameter.to_sharded_dtensor(zeros)


def phase_of(module: nn.Module) -> str:
    """Phase of a step that a unit is in, or was in last: ``forward``, ``backward`` or the empty string."""
    training_state = (access.group_of(module) or access.state_of(module))._training_state
    if training_state in {TrainingState.PRE_BACKWARD, TrainingState.POST_BACKWARD}:
        return "backward"
    return "forward" if training_state == TrainingState.FORWARD else ""


def announce_end(root: nn.Module) -> None:
    """Has the end of this backward reduce what is left, though no unit tells of it.

    Modules of units that stay unsharded have no hooks, nor has the root where a step calls backward itself.
    """
    access.state_of(root)._register_root_post_backward_final_callback()


def check_reduced(groups: Sequence[Any]) -> None:
    """Raises a `ConfigurationError` where replicated units have gradients that no end of a backward has reduced."""
    for group in groups:
        if resident.stays(group) and resident.is_replicated(group) and group.reduce_grads:
            left = next(compress(group.fsdp_params, have_unreduced_gradients(group)), None)
            if left is not None:
                raise ConfigurationError(
                    "Expected a step to call self.manual_backward(loss), got gradients of"
                    f" {access.name_of(left)!r} from a backward of which nothing has told: each rank has all of its"
                    " unit (replicated), whose modules have no hooks. Call manual_backward in place of loss.backward()."
                )


def is_in_backward(root: nn.Module) -> bool:
    """True while backward goes on."""
    return bool(access.state_of(root)._state_ctx.post_backward_final_callback_queued)
