"""Blocks that recompute what they save for backward, or have it in host memory: their forward is replaced in place.

Nothing is wrapped, so that names of modules and parameters stay. FSDP's units are around this: a block that is a unit
is gathered once for running again and for its backward.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_osdp.apply.buffers import Buffers, Place
from lightning_osdp.apply.offload import HostMemory
from lightning_osdp.apply.reentrant import Reentrant
from lightning_osdp.core.plan_unit import Block
from lightning_osdp.errors import PlanMismatchError


def apply_activations(
    module: nn.Module, blocks: Sequence[Block], *, device: torch.device, units: Collection[str] = ()
) -> HostMemory:
    """Has blocks do with what they save for backward as the plan says; returns what they have on the host.

    Evaluation is not changed: without gradients a block runs as it is. `remove_activations` undoes it.

    Args:
        module: the model, before it is wrapped.
        blocks: of a plan.
        device: where the model computes.
        units: names of the modules that are going to be units of their own.

    Raises:
        PlanMismatchError: a block is not a module of the model, or is the root, or lies inside another.
    """
    modules = dict(module.named_modules())
    _check(blocks, modules)
    memory = HostMemory(device)
    for block in blocks:
        is_unit = block.name in units and not any(unit.startswith(f"{block.name}.") for unit in units)
        forward = BlockForward(modules[block.name], block.activations, memory, is_unit=is_unit)
        modules[block.name].forward = forward
    return memory


def remove_activations(module: nn.Module) -> None:
    """Gives blocks their own forward back."""
    for forward in block_forwards(module):
        forward.undo()


def block_forwards(module: nn.Module) -> Iterator[BlockForward]:
    """The forwards that `apply_activations` put in the place of blocks' own."""
    for child in module.modules():
        found = vars(child).get("forward")
        if isinstance(found, BlockForward):
            yield found


class BlockForward:
    """A block's forward, which keeps less for backward than the block's own.

    Args:
        block: the module; none of its hooks are part of what is run again.
        activations: one of `ACTIVATION_CHOICES`, not ``keep``.
        memory: of the model.
        is_unit: whether the block is a unit that has none inside.
    """

    def __init__(self, block: nn.Module, activations: str, memory: HostMemory, *, is_unit: bool) -> None:
        self.block, self.activations, self.memory = block, activations, memory
        self._own: Callable[..., Any] | None = vars(block).get("forward")
        self._run: Callable[..., Any] = block.forward
        self._buffers = Buffers(block)
        self._reentrant = Reentrant(block, self._buffers) if is_unit and activations == "recompute_offload" else None
        functools.update_wrapper(self, self._run, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The block's outputs."""
        if not torch.is_grad_enabled():
            return self._run(*args, **kwargs)
        with self.memory.saves_for(self.block) if "offload" in self.activations else nullcontext():
            if self.activations == "offload":
                return self._run(*args, **kwargs)
            if self._reentrant is not None and self._reentrant.takes(args, kwargs):
                return self._reentrant(args, kwargs)
            return self._non_reentrant(args, kwargs)

    def undo(self) -> None:
        """Gives the block its own forward back."""
        del self.block.forward
        if self._own is not None:
            self.block.forward = self._own

    def _non_reentrant(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        values: dict[Place, Tensor] = {}
        num_args, names = len(args), tuple(kwargs)  # what is run again must not hold the inputs themselves

        def run(*given: Any) -> Any:
            return self._run(*given[:num_args], **dict(zip(names, given[num_args:], strict=True)))

        # Tensors are saved as inputs, and so go to the host, only if they are given by position.
        outputs = checkpoint(
            run,
            *args,
            *kwargs.values(),
            use_reentrant=False,
            context_fn=lambda: (self._buffers.updated(values), self._again(values)),
        )
        if self._reentrant is not None:
            self._reentrant.learn_from(outputs)
        return outputs

    @contextmanager
    def _again(self, values: dict[Place, Tensor]) -> Iterator[None]:
        if self._reentrant is not None:
            self._reentrant.end_learning()
        with self._buffers.as_they_were(values):
            yield


def _check(blocks: Sequence[Block], modules: Mapping[str, nn.Module]) -> None:
    names = {block.name for block in blocks}
    for block in blocks:
        name = block.name
        around = next((other for other in names if name.startswith(f"{other}.")), None)
        wrong = (
            "the root"
            if not name
            else "not there"
            if name not in modules
            else f"inside block {around!r}"
            if around is not None
            else None
        )
        if wrong is not None:
            raise PlanMismatchError(
                f"Expected each block of the plan to be a module of the model, not the root and in no other block, but"
                f" {name!r} is {wrong}. Plan anew by leaving out `plan=`."
            )
