"""Machines whose own names lead nowhere: said before gloo waits for what never comes."""

import json
import socket
from unittest import mock

import pytest
import torch.distributed as dist

from lightning_osdp.apply.ranks import hosts
from lightning_osdp.errors import ConfigurationError


def checked(monkeypatch, *, address, other, interface=None):
    """Rank 0 of two, which has this address, beside a rank that has told the other."""
    if interface is None:
        monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    else:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", interface)

    def resolve(_):
        if address is None:
            raise socket.gaierror
        return address

    monkeypatch.setattr(socket, "gethostname", lambda: "here")
    monkeypatch.setattr(socket, "gethostbyname", resolve)
    store = dist.HashStore()
    store.set("lightning_osdp/host/1", json.dumps(other))
    hosts.check_hosts(store, 0, 2)


THERE = ["there", 1, "10.0.0.2"]


@pytest.mark.parametrize(
    ("address", "other", "said"),
    [
        ("127.0.1.1", THERE, "'here' is 127.0.1.1 there"),
        (None, THERE, "'here' is 127.0.0.1 there"),
        ("10.0.0.1", ["there", 1, "127.0.0.1"], "'there' is 127.0.0.1 there"),
    ],
)
def test_names_that_are_loopback_addresses_are_refused_on_all_ranks(monkeypatch, address, other, said):
    with pytest.raises(ConfigurationError, match="Set GLOO_SOCKET_IFNAME on each machine") as refused:
        checked(monkeypatch, address=address, other=other)
    assert f"{said}, which no other machine reaches." in str(refused.value)


def test_one_machine_addresses_that_lead_to_it_and_named_interfaces_are_taken(monkeypatch):
    checked(monkeypatch, address="10.0.0.1", other=THERE)
    checked(monkeypatch, address="127.0.1.1", other=THERE, interface="eth0")
    monkeypatch.setattr(hosts.uuid, "getnode", lambda: 7)
    checked(monkeypatch, address="127.0.1.1", other=["here", 7, "127.0.1.1"])


def test_gloo_that_finds_no_way_is_told_how(one_rank):
    def refuse(**_):
        raise RuntimeError("Gloo connectFullMesh failed with: Connection refused")

    with (
        mock.patch.object(hosts, "reaches_hosts", return_value=False),
        mock.patch.object(dist, "new_group", new=refuse),
        pytest.raises(ConfigurationError, match=r"Connection refused. Set GLOO_SOCKET_IFNAME on each machine"),
    ):
        hosts.new_host_group(dist.group.WORLD)
