"""Parameter groups of optimizers: those that a user's code makes of the sharded model beside those of the whole one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lightning_osdp.errors import ConfigurationError

_MOVED = {"lr", "initial_lr", "max_lr", "min_lr", "momentum", "base_momentum", "max_momentum", "betas"}
"""Options that schedules move; which of them a group has, its parameters tell."""
_LEFT_OUT = {"params", "param_names", *_MOVED}
_COMPARED = (bool, int, float, str, tuple, type(None))


@dataclass(frozen=True)
class Group:
    """A parameter group: names of its parameters in the user's own module, and its options."""

    optimizer: str
    names: frozenset[str]
    options: Mapping[str, Any]


def groups_of(
    optimizers: Iterable[Optimizer], names: Callable[[Optimizer], Sequence[Sequence[str]]]
) -> tuple[Group, ...]:
    """Groups of all optimizers, in order; `names` gives those of the parameters in each group of one."""
    found = []
    for optimizer in optimizers:
        for group, own in zip(optimizer.param_groups, names(optimizer), strict=True):
            options = {k: v for k, v in group.items() if k not in _LEFT_OUT and isinstance(v, _COMPARED)}
            found.append(Group(type(optimizer).__name__, frozenset(own), options))
    return tuple(found)


def names_in(module: nn.Module, optimizer: Optimizer) -> list[list[str]]:
    """Names of the parameters in each group of an optimizer of a module that is not sharded; others have none."""
    names = {parameter: name for name, parameter in module.named_parameters()}
    return [[names[p] for p in group["params"] if p in names] for group in optimizer.param_groups]


def check_same_groups(whole: Sequence[Group], sharded: Sequence[Group]) -> None:
    """Raises a ConfigurationError unless the user's code made the same of the whole and of the sharded model."""
    for index in range(max(len(whole), len(sharded))):
        expected, found = (groups[index] if index < len(groups) else None for groups in (whole, sharded))
        if expected != found:
            raise ConfigurationError(
                "Expected configure_optimizers to make the same parameter groups of the sharded model as of the whole"
                f" one, but group {index} {_difference(expected, found)}. Tell parameters apart by what sharding leaves"
                " as it is: their names, p.ndim, attributes that you set on them, and isinstance(module, nn.Linear)"
                " rather than type(module)."
            )


def _difference(whole: Group | None, sharded: Group | None) -> str:
    if whole is None or sharded is None:
        there, group = ("sharded", sharded) if whole is None else ("whole", whole)
        assert group is not None
        return f"is of the {there} one alone, with {_listed(group.names)}"
    if whole.optimizer != sharded.optimizer:
        return f"is {whole.optimizer}'s of the whole one and {sharded.optimizer}'s of the sharded one"
    if whole.names != sharded.names:
        lost, new = whole.names - sharded.names, sharded.names - whole.names
        told = [f"{_listed(lost)} of the whole one only"] * bool(lost)
        return "has " + " and ".join([*told, *[f"{_listed(new)} of the sharded one only"] * bool(new)])
    both = {name: (whole.options.get(name), sharded.options.get(name)) for name in {**whole.options, **sharded.options}}
    name, (own, other) = next((name, values) for name, values in both.items() if values[0] != values[1])
    return f"has {name}={own!r} of the whole one and {other!r} of the sharded one"


def _listed(names: Iterable[str]) -> str:
    found = sorted(names)
    return ", ".join(map(repr, found[:3])) + f" and {len(found) - 3} more" * (len(found) > 3)
