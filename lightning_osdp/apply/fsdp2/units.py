"""Which modules are units together, in which modes, and the calls of ``fully_shard`` that make them so."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.utils._pytree import tree_leaves, tree_map_only
from typing_extensions import override

from lightning_osdp.apply.fsdp2 import internals
from lightning_osdp.core.modes import DP, ShardingMode
from lightning_osdp.errors import ConfigurationError


@dataclass(frozen=True, eq=False)
class ShardedUnit:
    """Modules whose parameters are gathered together.

    Attributes:
        name: of the unit or slice; the empty string is the root.
        modules: in forward order.
        mode: in use when it is made.
    """

    name: str
    modules: tuple[nn.Module, ...]
    mode: ShardingMode = DP

    @property
    def handle(self) -> Any:
        """The module that stands for all of them."""
        return self.modules[0]


def leaving_order(units: Sequence[ShardedUnit]) -> list[ShardedUnit]:
    """Units in the order in which forward leaves them: those inside another before it; without the root.

    Args:
        units: in the order in which forward comes to them.
    """
    left: list[ShardedUnit] = []
    inside: list[ShardedUnit] = []
    for unit in units:
        if not unit.name:
            continue
        while inside and not unit.name.startswith(f"{inside[-1].name}."):
            left.append(inside.pop())
        inside.append(unit)
    return left + inside[::-1]


def shard(
    units: Sequence[ShardedUnit],
    mesh: DeviceMesh,
    precision: MixedPrecision | None,
    initialize: Callable[[nn.Module], None],
) -> None:
    """Calls ``fully_shard`` for all units, those inside others first and the root last.

    Otherwise in the order of the modules, in which they are initialised where they are one unit: a buffer that several
    units have is initialised by the first of its owners.

    Args:
        units: root first, then in forward order.
        mesh: of all ranks, on their devices.
        precision: what to compute and reduce in; None: in the parameters' own dtype.
        initialize: gives the tensors of a unit's module storage and values, right before they are sharded.
    """
    (root,) = (unit.handle for unit in units if not unit.name)
    places = {module: place for place, module in enumerate(_children_first(root, set()))}
    for unit in sorted(units, key=lambda unit: max(places[module] for module in unit.modules)):
        hooks = {(child, name): parameter._backward_hooks for child, name, parameter in _own_parameters(unit)}
        for module in unit.modules:
            initialize(module)
        kept = [(child, name, vars(parameter)) for child, name, parameter in _own_parameters(unit)]
        for module in unit.modules:
            if unit.name:
                module.register_forward_hook(_without_views)
        fully_shard(
            list(unit.modules) if len(unit.modules) > 1 else unit.modules[0],
            mesh=mesh,
            reshard_after_forward=not unit.mode.resident,
            mp_policy=_policy(unit, precision),
        )
        internals.keep_identities(unit.handle)
        for child, name, attributes in kept:
            sharded: Any = child._parameters[name]
            vars(sharded).update(attributes)
            if hooks[child, name]:
                sharded._backward_hooks = hooks[child, name]  # `internals.carry_hooks` has them run
        for module in unit.modules:
            internals.keep_attributes(module)
            internals.refuse_copies(module)
        for module in unit.modules[:-1]:
            module.register_forward_hook(_Gathering(unit.handle))


def set_prefetch(
    units: Sequence[ShardedUnit],
    *,
    backward: bool,
    forward: bool,
    rerun: Collection[str] = (),
    late_backward: Collection[str] = (),
    late_forward: Collection[str] = (),
) -> None:
    """Says explicitly what each unit gathers ahead, for torch's own order is that of the forward before.

    That one may have been an evaluation, and it has units that no backward comes to.

    Args:
        units: root first, then in forward order.
        backward: whether a unit gathers the one that forward left before, once backward has come to it.
        forward: whether a unit gathers the next one of forward, once forward has come to it.
        rerun: names of blocks that run again in backward, where what comes after them is not needed.
        late_backward: names of units that no other one gathers ahead in backward.
        late_forward: the same of forward.
    """
    (root,) = (unit for unit in units if not unit.name)
    order = leaving_order(units)
    trained = next((i for i, unit in enumerate(order) if _is_trained(unit)), len(order))
    for before, unit in zip([None, *order], [*order, root], strict=True):
        comes = backward and before is not None and order.index(before) >= trained and before.name not in late_backward
        # a unit in its own list keeps torch from choosing another
        unit.handle.set_modules_to_backward_prefetch([before.handle if comes and before is not None else unit.handle])
    inner = [unit for unit in units if unit.name]
    for unit, following in zip([root, *inner], [*inner, None], strict=True):
        around = next((block for block in rerun if unit.name.startswith(f"{block}.")), "")
        comes = forward and following is not None and following.name.startswith(around)
        comes = comes and following is not None and following.name not in late_forward
        unit.handle.set_modules_to_forward_prefetch([following.handle] if comes and following is not None else [])


def _children_first(module: nn.Module, seen: set[nn.Module]) -> Iterator[nn.Module]:
    """All modules inside a module, each once, and the module itself behind them."""
    seen.add(module)
    for child in module.children():
        if child not in seen:
            yield from _children_first(child, seen)
    yield module


def _own_parameters(unit: ShardedUnit) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Parameters under every name, with the modules that have them."""
    for module in unit.modules:
        for child in module.modules():
            yield from ((child, name, p) for name, p in child._parameters.items() if p is not None)


