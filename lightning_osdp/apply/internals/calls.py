"""Calls of the modules of units: torch's hooks around them, where these have something to do.

Torch runs its hooks at each module of a unit, and wraps them anew at each call, so that dynamo leaves them alone. Most
find nothing to do: the others have entered the unit, or its weights are resident. Beside casting they would
note that the unit is in use, have backward end the unit where it comes to the unit's inputs, and gather the next
unit ahead. Modules of a resident unit have none of them while it shows its kept weights, but the first module of a unit
that is trained: its inputs tell backward that it is through with the unit.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import takewhile
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.utils._pytree import tree_leaves, tree_map_only
from typing_extensions import override

from lightning_osdp.apply.internals import access, gathering, resident, sharding, shortcuts

_Place: TypeAlias = "tuple[OrderedDict[int, Any], int]"
"""Hooks of a module, and the number of one of them."""


def shorten(modules: Sequence[nn.Module], residence: resident.Residence, policy: MixedPrecisionPolicy) -> None:
    """Puts hooks around those that torch has registered at the modules of a unit, in their places.

    Args:
        modules: all of a unit but the root, in forward order.
        residence: knows which units are resident.
        policy: of the unit. Where it casts inputs or outputs, hooks have that to do at each call.

    Raises:
        ConfigurationError: torch has not registered a hook before and one after the calls of each module.
    """
    state = access.state_of(modules[0])
    registered = (state._pre_forward_hook_handle, state._post_forward_hook_handle)
    # a unit of several modules has one handle with those of all hooks
    handles = {id(each): each for handle in registered for each in getattr(handle, "handles", (handle,))}
    places = {id(handle.hooks_dict_ref()): (handle.hooks_dict_ref(), handle.id) for handle in handles.values()}
    found = all(id(hooks) in places for each in modules for hooks in (each._forward_pre_hooks, each._forward_hooks))
    access.refuse([] if found else ["hooks before and after each call of a module of a unit"])
    unit = _Unit(modules, residence, policy)
    for module in modules:
        (before, first), (after, last) = places[id(module._forward_pre_hooks)], places[id(module._forward_hooks)]
        call = _Call(unit, module, before[first], after[last])
        before[first], after[last] = call.begin, call.end
        unit.hooks.append(((before, first), (after, last)))
    if unit.group is not None:
        residence.on_hidden(unit.group, unit.put_hooks_back)


class _Unit:
    """Unit whose modules need no hooks while it shows its kept weights: torch then looks for none at their calls.

    Attributes:
        hooks: places of those of each module, before and after its calls.
    """

    def __init__(
        self, modules: Sequence[nn.Module], residence: resident.Residence, policy: MixedPrecisionPolicy
    ) -> None:
        self.modules, self.residence = modules, residence
        self.state, self.group = access.state_of(modules[0]), access.group_of(modules[0])
        self.casts_inputs = policy.cast_forward_inputs and policy.param_dtype is not None
        self.casts_outputs = policy.output_dtype is not None
        self.hooks: list[tuple[_Place, _Place]] = []
        self._off: list[tuple[OrderedDict[int, Any], int, Any, list[int]]] = []

    @property
    def has_hooks_off(self) -> bool:
        """True from `take_hooks_off` on until they are put back."""
        return bool(self._off)

    @property
    def ahead(self) -> list[Any]:
        """States of units that this one gathers ahead in forward."""
        ahead: list[Any] = self.state._states_to_forward_prefetch
        return ahead

    def take_hooks_off(self) -> None:
        """Takes the hooks of all modules off, but those that cast, and one that gathers units ahead."""
        # dynamo takes a module that it finds without hooks for one that never has any
        if self._off or counters["frames"]:
            return
        entering, leaving = zip(*self.hooks, strict=True)
        first = (
            len(entering) if self.casts_inputs else int(len(self.ahead) > 0 or not resident.reduces_nothing(self.group))
        )
        for hooks, number in (*entering[first:], *(() if self.casts_outputs else leaving)):
            if number in hooks:
                before = [*takewhile(number.__ne__, hooks)] if len(hooks) > 1 else []
                self._off.append((hooks, number, hooks.pop(number), before))

    def put_hooks_back(self) -> None:
        """Puts back what was taken off, each hook in its place among others."""
        for hooks, number, hook, before in self._off:
            after = [other for other in hooks if other not in before] if hooks else ()
            hooks[number] = hook
            for other in after:
                hooks.move_to_end(other)
        self._off.clear()


class _Call:
    """Hooks before and after each call of one module of a unit; ``enter`` and ``leave`` are torch's own."""

    def __init__(self, unit: _Unit, module: nn.Module, enter: Callable[..., Any], leave: Callable[..., Any]) -> None:
        self._enter, self._leave = shortcuts.unwrapped(enter), shortcuts.unwrapped(leave)
        self._unit, self._state, self._group, self._residence = unit, unit.state, unit.group, unit.residence
        self._handle: Any = unit.modules[0]
        self._is_first, self._is_last = module is unit.modules[0], module is unit.modules[-1]

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # as torch does with its own hooks of a unit
    def begin(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """Enters the unit, unless it is there."""
        if self._group is None or not self._is_there():
            return self._enter(module, args, kwargs)
        if self._unit.casts_inputs:
            args, kwargs = self._state._cast_forward_inputs(args, kwargs)
        if self._is_first and not (self._is_in_forward or resident.reduces_nothing(self._group)):
            return self._group._register_post_backward_hook(args, kwargs)
        return (args, kwargs) if self._unit.casts_inputs else None

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def end(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Leaves the unit with its last module. Backward gathers it at outputs of all modules.

        Torch has it gathered at the output of the last module, which the loss may not depend on, and where it has
        entered the unit.
        """
        output = without_views(output)
        passes = self._group is not None and self._passes(module)
        if not passes:
            output = self._leave(module, args, output)
        elif self._unit.casts_outputs:
            output = self._state._cast_output_dtype(output)
        if self._group is not None and (passes or not self._is_last):
            for tensor in (output,) if isinstance(output, Tensor) else tree_leaves(output):
                if isinstance(tensor, Tensor) and tensor.requires_grad:
                    tensor.register_hook(self._gather)
        return output

    @property
    def _is_in_forward(self) -> bool:
        """True where torch has entered the unit, and not left it yet."""
        return bool(self._group._training_state == TrainingState.FORWARD)

    def _is_there(self) -> bool:
        """Tells if a call finds its unit, shown if it is kept, so that torch has nothing to note."""
        if self._is_in_forward:
            return bool(self._group.is_unsharded)
        step = self._state._state_ctx
        is_within = step.post_backward_final_callback_queued or getattr(step, "iter_forward_root", None) is not None
        if not (self._unit.has_hooks_off or (is_within and self._residence.shows(self._group))):
            return False
        for state in self._unit.ahead if self._is_first and is_within else ():
            for group in state._fsdp_param_groups:
                group._prefetch_unshard(group, "forward")
        self._unit.take_hooks_off()
        return True

    def _passes(self, module: nn.Module) -> bool:
        """Tells if torch need not be told that a module of the unit has returned."""
        if not self._is_in_forward:
            return self._residence.keeps(self._group)
        left: set[nn.Module] = getattr(self._state, "_modules_to_run_forward", set())
        if len(left) < 2 or module not in left:
            return False
        left.remove(module)
        return True

    def _gather(self, _: Tensor) -> None:
        if self._group.is_unsharded or self._residence.shows(self._group) or not gathering.is_read(self._group):
            return
        # The hook outlives its unit where the module is sharded anew.
        if isinstance(self._handle, FSDPModule) and access.state_of(self._handle) is self._state:
            self._handle.unshard()


def without_views(output: Any) -> Any:
    """Replaces views in an output by tensors of the same memory that are no views.

    An operation in place on a view removes the hook by which backward finds the unit.
    """
    if not torch.is_grad_enabled():
        return output
    return _no_view(output) if isinstance(output, Tensor) else tree_map_only(Tensor, _no_view, output)


def _no_view(tensor: Tensor) -> Tensor:
    is_view = tensor.requires_grad and tensor._base is not None
    return _Alias.apply(tensor) if is_view else tensor  # type: ignore[no-untyped-call]


@sharding.typed_as_local
class _Alias(torch.autograd.Function):
    """Tensor with the values and the memory of another one."""

    @staticmethod
    @override
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    @override
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient
