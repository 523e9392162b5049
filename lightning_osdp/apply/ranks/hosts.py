"""Groups of all ranks by way of their hosts, which need no device."""

from __future__ import annotations

import json
import os
import socket
import uuid
from ipaddress import ip_address

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from lightning_osdp.errors import ConfigurationError

_INTERFACE = "GLOO_SOCKET_IFNAME"
_REMEDY = f"Set {_INTERFACE} on each machine to the name of a network interface by which it reaches the others."


def new_host_group(world: dist.ProcessGroup) -> dist.ProcessGroup:
    """Makes another group of all ranks by way of their hosts, with the timeout of this one.

    Raises:
        ConfigurationError: ranks cannot reach each other by gloo.
    """
    backends = {world._get_backend(device) for device in world._device_types}
    timeouts = [each.options._timeout for each in backends if each.name() in {"gloo", "nccl"}]
    timeout = max(timeouts, default=None)
    group: dist.ProcessGroup
    if reaches_hosts(world):
        group = dist.new_group(timeout=timeout)
        return group
    check_hosts(dist.distributed_c10d._get_default_store(), world.rank(), world.size())
    try:
        group = dist.new_group(backend="gloo", timeout=timeout)
    except RuntimeError as error:
        raise ConfigurationError(
            "Expected ranks to reach each other by gloo, for what they tell each other beside training goes by way of"
            f" their hosts, but it failed: {error}. {_REMEDY}"
        ) from error
    return group


def reaches_hosts(group: dist.ProcessGroup) -> bool:
    """True if collectives of a group take tensors in memory of the hosts, as NCCL's do not.

    A group without backends, as test-beds have, is taken to do whatever it is asked.
    """
    types = {device.type for device in group._device_types}
    return not types or "cpu" in types


def check_hosts(store: Store, rank: int, world_size: int) -> None:
    """Checks that host names lead from each machine to the others; call it on all ranks, which all raise or none.

    Gloo listens at the address of the machine's name. If that is a loopback address, the other machines would connect
    to themselves until the timeout of the process group.

    Raises:
        ConfigurationError: the name of a machine is that of a loopback address, and there are other machines.
    """
    name, address = socket.gethostname(), ""
    if _INTERFACE not in os.environ:
        try:
            address = socket.gethostbyname(name)
        except OSError:  # gloo then listens at a loopback address
            address = "127.0.0.1"
    keys = [f"lightning_osdp/host/{each}" for each in range(world_size)]
    store.set(keys[rank], json.dumps([name, uuid.getnode(), address]))
    told = [json.loads(store.get(key)) for key in keys]
    alone = [each for each in told if each[2] and ip_address(each[2]).is_loopback]
    if alone and len({(name, node) for name, node, _ in told}) > 1:
        raise ConfigurationError(
            "Expected names of machines to lead to them, for what ranks tell each other beside training goes by gloo,"
            f" but {alone[0][0]!r} is {alone[0][2]} there, which no other machine reaches. {_REMEDY}"
        )
