"""Takes a model out of the FSDP unit that all of it was wrapped in."""

from __future__ import annotations

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel


def unwrap_whole(root: FullyShardedDataParallel) -> nn.Module:
    """The module that `wrap_whole` wrapped, with whole parameters of its own as before. Call it on all ranks.

    Args:
        root: the only unit; of no use afterwards.
    """
    module: nn.Module = root.module
    whole: dict[nn.Parameter, nn.Parameter] = {}
    places: list[tuple[nn.Module, str, nn.Parameter]] = []
    with FullyShardedDataParallel.summon_full_params(root, writeback=False):
        for child in module.modules():
            for name, parameter in child.named_parameters(recurse=False, remove_duplicate=False):
                if parameter not in whole:
                    value = parameter.detach().clone()
                    whole[parameter] = nn.Parameter(value, requires_grad=parameter.requires_grad)
                places.append((child, name, parameter))
    for child, name, sharded in places:
        child._parameters[name] = whole[sharded]
    return module
