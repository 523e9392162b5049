"""Wraps each child of a module by itself, for steps that run backward between the children's calls."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.wrap import CustomPolicy

from lightning_osdp.apply.children import blocks_in, called_children
from lightning_osdp.apply.fsdp1.wrap import wrap_whole
from lightning_osdp.apply.prepare import call_layers_in_evaluation
from lightning_osdp.errors import ConfigurationError


def wrap_separately(
    module: nn.Module, *, min_unit_bytes: int, device: torch.device, **fsdp_kwargs: Any
) -> dict[str, FullyShardedDataParallel]:
    """Makes an FSDP root of each child that has parameters, and ZDP units of the blocks inside it.

    Children are replaced in place. Of a list or dictionary of modules, which nobody calls, each entry is a child.
    Blocks are what lists and ``nn.Sequential`` hold. Call it on all ranks of the default process group.

    Args:
        module: the unwrapped model, whose forward is never part of a backward as a whole.
        min_unit_bytes: a block with fewer bytes of parameters stays in the unit around it.
        device: where parameters and buffers go.
        **fsdp_kwargs: further arguments of ``FullyShardedDataParallel``.

    Returns:
        The roots by name.

    Raises:
        ConfigurationError: a parameter is in no child that can be called, or in two of them.
    """
    found = list(called_children(module))
    _check_each_has_one(module, dict(found))
    call_layers_in_evaluation(module)
    for inner in module.modules():
        if not any(True for _ in inner.parameters()):
            inner.to(device)  # buffers that no root moves
    roots = {}
    for name, child in found:
        blocks = set(blocks_in(child, min_unit_bytes))
        parent, _, own_name = name.rpartition(".")
        roots[name] = wrap_whole(
            child,
            device=device,
            sharding_strategy=ShardingStrategy.FULL_SHARD,
            auto_wrap_policy=CustomPolicy(blocks.__contains__),
            **fsdp_kwargs,
        )
        for unit in FullyShardedDataParallel.fsdp_modules(roots[name]):
            unit.register_forward_pre_hook(_forget_frozen)
        module.get_submodule(parent).register_module(own_name, roots[name])
    return roots


def _forget_frozen(unit: nn.Module, *_: object) -> None:
    """Ends what FSDP awaits of a forward with frozen parameters, if they are trained from this one on.

    Without a backward after that forward it would still await that, and leave the gradients of this one unreduced.
    """
    assert isinstance(unit, FullyShardedDataParallel)
    flat = None if unit._handle is None else unit._handle.flat_param
    state: tuple[Any, ...] = getattr(flat, "_post_backward_hook_state", ())
    if flat is None or len(state) != 1 or not any(parameter.requires_grad for parameter in flat._params or ()):
        return
    state[0].remove()
    delattr(flat, "_post_backward_hook_state")


def _check_each_has_one(module: nn.Module, children: dict[str, nn.Module]) -> None:
    holders: dict[nn.Parameter, str] = {}
    for child_name, child in children.items():
        for parameter in child.parameters():
            other = holders.setdefault(parameter, child_name)
            if other != child_name:
                raise ConfigurationError(
                    f"Expected children that share no parameter in manual optimization, where each is sharded by"
                    f" itself, but {other!r} and {child_name!r} do. Put them into one module that is called."
                )
    for name, parameter in module.named_parameters():
        if parameter not in holders:
            raise ConfigurationError(
                f"Expected every parameter inside a child that training_step calls in manual optimization, where each"
                f" is sharded by itself, but {name!r} is in none. Put it into a module that is called."
            )
