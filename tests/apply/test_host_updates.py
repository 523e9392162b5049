"""Copies and states on the host, with tensors on meta for those of a device."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lightning_osdp.apply.updating import updates
from lightning_osdp.apply.updating.host_updates import HostRows


def optimizer_of(*parameters, **options):
    return torch.optim.AdamW([{"params": [each]} for each in parameters], **options)


def test_states_are_loaded_into_the_memory_that_they_are_to_be_in():
    ours, other = (nn.Parameter(torch.zeros(3, device="meta")) for _ in range(2))
    optimizer, host = optimizer_of(ours, other), HostRows([ours], torch.device("meta"))
    plain = optimizer_of(*(nn.Parameter(torch.zeros(3)) for _ in range(2)))
    for group in plain.param_groups:
        group["params"][0].grad = torch.ones(3)
    plain.step()
    groups = [group["params"] for group in optimizer.param_groups]
    with host.loading(optimizer):
        optimizer.load_state_dict(plain.state_dict())
    assert [group["params"] for group in optimizer.param_groups] == groups
    assert all(group["params"][0] is each for group, each in zip(optimizer.param_groups, (ours, other), strict=True))
    assert set(map(id, optimizer.state)) == {id(ours), id(other)}
    found, expected = optimizer.state[ours]["exp_avg"], plain.state_dict()["state"][0]["exp_avg"]
    assert (found.device.type, optimizer.state[other]["exp_avg"].device.type) == ("cpu", "meta")
    assert torch.equal(found, expected)


def test_groups_end_as_they_were_where_loading_fails():
    parameter = nn.Parameter(torch.zeros(3, device="meta"))
    optimizer, host = optimizer_of(parameter), HostRows([parameter], torch.device("meta"))
    with pytest.raises(ValueError, match="number of parameter groups"), host.loading(optimizer):
        optimizer.load_state_dict({"state": {}, "param_groups": []})
    assert optimizer.param_groups[0]["params"][0] is parameter


@pytest.mark.parametrize(
    ("device", "options", "expected"),
    [
        ("cuda", {}, True),
        ("cuda", {"foreach": True}, None),
        ("cuda", {"foreach": False}, None),
        ("cuda", {"fused": False}, False),
        ("cpu", {}, None),
    ],
)
def test_updates_for_a_gpu_are_fused_where_the_user_leaves_that_to_torch(device, options, expected):
    parameter = nn.Parameter(torch.zeros(3))
    optimizer, host = optimizer_of(parameter, **options), HostRows([parameter], torch.device(device))
    before = optimizer.param_groups[0]["fused"]
    with host.fused(optimizer):
        assert optimizer.param_groups[0]["fused"] is expected
    assert optimizer.param_groups[0]["fused"] is before


def test_an_optimizer_is_tried_where_ranks_compute_and_not_where_a_shard_lies():
    mesh = SimpleNamespace(device_type="meta", size=lambda: 2)
    kept = SimpleNamespace(dim=lambda: 2, dtype=torch.float32, device=torch.device("cpu"), device_mesh=mesh)
    values, gradient = updates._small(kept)
    assert {values.device.type, gradient.device.type} == {"meta"}
    assert values.shape == gradient.shape == (5, 3)