def _is_trained(unit: ShardedUnit) -> bool:
    return any(parameter.requires_grad for module in unit.modules for parameter in module.parameters())


def _policy(unit: ShardedUnit, precision: MixedPrecision | None) -> MixedPrecisionPolicy:
    """As Lightning's strategy has it: inputs are cast for the root, and exempt modules compute in their own dtype."""
    if precision is None:
        return MixedPrecisionPolicy()
    exempt = tuple(precision._module_classes_to_ignore or ())
    if unit.name and all(isinstance(module, exempt) for module in unit.modules):
        own = next(unit.modules[0].parameters()).dtype
        return MixedPrecisionPolicy(param_dtype=own, output_dtype=precision.param_dtype, cast_forward_inputs=True)
    casts = precision.cast_forward_inputs if unit.name else precision.cast_root_forward_inputs
    return MixedPrecisionPolicy(
        param_dtype=precision.param_dtype, reduce_dtype=precision.reduce_dtype, cast_forward_inputs=casts
    )


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


def without_views(output: Any) -> Any:
    """The same with tensors that are no views, of the same memory.

    An operation in place on a view takes away the hook by which backward finds the unit.
    """
    if not torch.is_grad_enabled():
        return output
    return _no_view(output) if isinstance(output, Tensor) else tree_map_only(Tensor, _no_view, output)


class _Gathering:
    """A hook that gathers a unit of several modules where backward comes to the output of one that is not the last.

    fully_shard does that at the output of the last one, which the loss may not depend on.

    Args:
        handle: of the unit.
    """

    def __init__(self, handle: nn.Module) -> None:
        self._handle: Any = handle
        self._made_for = internals.group_of(handle)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # as torch does with its own hooks of a unit
    def __call__(self, _: nn.Module, __: Any, output: Any) -> None:
        """After forward of one of the modules."""
        for tensor in tree_leaves(output):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(self._gather)

    def __deepcopy__(self, _: object) -> Callable[..., None]:
        """For a copy of the module, which is no unit."""
        return _nothing

    def _gather(self, _: Tensor) -> None:
        # hooks outlive the units: what is sharded anew has other ones
        if isinstance(self._handle, FSDPModule) and internals.group_of(self._handle) is self._made_for:
            self._handle.unshard()  # nothing where it is there


def _nothing(*_: object) -> None:
    """In place of a hook."""


@torch.compiler.disable  # type: ignore[untyped-decorator]  # as torch does with its own hooks of a unit
def _without_views(module: nn.Module, _: Any, output: Any) -> Any:
    del module
    return without_views(output)


def _no_view(tensor: Tensor) -> Tensor:
    is_view = tensor.requires_grad and tensor._base is not None
    return _Alias.apply(tensor) if is_view else tensor  # type: ignore[no-untyped-call]


class _Alias(torch.autograd.Function):
    """The same values in the same memory, as a tensor of its own."""

    @staticmethod
    @override
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.detach()

    @staticmethod
    @override
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient
