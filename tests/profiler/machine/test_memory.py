import pytest
import torch

from lightning_osdp.profiler import default_memory_limit_bytes
from lightning_osdp.profiler.machine import memory

GIB = 2**30
CPU = torch.device("cpu")


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine with 16 GiB available and no control groups; returns a function that writes files."""
    for name in ("_MEMINFO", "_OWN_CGROUPS", "_CGROUPS"):
        monkeypatch.setattr(memory, name, tmp_path / name.strip("_").lower())

    def write(path, text):
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(str(text))

    write("meminfo", "MemTotal:  33554432 kB\nMemFree:  1 kB\nMemAvailable:   16777216 kB\nBuffers:  2 kB\n")
    return write


def test_ranks_share_what_is_available(machine):
    assert memory.available_host_bytes() == 16 * GIB
    assert default_memory_limit_bytes(CPU, local_ranks=1) == 16 * GIB
    assert default_memory_limit_bytes(CPU, local_ranks=4) == 4 * GIB


def test_a_control_group_limits_it(machine):
    machine("cgroups/memory.max", f"{4 * GIB}\n")
    machine("cgroups/memory.current", f"{GIB}\n")
    assert memory.available_host_bytes() == 3 * GIB


def test_file_cache_of_a_control_group_can_be_dropped(machine):
    machine("cgroups/memory.max", 4 * GIB)
    machine("cgroups/memory.current", 3 * GIB)
    machine("cgroups/memory.stat", f"anon 5\ninactive_file {GIB}\nactive_file 7\n")
    assert memory.available_host_bytes() == 2 * GIB


def test_a_control_group_without_limit_changes_nothing(machine):
    machine("cgroups/memory.max", "max\n")
    machine("cgroups/memory.current", GIB)
    assert memory.available_host_bytes() == 16 * GIB


def test_the_first_version_of_control_groups_limits_it_too(machine):
    machine("own_cgroups", "5:cpu,memory:/batch/job_1\n1:name=systemd:/user\n")
    machine("cgroups/memory/memory.limit_in_bytes", 2**63 - 4096)
    machine("cgroups/memory/memory.usage_in_bytes", GIB)
    machine("cgroups/memory/batch/job_1/memory.limit_in_bytes", 6 * GIB)
    machine("cgroups/memory/batch/job_1/memory.usage_in_bytes", 2 * GIB)
    machine("cgroups/memory/batch/job_1/memory.stat", f"inactive_file 1\ntotal_inactive_file {GIB}\n")
    assert memory.available_host_bytes() == 5 * GIB


def test_the_tightest_group_above_the_process_decides(machine):
    machine("own_cgroups", "0::/slurm/job_1/step_0\n")
    machine("cgroups/slurm/job_1/step_0/memory.max", "max")
    machine("cgroups/slurm/job_1/step_0/memory.current", 0)
    machine("cgroups/slurm/job_1/memory.max", 2 * GIB)
    machine("cgroups/slurm/job_1/memory.current", GIB)
    machine("cgroups/other/memory.max", 1)
    machine("cgroups/other/memory.current", 0)
    assert memory.available_host_bytes() == GIB


def test_a_group_over_its_limit_leaves_nothing(machine):
    machine("cgroups/memory.max", GIB)
    machine("cgroups/memory.current", 2 * GIB)
    assert default_memory_limit_bytes(CPU, local_ranks=2) == 0


def test_elsewhere_what_is_installed_counts(machine, monkeypatch):
    machine("meminfo", "")
    monkeypatch.setattr(memory.os, "sysconf", {"SC_PHYS_PAGES": 1000, "SC_PAGE_SIZE": 4096}.__getitem__)
    assert memory.available_host_bytes() == 4096 * 1000


def test_this_machine_has_memory():
    assert 0 < default_memory_limit_bytes(CPU, local_ranks=1) < 2**50


def test_cuda_gives_what_is_free_or_cached_by_this_process(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 3 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: GIB)
    assert default_memory_limit_bytes(torch.device("cuda", 0), local_ranks=8) == int(12 * GIB * 0.9)
