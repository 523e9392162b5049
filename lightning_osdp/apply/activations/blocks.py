"""Blocks that recompute what they save for backward, or have it in host memory: their forward is replaced in place.

Nothing is wrapped, so that names of modules and parameters stay. Units are around this: a block that is a unit
is gathered once for running again and for its backward.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_osdp.apply.activations.buffers import Buffers, Place
from lightning_osdp.apply.activations.offload import HostMemory
from lightning_osdp.apply.activations.reentrant import Reentrant
from lightning_osdp.core.plans.plan import Block
from lightning_osdp.errors import PlanMismatchError


class BlockForwards:
    """The forwards of a model's blocks, of which each can do something else from one step to the next.

    Evaluation is not changed: without gradients a block runs as it is. A forward that was put in the place of a
    block's own stays there, also while the block keeps what it saves: somebody may have put another one around it.

    ``memory`` is what blocks have on the host.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._module, self.memory = module, HostMemory(device)
        self._of: dict[nn.Module, BlockForward] = {}

    def choose(self, blocks: Sequence[Block], *, units: Collection[str]) -> None:
        """Has these blocks do with what they save as the plan says, and all others keep it.

        ``units`` are the names of the modules that are units of their own.

        Raises:
            PlanMismatchError: a block is not a module of the model, or is the root, or lies inside another.
        """
        check_blocks(self._module, blocks)
        chosen = {self._module.get_submodule(block.name): block for block in blocks}
        for own, block in chosen.items():
            if own not in self._of:
                is_unit = block.name in units and not any(unit.startswith(f"{block.name}.") for unit in units)
                self._of[own] = own.forward = BlockForward(own, self.memory, is_unit=is_unit)
        for own, forward in self._of.items():
            forward.choose(chosen[own].activations if own in chosen else "keep")


class BlockForward:
    """A block's forward, which can keep less for backward than the block's own.

    None of the block's hooks are part of what is run again. ``is_unit`` is whether it is a unit that has none inside.
    """

    def __init__(self, block: nn.Module, memory: HostMemory, *, is_unit: bool) -> None:
        self.block, self.memory, self.activations = block, memory, "keep"
        self._run: Callable[..., Any] = block.forward
        self._buffers = Buffers(block)
        self._is_unit = is_unit
        self._reentrant: Reentrant | None = None
        functools.update_wrapper(self, self._run, updated=())

    def choose(self, activations: str) -> None:
        """Has the next forward do so with what the block saves."""
        if activations != self.activations:
            takes_reentrant = self._is_unit and activations == "recompute_offload"
            self._reentrant = Reentrant(self.block, self._run, self._buffers) if takes_reentrant else None
            self.activations = activations

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The block's outputs."""
        if self.activations == "keep" or not torch.is_grad_enabled():
            return self._run(*args, **kwargs)
        return self._saving_less(args, kwargs)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # a compiled block would compile what drops and restores
    def _saving_less(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with self.memory.saves_for(self.block) if "offload" in self.activations else nullcontext():
            if self.activations == "offload":
                return self._run(*args, **kwargs)
            if self._reentrant is not None and self._reentrant.takes(args, kwargs):
                return self._reentrant(args, kwargs)
            return self._non_reentrant(args, kwargs)

    def _non_reentrant(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        values: dict[Place, Tensor] = {}
        reentrant = self._reentrant
        num_args, names = len(args), tuple(kwargs)  # what is run again must not hold the inputs themselves

        def run(*given: Any) -> Any:
            return self._run(*given[:num_args], **dict(zip(names, given[num_args:], strict=True)))

        # Tensors are saved as inputs, and so go to the host, only if they are given by position.
        outputs = checkpoint(
            run,
            *args,
            *kwargs.values(),
            use_reentrant=False,
            context_fn=lambda: (self._buffers.updated(values), self._again(values, reentrant)),
        )
        if reentrant is not None:
            reentrant.learn_from(outputs)
        return outputs

    @contextmanager
    def _again(self, values: dict[Place, Tensor], reentrant: Reentrant | None) -> Iterator[None]:
        if reentrant is not None:
            reentrant.end_learning()
        with self._buffers.as_they_were(values):
            yield


def with_recomputed(blocks: Sequence[Block], names: Collection[str]) -> tuple[Block, ...]:
    """A plan's blocks, with these modules recomputing, too, where nothing is said of them or of what is around them."""
    planned = [block.name for block in blocks]
    more = [name for name in names if name not in planned and not is_inside(name, planned)]
    kept = [block for block in blocks if not is_inside(block.name, more)]
    return (*kept, *(Block(name=name, activations="recompute") for name in more))


def is_inside(name: str, names: Collection[str]) -> bool:
    """Whether a module is inside one of others."""
    return any(name.startswith(f"{other}.") for other in names)


def check_blocks(module: nn.Module, blocks: Sequence[Block]) -> None:
    """Raises `PlanMismatchError` unless all blocks are modules of a model, none the root and none inside another."""
    modules = dict(module.named_modules())
    names = [block.name for block in blocks]
    for name in names:
        around = next((other for other in names if name.startswith(f"{other}.")), None)
        if not name:
            wrong = "the root"
        elif name not in modules:
            wrong = "not there"
        elif around is not None:
            wrong = f"inside block {around!r}"
        else:
            continue
        raise PlanMismatchError(
            f"Expected each block of the plan to be a module of the model, not the root and in no other block, but"
            f" {name!r} is {wrong}. Plan anew by leaving out `plan=`."
        )
