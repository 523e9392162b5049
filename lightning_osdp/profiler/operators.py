"""Which modules are operators, in which order forward runs them, and which parameters they share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lightning_osdp.errors import ProfileError


@dataclass
class Operator:
    """A module that owns parameters, as found in the tree and seen in one forward."""

    name: str
    module: nn.Module
    parameters: list[nn.Parameter]
    """Parameters that count here; a tied one counts at its first operator only."""
    enclosing: tuple[str, ...]
    num_calls: int = 0
    signature: str = ""
    grad_inputs: list[bool] = field(default_factory=list)
    """For each floating-point tensor among the inputs of the first call, whether it requires a gradient."""
    is_leaf: bool = True
    """Whether no other operator runs inside its forward."""


def fingerprint(module: nn.Module) -> dict[str, str]:
    """Parameter name -> dtype, shape and marks, for every name, tied ones included.

    Example:
        >>> fingerprint(nn.Linear(3, 2, bias=False))
        {'weight': 'float32[2, 3]'}
    """
    first: dict[nn.Parameter, str] = {}
    described = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        text = f"{str(parameter.dtype).removeprefix('torch.')}{list(parameter.shape)}"
        if not parameter.requires_grad:
            text += " frozen"
        if parameter in first:
            text += f" tied to {first[parameter]}"
        first.setdefault(parameter, name)
        described[name] = text
    return described


@dataclass
class _Calls:
    """What forward did, by module name."""

    order: list[str] = field(default_factory=list)
    stacks: dict[str, list[tuple[str, ...]]] = field(default_factory=dict)
    signature: dict[str, str] = field(default_factory=dict)
    grad_inputs: dict[str, list[bool]] = field(default_factory=dict)


@contextmanager
def recorded_calls(module: nn.Module) -> Iterator[_Calls]:
    """Records every module call while it is active: order, what runs inside what, and the inputs' shapes."""
    calls, stack = _Calls(), [""]

    def enter(name: str, child: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        stack.append(name)
        if name not in calls.stacks:
            calls.order.append(name)
            calls.signature[name] = _signature(child, (args, kwargs))
            calls.grad_inputs[name] = [t.requires_grad for t in floating_tensors((args, kwargs))]
        calls.stacks.setdefault(name, []).append(tuple(reversed(stack)))

    def leave(*_: object) -> None:
        stack.pop()

    with ExitStack() as hooks:
        for name, child in module.named_modules():
            if name:

                def before(m: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
                    enter(name, m, args, kwargs)

                hooks.callback(child.register_forward_pre_hook(before, with_kwargs=True, prepend=True).remove)
                hooks.callback(child.register_forward_hook(leave, always_call=True).remove)
        yield calls


def find_operators(module: nn.Module, calls: _Calls) -> list[Operator]:
    """Operators in forward order, with the modules whose forward encloses every use of their parameters.

    Args:
        module: the whole model.
        calls: what one forward of it did.

    Raises:
        ProfileError: the model has no parameters, or one that FSDP cannot shard.
    """
    names = {child: name for name, child in module.named_modules()}
    owned = {child: list(child._parameters.values()) for child in module.modules()}
    users: dict[nn.Parameter, list[nn.Module]] = {}
    for child, parameters in owned.items():
        for parameter in parameters:
            if parameter is not None:
                users.setdefault(parameter, []).append(child)
    _check_parameters(module)
    rank = {name: index for index, name in enumerate(["", *calls.order])}
    operators, counted = [], set()
    enclosing_of = {
        child: _enclosing(names[child], calls)
        for child, parameters in owned.items()
        if any(p is not None for p in parameters)
    }
    # A module that is never called runs with the smallest enclosing one: its parameters are read there.
    in_order = sorted(enclosing_of, key=lambda child: rank[next(iter(n for n in enclosing_of[child] if n in rank))])
    for child in in_order:
        sharing = [other for p in owned[child] if p is not None for other in users[p]]
        enclosing = [n for n in enclosing_of[child] if all(n in enclosing_of[other] for other in sharing)]
        new = [p for p in owned[child] if p is not None and p not in counted]
        counted.update(new)
        name = names[child]
        operators.append(
            Operator(
                name=name,
                module=child,
                parameters=new,
                enclosing=tuple(enclosing),
                num_calls=max(1, len(calls.stacks.get(name, ()))),
                signature=calls.signature.get(name, f"{name} is never called"),
                grad_inputs=calls.grad_inputs.get(name, []),
            )
        )
    for operator in operators:
        operator.is_leaf = operator.name in calls.stacks and not any(
            operator.name in stack[1:]
            for other in operators
            if other is not operator
            for stack in calls.stacks.get(other.name, ())
        )
    return operators


def floating_tensors(tree: Any) -> list[Tensor]:
    """Floating-point tensors among the leaves."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _enclosing(name: str, calls: _Calls) -> list[str]:
    """Modules above (or equal) in the tree whose forward was running in every call; innermost first, root last."""
    parts = name.split(".") if name else []
    above = [".".join(parts[:length]) for length in range(len(parts), 0, -1)]
    stacks = calls.stacks.get(name)
    if stacks is None:
        # Never called itself: whoever reads its parameters does so inside the nearest ancestor that is called.
        nearest = next((ancestor for ancestor in above[1:] if ancestor in calls.stacks), None)
        return ["", *[]] if nearest is None else _enclosing(nearest, calls)
    return [ancestor for ancestor in above if all(ancestor in stack for stack in stacks)] + [""]


def _signature(module: nn.Module, inputs: Any) -> str:
    """Text that is equal for operators that cost the same: class, configuration, parameters, inputs."""
    shapes = [
        f"{leaf.dtype}{list(leaf.shape)}{leaf.requires_grad}" if isinstance(leaf, Tensor) else repr(type(leaf))
        for leaf in tree_leaves(inputs)
    ]
    parameters = [f"{n}:{p.dtype}{list(p.shape)}{p.requires_grad}" for n, p in module.named_parameters()]
    return f"{type(module).__qualname__}({module.extra_repr()}) {parameters} <- {shapes}"


def _check_parameters(module: nn.Module) -> None:
    parameters = dict(module.named_parameters())
    if not parameters:
        raise ProfileError(
            f"Expected {type(module).__name__} to have parameters to shard, but it has none."
            " Create its layers in __init__ or configure_model, or use another strategy."
        )
    for name, parameter in parameters.items():
        if parameter.dim() == 0:
            raise ProfileError(
                f"FSDP cannot shard a scalar parameter, but {name!r} has shape []."
                " Make it a tensor of one element, torch.nn.Parameter(value.reshape(1))."
            )
