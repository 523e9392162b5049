"""Units that move activations: they are outside of ``fully_shard``, whose calls ignore their parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecision

from lightning_osdp.apply.internals import dtensors, sharding
from lightning_osdp.apply.units import Meshes, ShardedUnit, policy_of
from lightning_osdp.core.exchange import FED_KINDS
from lightning_osdp.core.plans.parts import Unit
from lightning_osdp.core.plans.plan import Plan
from lightning_osdp.operations.stationary import Ranks, WaitingOutputs, as_whole, is_stationary, make_stationary
from lightning_osdp.planner.engine import effects_of


class ExchangingUnits:
    """Units of a model that move activations, each the operators of one exchange. Call methods on all ranks.

    Args:
        root: the model, which nothing has sharded yet.
        plan: the plan that the model was checked against; None: there are no such units.
        numbers_of_ranks: see `Agreement.numbers_of_ranks`.
        before_backward: is given the number of a unit before each exchange in its backward, whether ranks have agreed
            that all come to it, and the number of the output.
        on_function: is given a number for each function between operators that feed each other, and its arguments.

    Attributes:
        parameters: the parts of parameters that this rank has.
        in_nodes: names and parts of those that each node has all of.
        outputs: has outputs until backward comes to them.
    """

    def __init__(
        self,
        root: nn.Module,
        plan: Plan | None,
        meshes: Meshes,
        *,
        precision: MixedPrecision | None,
        initialize: Callable[[nn.Module], None],
        numbers_of_ranks: Callable[..., Sequence[int]],
        before_backward: Callable[[int, bool, int], None],
        on_function: Callable[[int], None],
    ) -> None:
        self._operators: list[nn.Module] = []
        self.outputs = WaitingOutputs()
        units = exchanging(plan) if plan is not None else []
        for number, unit in enumerate(units):
            modules = [root.get_submodule(name) for name in unit.operators]
            for module in modules:
                initialize(module)
            policy = policy_of(ShardedUnit(unit.name, tuple(modules)), precision)
            ranks = Ranks(
                mesh=meshes.mesh_for(unit.treatments[0]),
                numbers_of_ranks=partial(numbers_of_ranks, number, begun=int(unit.exchange in FED_KINDS)),
                before_backward=partial(before_backward, number),
                # beyond the numbers of units, and that of the begin of backward
                numbers_at_end=partial(numbers_of_ranks, len(units) + 1 + number, begun=-1),
                on_function=on_function,
                outputs=self.outputs,
                dtype=policy.param_dtype,
                reduce_dtype=policy.reduce_dtype or policy.param_dtype,
                casts_inputs=policy.cast_forward_inputs and policy.param_dtype is not None,
            )
            make_stationary(root, unit.exchange, unit.operators, ranks)
            self._operators += modules
        meshes.warm_up_exchanges([unit.treatments[0] for unit in units])
        self.num_units = len(units)
        held: list[tuple[str, Any]] = [
            (f"{operator}.{name}", parameter)
            for unit in units
            for operator in unit.operators
            for name, parameter in root.get_submodule(operator).named_parameters()
        ]
        self.parameters: list[nn.Parameter] = [parameter for _, parameter in held]
        self.in_nodes = [(name, parameter) for name, parameter in held if parameter.device_mesh.ndim > 1]
        for parameter in self.parameters:
            dtensors.mark_shard(parameter)
        for operator in self._operators:
            for module in filter(is_stationary, operator.modules()):  # the operator itself, and slices of it
                sharding.keep_attributes(module)
                sharding.refuse_copies(module)

    def copy_replicas(self) -> None:
        """Copies parts of parameters that each node has from the first node to the others, whose values may differ."""
        for _, parameter in self.in_nodes:
            dist.broadcast(dtensors.local(parameter), group=parameter.device_mesh.get_group(0), group_src=0)

    def add_outputs(self, tensors: Sequence[Tensor]) -> None:
        """Adds outputs of another unit, to which backward has to come on all ranks where it does on one."""
        if self.num_units:
            self.outputs.add(tensors)

    def set_zero_gradients(self) -> None:
        """Gives trainable parameters gradients of zero, with the layout that backward gives them."""
        for parameter in self.parameters:
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)

    @contextmanager
    def whole(self, module: nn.Module, *, writes: bool) -> Iterator[None]:
        """Gives operators inside a module whole parameters and their own classes, within the context.

        ``writes`` copies this rank's part of them to its own at the end; not done after an error.
        """
        inside, write = set(module.modules()), dtensors.write_rows if writes else None
        with ExitStack() as stack:
            for operator in self._operators:
                if operator in inside:
                    stack.enter_context(as_whole(operator, sharding.whole_parameter, write))
            yield


def exchanging(plan: Plan) -> list[Unit]:
    """Units of a plan that move activations."""
    return [unit for unit in plan.units if effects_of(unit.treatments[0]).exchanges]
