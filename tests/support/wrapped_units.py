"""Units that ``fully_shard`` made of a module, read back from their states, and what its blocks do."""

from functools import cache

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule

from lightning_osdp.apply.activations.blocks import BlockForward
from lightning_osdp.apply.internals import access
from lightning_osdp.core.axes import named
from lightning_osdp.core.plans.parts import Unit
from tests.support.plans import bare_plan


class Nested(nn.Module):
    """Parameters at three depths, a frozen layer, buffers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.block = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.gain = nn.Parameter(torch.ones(4))
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.head(self.frozen(self.block(x)) * self.gain)


def plan(units, world_size=1, node_size=None):
    """A plan from {unit: (operators, mode)}; the root's mode is DP or HDP."""
    made = [
        Unit(name=name, operators=tuple(operators), kind="", treatments=named(mode))
        for name, (operators, mode) in units.items()
    ]
    return bare_plan(made, world_size=world_size, node_size=node_size)


NESTED = {
    "": ([""], "DP"),
    "block": (["block.0"], "ZDP"),
    "block.1": (["block.1.0", "block.1.1"], "DP"),
    "frozen": (["frozen"], "ZDP"),
    "head": (["head"], "DP"),
}
NESTED_IN_NODES = {
    name: (operators, mode)
    for (name, (operators, _)), mode in zip(NESTED.items(), ["HDP", "HSDP", "hpZ", "ZDP", "DP"], strict=True)
}
NESTED_PARAMETERS = {
    "": ["gain"],
    "block": ["block.0.weight", "block.0.bias"],
    "block.1": ["block.1.0.weight", "block.1.0.bias", "block.1.1.weight", "block.1.1.bias"],
    "frozen": ["frozen.weight", "frozen.bias"],
    "head": ["head.weight", "head.bias"],
}


def units_of(root):
    """Unit, by the first of its modules -> (names of the parameters that are gathered with it, mode)."""
    found, names = {}, {parameter: name for name, parameter in root.named_parameters()}
    for path, module in root.named_modules():
        if isinstance(module, FSDPModule) and access.state_of(module)._modules[0] is module:
            group = access.group_of(module)
            held = [] if group is None else [names[p] for p, _ in access.parameters_of(group)]
            found[path] = (held, mode_of(group))
    return found


def mode_of(group):
    """The mode that these parameters of a unit are in; a unit without any counts as DP."""
    if group is None:
        return "DP"
    is_in_nodes, after = group.mesh_info.mesh.ndim == 2, group.post_forward_mesh_info
    if after is None:
        return "HDP" if is_in_nodes else "DP"
    if is_in_nodes:
        assert after is group.mesh_info
        return "HSDP"
    return "ZDP" if after is group.mesh_info else "hpZ"


def block_forwards(root):
    """The forwards that stand in the place of blocks' own."""
    found = (vars(module).get("forward") for module in root.modules())
    return (forward for forward in found if isinstance(forward, BlockForward))


@cache
def mesh_of_nodes():
    return init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("nodes", "node"))
