"""Steps of optimizers on this rank's rows as plain tensors, where nothing but rows of their own counts.

Operators of DTensors find out anew in each step, for each parameter, that every rank may compute with its rows alone.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop, Rprop
from torch.utils.hooks import RemovableHandle

from lightning_osdp.apply import internals

_ELEMENTWISE = (ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, RAdam, RMSprop, Rprop)
"""Of torch's: each element of a parameter depends on that element of the gradient and of states, and on numbers."""


@contextmanager
def stepping_on_rows(optimizer: Optimizer) -> Iterator[None]:
    """Within it, steps of an optimizer compute with this rank's rows where their arithmetic is elementwise.

    Only the arithmetic sees rows: neither the closure nor hooks of the step do. An optimizer that is not exactly one of
    torch's, or has anything that is not cut as its parameter is, computes with DTensors.
    """
    if not _is_elementwise(optimizer):
        yield
        return
    rows, is_over = ExitStack(), False

    def swap() -> None:
        if not is_over:
            rows.enter_context(on_rows(optimizer))

    def begin(_: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Before the step: has its closure, or what is in its place, be followed by the arithmetic on rows."""
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None:
            swap()
            return None

        def closure_and_swap() -> Any:
            loss = closure()
            swap()
            return loss

        return args[:1], {**kwargs, "closure": closure_and_swap}

    def end(*_: object) -> None:
        nonlocal is_over
        is_over = True
        rows.close()

    handles: list[RemovableHandle] = [
        optimizer.register_step_pre_hook(begin),  # the last one, so that it has the closure that others leave
        optimizer.register_step_post_hook(end),
    ]
    internals.call_first(optimizer, handles[1])
    try:
        yield
    finally:
        end()
        for handle in handles:
            handle.remove()


@contextmanager
def on_rows(optimizer: Optimizer) -> Iterator[None]:
    """Within it, an elementwise optimizer has this rank's rows in place of DTensors; what it changes is the DTensors'.

    Its groups have rows, as plain tensors with gradients, and its state is keyed by them. Nothing is copied. Afterwards
    it has the same DTensors, groups and states as before; a new state with the shape of the rows is a DTensor. Where
    something is not cut as its parameter is, all stays as it is.
    """
    stepped = _with_gradients(optimizer) if _is_elementwise(optimizer) else None
    if not stepped:
        yield
        return
    states, kept = optimizer.state, [group["params"] for group in optimizer.param_groups]
    rows_of = {id(parameter): internals.local(parameter) for parameter, _ in stepped}  # a tensor's own hash is slow
    local_states: defaultdict[Any, dict[str, Any]] = defaultdict(dict)
    for key, fields in states.items():
        rows = rows_of.get(id(key))
        if rows is None:
            local_states[key] = fields
        else:
            local_states[rows] = {name: internals.local(value) for name, value in fields.items()}
    try:
        for parameter, gradient in stepped:
            rows_of[id(parameter)].grad = internals.local(gradient)
        for group, parameters in zip(optimizer.param_groups, kept, strict=True):
            group["params"] = [rows_of.get(id(parameter), parameter) for parameter in parameters]
        optimizer.state = local_states
        yield
    finally:
        optimizer.state = states
        for group, parameters in zip(optimizer.param_groups, kept, strict=True):
            group["params"] = parameters
        for rows in rows_of.values():
            rows.grad = None
        torch.autograd.graph.increment_version([parameter for parameter, _ in stepped])
        parameter_of = {id(rows_of[id(parameter)]): parameter for parameter, _ in stepped}
        for key, fields in local_states.items():
            of = parameter_of.get(id(key))
            if of is None:
                states[key] = fields
            else:
                _take_new(states[of], fields, of)


def _is_elementwise(optimizer: Optimizer) -> bool:
    """Whether it is exactly one of torch's that are, with the step that torch has given it."""
    kind: Any = type(optimizer)
    return kind in _ELEMENTWISE and str(kind.step.__module__).startswith("torch.optim.")


def _with_gradients(optimizer: Optimizer) -> list[tuple[DTensor, DTensor]] | None:
    """Each DTensor that has a gradient, with it; None where the step cannot be taken on the rows of all of them."""
    found: list[tuple[DTensor, DTensor]] = []
    for group in optimizer.param_groups:
        if group.get("differentiable") or any(isinstance(value, DTensor) for value in group.values()):
            return None
        for parameter in group["params"]:
            gradient = parameter.grad
            if gradient is None or not isinstance(parameter, DTensor):
                continue
            if not (internals.is_cut_alike(parameter, parameter) and internals.is_cut_alike(gradient, parameter)):
                return None
            found.append((parameter, gradient))
    of = {id(parameter): parameter for parameter, _ in found}
    for key, fields in optimizer.state.items():
        parameter = of.get(id(key))
        if parameter is not None and not all(
            internals.is_cut_alike(value, parameter)
            for value in fields.values()
            if isinstance(value, Tensor) and value.dim() > 0  # the others count steps, and the like
        ):
            return None
    return found


def _take_new(fields: dict[str, Any], local_fields: dict[str, Any], parameter: DTensor) -> None:
    """Puts new entries that a step has made into a DTensor's state; those changed in place are there already."""
    for name, value in local_fields.items():
        if name in fields and value is internals.local(fields[name]):
            continue
        is_rows = isinstance(value, Tensor) and value.dim() > 0
        fields[name] = internals.of_rows(value, parameter) if is_rows else value
