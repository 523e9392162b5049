"""Machines from texts and files, and the clusters that they are."""

import re

import pytest

from lightning_osdp.core.cluster import CUDA_HEADROOM
from lightning_osdp.errors import ConfigurationError
from lightning_osdp.machines import Machine, read_catalog
from lightning_osdp.planner.engine import in_flight_bytes

OWN = """
[devices.mine]
title = "Mine"
memory_mib = 11536
memory_gb_per_s = 1000.0
tflops = { float32 = 10.0, bfloat16 = 100.0 }
compute_reached = 0.5
memory_reached = 0.25
peers = "cable"
host = "pcie4"
source = "the test"

[links.cable]
gb_per_s = 10.0
reached = 0.5
latency_us = 20.0
source = "the test"
"""


@pytest.fixture
def own(tmp_path):
    path = tmp_path / "own.toml"
    path.write_text(OWN)
    return path


@pytest.mark.parametrize(
    ("text", "nodes", "ranks", "gbit"),
    [
        ("h100-sxm", 1, 1, None),
        ("8 h100-sxm", 1, 8, None),
        (" 1x2 l4 ", 1, 2, None),
        ("8 h100-sxm, 400gbit", 1, 8, None),  # there is nobody to reach
        ("4x8 h100-sxm, 400gbit", 4, 8, 400.0),
        ("16 x 8 a100-80, 4 x 200 Gbit/s", 16, 8, 800.0),
    ],
)
def test_texts_are_nodes_of_devices(text, nodes, ranks, gbit):
    machine = Machine.parse(text)
    assert (machine.nodes, machine.ranks_per_node) == (nodes, ranks)
    assert (machine.network and machine.network.gb_per_s * 8) == gbit
    assert machine.world_size == machine.cluster.world_size == nodes * ranks


def test_hosts_agree_in_a_ring_of_their_own():
    assert Machine.parse("8 h100-sxm").cluster.agreement_s(40) == pytest.approx(7 * 20e-6)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("4x8 h100-sxm", "4x8 h100-sxm, 400gbit"),
        ("8 h100-sxn", "h100-sxm"),
        ("8 h100-sxm, 400", "400gbit"),
        ("0 h100-sxm", "at least one"),
        ("2x8 h100-sxm, 0gbit", "0 Gbit/s"),
        ("", "8 h100-sxm"),
        ("8 nowhere.toml", "nowhere.toml"),
    ],
)
def test_other_texts_are_refused_with_what_is_nearest(text, told):
    with pytest.raises(ConfigurationError, match=re.escape(told)):
        Machine.parse(text)


def test_every_device_has_its_links_rates_and_source():
    catalog = read_catalog()
    assert len(catalog.devices) >= 10
    for name, device in catalog.devices.items():
        machine = Machine.parse(f"2x4 {name}, 100gbit")
        assert machine.memory_bytes < device.memory_mib * 2**20
        assert machine.rates.flops_per_s["float32"] < device.tflops["float32"] * 1e12
        assert device.source
        assert catalog.link(device.host).source
        assert catalog.link(device.peers).source


def test_a_users_device_is_what_its_file_says(own):
    machine = Machine.parse(f"4 {own}")
    assert machine.rates.flops_per_s == {"float32": 5e12, "bfloat16": 5e13}
    assert machine.rates.bytes_per_s == 2.5e11
    assert machine.memory_bytes == int(10_000 * 2**20 * (1 - CUDA_HEADROOM))
    cluster = machine.cluster
    assert cluster.all_gather.latency_s == pytest.approx(20e-6)
    assert cluster.all_gather.seconds_per_byte == pytest.approx(1 / 5e9)
    # read and written once each
    assert cluster.unit_overhead["reduce"].seconds_per_byte == pytest.approx(2 / 2.5e11)
    assert (cluster.backend, cluster.overlaps, cluster.reduce_scatter_copies) == ("nccl", True, False)


def test_what_blocks_copy_to_the_host_is_on_the_device_besides_as_where_a_gpu_was_measured(own):
    cluster = Machine.parse(f"2 {own}").cluster
    assert in_flight_bytes(cluster, [100.0, 300.0, 200.0]) == 500.0


def test_a_ring_over_nodes_has_the_slowest_links_rate_and_the_mean_latency(own):
    network = read_catalog().link("network")
    slow, fast = (Machine.parse(f"3x4 {own}, {gbit}gbit").cluster.all_gather for gbit in (8, 800))
    assert slow.seconds_per_byte == pytest.approx(1 / (8e9 / 8 * network.reached))
    assert fast.seconds_per_byte == pytest.approx(1 / 5e9)
    assert slow.latency_s == pytest.approx((3 * 20e-6 + network.latency_us * 1e-6) / 4)


def test_links_of_nodes_are_those_of_peers_and_a_share_of_the_ports(own):
    assert Machine.parse(f"4 {own}").cluster.within_node is None
    cluster = Machine.parse(f"3x4 {own}, 8gbit").cluster
    assert (cluster.node_size, cluster.has_nodes) == (4, True)
    assert cluster.within_node.all_gather.seconds_per_byte == pytest.approx(1 / 5e9)
    network = read_catalog().link("network")
    assert cluster.between_nodes.all_gather.seconds_per_byte == pytest.approx(4 / (8e9 / 8 * network.reached))
    assert cluster.between_nodes.all_reduce.seconds_per_byte == pytest.approx(8 / (8e9 / 8 * network.reached))


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("memory_mib = 11536", "", "memory_mib"),
        ("memory_mib = 11536", 'memory_mib = "much"', "memory_mib"),
        ("memory_mib = 11536", "memory_mib = -1", "memory_mib"),
        ("compute_reached = 0.5", "compute_reached = 1.5", "compute_reached"),
        ("bfloat16 = 100.0", "bfloat16 = 0", "bfloat16"),
        ("gb_per_s = 10.0", "gb_per_s = 10.0\nwidth = 3", "width"),
        ("[links.cable]", "[links.cable", "TOML|tables"),
        ("[devices.mine]", "[devices.mine]\n[devices.other]", "other|mine"),
    ],
)
def test_a_file_that_is_no_catalog_is_refused_with_its_place(own, old, new, told):
    own.write_text(OWN.replace(old, new, 1))
    with pytest.raises(ConfigurationError, match=told):
        Machine.parse(f"4 {own}")


def test_a_file_has_one_device_and_links_that_there_are(own):
    own.write_text(OWN.replace('peers = "cable"', 'peers = "cabel"'))
    with pytest.raises(ConfigurationError, match=r"cabel.*cable"):
        Machine.parse(f"4 {own}")
    own.write_text("")
    with pytest.raises(ConfigurationError, match="one device"):
        Machine.parse(f"4 {own}")
    own.write_text(OWN + OWN.partition("[links")[0].replace("[devices.mine]", "[devices.other]"))
    with pytest.raises(ConfigurationError, match="mine, other"):
        Machine.parse(f"4 {own}")
