"""fairscale's form of running a block again: its first forward makes no graph and saves nothing but its inputs.

It is *reentrant*: backward of the block is a backward of its own, inside the model's. That is sound only for a block
that is one unit, which is called once, outside of autocast (fairscale restores CUDA's, and that as float16), with
tensors that need gradients among its arguments themselves, and with outputs that are tensors and not objects that have
some. Everything else is torch's non-reentrant form, which runs the first steps, too: what they show is learned here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from lightning_osdp.apply.activations.buffers import Buffers, Place

_PLAIN = (Tensor, bool, int, float, str, type(None))
"""Outputs that can be handed on, in tuples, lists and dicts."""


class Reentrant:
    """The forward of a block that is one unit, in fairscale's form, where that is sound."""

    def __init__(self, block: nn.Module, run: Callable[..., Any], buffers: Buffers) -> None:
        from fairscale.nn.checkpoint import checkpoint_wrapper  # only such blocks need fairscale

        self._body = _Body(block, run, buffers)
        # Its own offload_to_cpu copies to memory that is not pinned, for which the host waits; `HostMemory` does it.
        self._wrapped = checkpoint_wrapper(self._body, offload_to_cpu=False)
        self._num_calls = 0
        self._is_plain = True
        self._is_learning = True

    def learn_from(self, outputs: Any) -> None:
        """Takes note of a call that was not this one."""
        if self._is_learning:
            self._num_calls += 1
            self._is_plain &= all(isinstance(leaf, _PLAIN) for leaf in tree_leaves(outputs))

    def end_learning(self) -> None:
        """Backward has come to the block, so forward does not call it again."""
        self._is_learning = False

    def takes(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether this form is sound for a call with these arguments."""
        if self._is_learning or self._num_calls > 1 or not self._is_plain:
            return False
        given = [*args, *kwargs.values()]
        needing = [each for each in tree_leaves(given) if isinstance(each, Tensor) and each.requires_grad]
        own = {id(each) for each in given}
        in_autocast = any(torch.is_autocast_enabled(kind) for kind in {"cpu", *(each.device.type for each in needing)})
        return bool(needing) and not in_autocast and all(id(each) in own for each in needing)

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The block's outputs."""
        values: dict[Place, Tensor] = {}
        leaves = self._wrapped(values, *args, **kwargs)
        return tree_unflatten(list(leaves), self._body.outputs)


class _Body(nn.Module):
    """What fairscale runs: the block's forward with its outputs flat, for fairscale takes tuples only."""

    outputs: TreeSpec

    def __init__(self, block: nn.Module, run: Callable[..., Any], buffers: Buffers) -> None:
        super().__init__()
        # Not as a child: fairscale puts hooks on batch normalisation that it finds.
        self._block = (block, run)
        self._buffers_of_block = buffers

    def forward(self, values: dict[Place, Tensor], *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """The leaves of what the block returns."""
        from fairscale.nn.checkpoint import is_recomputing

        buffers = self._buffers_of_block
        with buffers.as_they_were(values) if is_recomputing() else buffers.updated(values):
            leaves, self.outputs = tree_flatten(self._block[1](*args, **kwargs))
        return tuple(leaves)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Those of the block: where any needs a gradient, so do the outputs."""
        return self._block[0].parameters(recurse)
