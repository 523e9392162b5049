"""Takes a model out of what FSDP has made of it: out of gathered copies, or out of the unit around all of it."""

from __future__ import annotations

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.fsdp._runtime_utils import _reshard

from lightning_osdp.apply.activations import remove_activations


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
    remove_activations(module)
    return module


def free_gathered(root: nn.Module) -> None:
    """Leaves this rank's shards alone; call it before they are changed, between steps.

    Evaluation leaves gathered copies of the root and of DP units, too, which FSDP would compute with in the next step.
    """
    for unit in FullyShardedDataParallel.fsdp_modules(root):
        handle = unit._handle
        has_run = handle is not None and hasattr(handle.flat_param, "_local_shard")  # set by the root's first forward
        if handle is not None and handle.uses_sharded_strategy and has_run:
            _reshard(unit, handle, free_unsharded_flat_param=True)
