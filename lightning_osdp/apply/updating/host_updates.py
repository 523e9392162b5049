"""Rows of shards in memory of the host, where an optimizer keeps what it has of them, and updates them; and shards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_osdp.apply.internals import dtensors, host_shards
from lightning_osdp.errors import ConfigurationError
from lightning_osdp.operations.optimizers import can_update_on_host, fused_on_host, states_of
from lightning_osdp.planner.engine.layout import pinned_bytes


class Stepped(NamedTuple):
    """A parameter, and plain tensors with which an optimizer computes in its place."""

    parameter: DTensor
    rows: Tensor
    gradient: Tensor


class HostRows:
    """Copies, on the host, of this rank's rows of some parameters and of their gradients.

    Copies are made anew in each step, for anybody may have written to the parameters since. On a GPU they are in pinned
    memory. On CPU, memory of the host is that of the device: rows are copied all the same, and callers see to it that
    nobody counts them as the device's. [Run on one GPU by `benchmarks/gpu_check.py`.]

    Args:
        parameters: shards whose states are on the host.
        device: of the shards.
        kept: parameters, as ``fully_shard`` has them, whose shards are on the host themselves.

    Attributes:
        spare: memory for copies of states, by id of parameters and by name.
    """

    def __init__(self, parameters: Iterable[Tensor], device: torch.device, kept: Iterable[Any] = ()) -> None:
        self._parameters = {id(parameter): parameter for parameter in parameters}
        self._kept = {id(each.sharded_param): each for each in kept}
        self._device = device
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}
        self.spare: dict[int, dict[str, Tensor]] = {}

    def __len__(self) -> int:
        """Number of parameters that the host updates."""
        return len(self._parameters)

    def holds(self, parameter: object) -> bool:
        """True if the host updates a parameter."""
        return id(parameter) in self._parameters

    def keeps(self, parameter: object) -> bool:
        """True if a parameter is a shard that is on the host itself."""
        return id(parameter) in self._kept

    def held_in(self, optimizer: Optimizer) -> dict[int, Tensor]:
        """Parameters of an optimizer that the host updates, by id, in the order of its groups."""
        if not self._parameters:
            return {}
        return {id(each): each for group in optimizer.param_groups for each in group["params"] if self.holds(each)}

    def check(self, optimizer: Optimizer) -> None:
        """Raises a `ConfigurationError` if the host cannot take the steps of an optimizer that the plan has it take."""
        if self.held_in(optimizer) and not can_update_on_host(optimizer):
            raise ConfigurationError(
                "Expected an optimizer of torch.optim that updates each element by itself, without capturable=True or"
                " differentiable=True, and not Adagrad, for a plan with states on the host, got"
                f" {type(optimizer).__name__}. Use such an optimizer as AdamW, or plan without 'host' in"
                " SearchSpace(states=...)."
            )

    def take(self, pairs: Sequence[tuple[DTensor, DTensor]]) -> list[Stepped]:
        """Copies rows of parameters, and of gradients, to the host where they are not; returns when all are there."""
        away = [pair for pair in pairs if not self.keeps(pair[0])]
        stepped = self.places(away)
        self.fill(stepped, away)
        there = (pair for pair in pairs if self.keeps(pair[0]))
        return [*stepped, *(Stepped(each, dtensors.local(each), dtensors.local(grad)) for each, grad in there)]

    def has_places(self, parameters: Iterable[Tensor]) -> bool:
        """True if there is memory for copies of rows of these parameters, and of their gradients."""
        return all(id(parameter) in self._copies for parameter in parameters)

    def places(self, pairs: Sequence[tuple[DTensor, DTensor]]) -> list[Stepped]:
        """Returns memory for copies of rows of parameters, and of gradients, which is made where it is not there."""
        for parameter, gradient in pairs:
            if id(parameter) not in self._copies:
                rows, gradient_rows = (
                    torch.empty_like(dtensors.local(each), device="cpu", pin_memory=self._device.type == "cuda")
                    for each in (parameter, gradient)
                )
                self._copies[id(parameter)] = rows, gradient_rows
        return [Stepped(parameter, *self._copies[id(parameter)]) for parameter, _ in pairs]

    def fill(self, stepped: Sequence[Stepped], pairs: Sequence[tuple[DTensor, DTensor]]) -> None:
        """Copies rows of parameters, and of their gradients, to these places; returns when all are there."""
        for (_, *copies), of_device in zip(stepped, pairs, strict=True):
            for copy, of in zip(copies, of_device, strict=True):
                copy.copy_(dtensors.local(of), non_blocking=True)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def give_back(self, stepped: Iterable[Stepped]) -> None:
        """Copies rows back to the device, where all that is computed later finds them."""
        for each in stepped:
            if each.rows is not dtensors.local(each.parameter):
                dtensors.local(each.parameter).copy_(each.rows, non_blocking=True)

    def bytes_beside(self, parameters: Iterable[DTensor]) -> int:
        """Bytes of copies of shards that are on the host, and of their gradients: those so far, with these."""
        keys = {id(each) for each in parameters} | self._copies.keys()
        sizes = (dtensors.local(self._parameters[key]).nbytes for key in keys & self._kept.keys())
        return 2 * sum(map(pinned_bytes, sizes) if self._device.type == "cuda" else sizes)

    def fused(self, optimizer: Optimizer) -> AbstractContextManager[None]:
        """Has groups compute in torch's fused way within the context, where torch would choose it on a GPU."""
        return nullcontext() if self._device.type == "cpu" else fused_on_host([optimizer])

    @contextmanager
    def loading(self, optimizer: Optimizer) -> Iterator[None]:
        """Has ``load_state_dict`` of an optimizer leave states on the host where they are to be, within the context.

        The optimizer would move each state to the device of its parameter.
        """
        kept = [group["params"] for group in optimizer.param_groups]
        stand_ins = {key: torch.empty(0, dtype=each.dtype) for key, each in self.held_in(optimizer).items()}
        if not stand_ins:
            yield
            return
        for group, parameters in zip(optimizer.param_groups, kept, strict=True):
            group["params"] = [stand_ins.get(id(each), each) for each in parameters]
        try:
            yield
        finally:
            for group, parameters in zip(optimizer.param_groups, kept, strict=True):
                group["params"] = parameters
            for key, stand_in in stand_ins.items():  # in one order on all ranks, which gather states in it
                if stand_in in optimizer.state:
                    optimizer.state[self._parameters[key]] = optimizer.state.pop(stand_in)

    def tensors(self, optimizers: Iterable[Optimizer]) -> Iterator[object]:
        """Yields what is in memory of the host: copies, shards, and states of these optimizers."""
        for each in self._kept.values():
            yield from host_shards.tensors_of(each)
        yield from self._copies.values()
        yield from self.spare.values()
        for optimizer in optimizers:
            for states in states_of(optimizer):
                yield from (fields for parameter, fields in states.items() if self.holds(parameter))


NOTHING_HELD = HostRows((), torch.device("cpu"))
"""Rows of no parameters."""
