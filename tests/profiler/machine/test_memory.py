import pytest
import torch

from lightning_osdp.profiler import LiveBytes, default_memory_limit_bytes
from lightning_osdp.profiler.machine import memory

MIB, GIB = 2**20, 2**30
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


@pytest.fixture
def gpu(monkeypatch):
    """A GPU of 80 GiB in words: 10 are free, and of 3 that this process has reserved 1 is in use."""

    def build(fraction=1.0):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10 * GIB, 80 * GIB))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 3 * GIB)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: GIB)
        monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: fraction)
        return torch.device("cuda", 0)

    return build


def test_cuda_gives_what_is_free_or_cached_by_this_process(gpu):
    assert default_memory_limit_bytes(gpu(), local_ranks=8) == int(12 * GIB * 0.9)


def test_a_process_has_no_more_of_a_gpu_than_it_may_take(gpu):
    assert default_memory_limit_bytes(gpu(fraction=0.1), local_ranks=8) == int((8 - 1) * GIB * 0.9)


def test_a_model_that_is_on_the_gpu_already_is_in_the_limit(gpu):
    assert default_memory_limit_bytes(gpu(), local_ranks=8, planned_bytes=GIB) == int(13 * GIB * 0.9)
    assert default_memory_limit_bytes(gpu(fraction=0.1), local_ranks=8, planned_bytes=GIB) == int(8 * GIB * 0.9)


def test_what_libraries_keep_is_what_stays_after_products_of_matrices(monkeypatch):
    told, allocated = [], iter([5 * MIB, 5 * MIB + 8519680])
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: told.append("cleared"), raising=False)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: told.append(device) or next(allocated))
    monkeypatch.setattr(memory, "_multiply", lambda device: told.append("multiplied"))
    device = torch.device("cuda", 0)
    assert memory.library_workspace_bytes(device) == 8519680
    assert told == ["cleared", device, "multiplied", device]
    assert memory.library_workspace_bytes(CPU) == 0


def test_products_of_matrices_run_forward_and_backward_and_leave_nothing():
    with LiveBytes("cpu") as live:
        memory._multiply(CPU)
    assert live.peak_bytes > 0
    assert live.current_bytes == 0
