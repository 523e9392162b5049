"""Backward of a step: when it is through with units, and gradients that are not reduced yet."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from lightning_osdp.apply.internals.access import do_nothing, group_of, state_of, version
from lightning_osdp.apply.internals.gathering import drop_retained


def _reduce_unfrozen(groups: Sequence[Any]) -> None:
    """Has units whose parameters were all frozen reduce gradients like the others once somebody has unfrozen them.

    In which dtype gradients are reduced and kept torch 2.13 learns before a first forward, or in ``unshard()``, from
    parameters that are trained then: those of such units would stay in low precision (pytorch#186998, fixed in 2.14).
    """
    for group in groups if version() < (2, 14) else ():
        found = {
            (each.orig_dtype, each.reduce_dtype) for each in group.fsdp_params if each.orig_dtype.is_floating_point
        }
        if group._orig_dtype is None and len(found) == 1:
            ((group._orig_dtype, group._reduce_dtype),) = found


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
            drop_retained(group)

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


def sharded_zeros(group: Any) -> Iterator[tuple[nn.Parameter, DTensor]]:
    """For each trainable parameter, a gradient of zeros such as a reduce-scatter leaves."""
    for parameter in group.fsdp_params:
        if parameter.sharded_param.requires_grad:
            zeros = torch.zeros_like(parameter._sharded_local_tensor)
            yield parameter.sharded_param, parameter.to_sharded_dtensor(zeros)


def phase_of(module: nn.Module) -> str:
    """``forward``, ``backward`` or nothing: what a unit is in, or was in this step."""
    found = (group_of(module) or state_of(module))._training_state
    if found in {TrainingState.PRE_BACKWARD, TrainingState.POST_BACKWARD}:
        return "backward"
    return "forward" if found == TrainingState.FORWARD else ""


def is_in_backward(root: nn.Module) -> bool:
    """Whether a backward is going on."""
    return bool(state_of(root)._state_ctx.post_backward_final_callback_queued)
