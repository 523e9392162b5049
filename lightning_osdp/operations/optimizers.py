"""Optimizers that people write: states of optimizers inside them, and copies with other parameters or states."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from torch import nn
from torch.optim import (
    ASGD,
    LBFGS,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
    SparseAdam,
)

from lightning_osdp.errors import ConfigurationError

T = TypeVar("T", bound=Optimizer)

_ELEMENTWISE = (ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop, Rprop)
"""Optimizers of torch that compute each element of a parameter from that element of the gradient and states."""


def is_elementwise(optimizer: Optimizer) -> bool:
    """True if an optimizer is exactly one of `_ELEMENTWISE`, with the step that torch has given it."""
    kind: Any = type(optimizer)
    return kind in _ELEMENTWISE and str(kind.step.__module__).startswith("torch.optim.")


def can_update_on_host(optimizer: Optimizer) -> bool:
    """True if an optimizer takes the same step on copies of some parameters, on the host, as on the parameters.

    Adagrad makes states on the device before its first step.
    """
    is_bound = any(group.get("differentiable") or group.get("capturable") for group in optimizer.param_groups)
    return is_elementwise(optimizer) and type(optimizer) is not Adagrad and not is_bound


def arithmetic(optimizer: Optimizer) -> Any:
    """Step of an optimizer's class without hooks, in which torch has wrapped it."""
    step: Any = type(optimizer).step
    return step.__wrapped__ if getattr(step, "hooked", False) else step


@contextmanager
def fused_on_host(optimizers: Iterable[Optimizer]) -> Iterator[None]:
    """Has groups compute in torch's fused way where they leave that to torch, within the context.

    On the host torch's own choice is a loop over parameters.
    """
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    chosen = [group for group in groups if group.get("fused", False) is None and group.get("foreach") is None]
    chosen = [group for group in chosen if all(parameter.is_floating_point() for parameter in group["params"])]
    for group in chosen:
        group["fused"] = True
    try:
        yield
    finally:
        for group in chosen:
            group["fused"] = None


def check_supported(optimizer: Optimizer) -> None:
    """Raises a `ConfigurationError` if steps of the optimizer on shards cannot be those on whole parameters."""
    if isinstance(optimizer, LBFGS):
        raise ConfigurationError(
            "Expected an optimizer that updates each parameter by itself, got LBFGS, which takes inner products over"
            " all of them and would see shards alone. Use AdamW, or DDPStrategy for a model that fits whole."
        )
    if isinstance(optimizer, SparseAdam):
        raise ConfigurationError(
            "Expected an optimizer that takes dense gradients, got SparseAdam: those of an embedding with sparse=True"
            " are dense once they are reduced over ranks and cut into rows. Use SGD or Adagrad, which take the same"
            " steps on both, or sparse=False with Adam, which moves rows on that no batch has used."
        )


def states_of(optimizer: Optimizer) -> list[Any]:
    """States by parameter of an optimizer and of the optimizers inside it, whose steps it takes."""
    inner = [value for value in vars(optimizer).values() if isinstance(value, Optimizer) and value is not optimizer]
    states = [optimizer.state, *(state for each in inner for state in states_of(each))]
    return list({id(state): state for state in states}.values())


def copied(optimizer: T, memo: dict[int, Any], **attributes: Any) -> T:
    """Copies an optimizer with all attributes, where ``copy.deepcopy`` leaves out all but groups and state.

    The copy has no hooks, which may hold anything, and no ``step`` that a schedule has put there, which is bound to the
    original. Modules are not copied. An optimizer inside, which does the steps of one that wraps it, is copied
    likewise. An optimizer that wraps another need not have called torch's constructor; ``copy.deepcopy`` would have its
    class ask for attributes that the constructor makes.

    Args:
        optimizer: the original.
        memo: replacements of objects in it, by their ids; as of ``copy.deepcopy``.
        **attributes: to be copied in place of its own.
    """
    made: T = object.__new__(type(optimizer))
    memo[id(optimizer)] = made
    own = {**vars(optimizer), **attributes}
    own.pop("step", None)
    own |= {name: OrderedDict() for name in own if name.endswith("_hooks")}
    for value in own.values():
        if isinstance(value, nn.Module):
            memo[id(value)] = value
        elif isinstance(value, Optimizer) and id(value) not in memo:
            copied(value, memo)
    vars(made).update(copy.deepcopy(own, memo))
    return made
