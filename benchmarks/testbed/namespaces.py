"""Hosts that do not exist: network namespaces on one bridge, joined by links of a chosen rate. Needs root on Linux.

Waiting on these links is real: packets are sent, queued and delayed by the kernel. Each host runs one rank, or several
where it stands for a node: what they send each other never leaves the host. Each rank is a process:
``python -m benchmarks.testbed.namespaces package.module:function FOLDER``, where the folder holds ``arguments.json``
and gets the result as ``RANK.json``.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist

_PREFIX = "osdp-bed"
_DEVICE = "eth0"
"""Network device that joins a host to the bridge."""
_BURST = "32kb"
"""Bytes that a host may send at once beyond its rate: with a larger bucket small messages would cost almost nothing."""
_QUEUE = "200ms"
_LARGEST_SEGMENT = 16384
"""Bytes handed to a link at once; tbf has to cut in pieces what exceeds its bucket."""
_POLL_S = 0.05
_SERIAL = count()
"""Serial numbers of beds, of which several may exist at once in one process."""
_ROOT = Path(__file__).resolve().parents[2]


def why_unavailable() -> str | None:
    """Reason why network namespaces cannot be had here, or None if they can."""
    if not sys.platform.startswith("linux"):
        return f"network namespaces need Linux, this is {sys.platform}"
    if os.geteuid() != 0:
        return "network namespaces need root"
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"network namespaces need {tool!r}, of the package iproute2"
    try:
        with Hosts(1, rate_mbit=100):
            return None
    except OSError as error:
        return f"network namespaces are not permitted: {error}"


class Hosts:
    """Network namespaces with a link each to a common bridge; the context manager makes and removes them.

    Args:
        num_hosts: each with its link.
        rate_mbit: 10^6 bit/s that each host may send, or None for as fast as the kernel copies.
        ranks_per_host: ranks in each, which follow each other.

    Raises:
        OSError: the kernel or its tools refuse; `why_unavailable` tells beforehand.
    """

    def __init__(self, num_hosts: int, *, rate_mbit: float | None = None, ranks_per_host: int = 1) -> None:
        self.num_ranks, self._ranks_per_host, self._rate_mbit = num_hosts * ranks_per_host, ranks_per_host, rate_mbit
        prefix = f"{_PREFIX}{os.getpid()}-{next(_SERIAL)}"
        self._bridge, self._hosts = f"{prefix}-bridge", [f"{prefix}-{index}" for index in range(num_hosts)]

    def __enter__(self) -> Hosts:
        _remove_abandoned()
        try:
            self._make()
            self.set_rate(self._rate_mbit)
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._remove()

    def set_rate(self, rate_mbit: float | None) -> None:
        """Changes what each host may send: 10^6 bit/s, or None for as fast as the kernel copies."""
        for host in self._hosts:
            _run("ip", "netns", "exec", host, *_shaping(rate_mbit))

    def run(self, target: str, arguments: Mapping[str, Any] | None = None, *, timeout_s: float = 600.0) -> list[Any]:
        """Calls one function on all ranks, each in its process, with gloo between them.

        Args:
            target: ``"package.module:function"``.
            arguments: keyword arguments, as JSON can write them.
            timeout_s: longest that the ranks may take.

        Returns:
            What it returned on each rank, as JSON can write it.

        Raises:
            RuntimeError: a rank failed; with the end of what it wrote.
            TimeoutError: the ranks took too long.
        """
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / "arguments.json").write_text(json.dumps(dict(arguments or {})))
            processes: list[subprocess.Popen[bytes]] = []
            try:
                for rank in range(self.num_ranks):
                    with (folder / f"{rank}.log").open("wb") as log:
                        processes.append(self._start(target, folder, rank, log))
                self._wait(processes, folder, time.monotonic() + timeout_s)
            finally:
                for process in processes:
                    process.kill()
                    process.wait()
            return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(self.num_ranks)]

    def _start(self, target: str, folder: Path, rank: int, log: IO[bytes]) -> subprocess.Popen[bytes]:
        environment = {
            **os.environ,
            "RANK": str(rank),
            "WORLD_SIZE": str(self.num_ranks),
            "MASTER_ADDR": _address(0),
            "MASTER_PORT": "29500",  # the namespace is ours alone
            "GLOO_SOCKET_IFNAME": _DEVICE,
            "OMP_NUM_THREADS": "1",
            "MALLOC_ARENA_MAX": "1",  # Trainers that take turns have a thread each: what one frees, the next one takes
            "PYTHONPATH": os.pathsep.join([str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        }
        command = [sys.executable, "-m", "benchmarks.testbed.namespaces", target, str(folder)]
        return subprocess.Popen(
            ["ip", "netns", "exec", self._hosts[rank // self._ranks_per_host], *command],
            env=environment,
            cwd=_ROOT,  # which Python looks into before all other folders
            stdout=log,
            stderr=subprocess.STDOUT,
        )

    def _wait(self, processes: list[subprocess.Popen[bytes]], folder: Path, deadline_s: float) -> None:
        while True:
            codes = [process.poll() for process in processes]
            for rank, code in enumerate(codes):
                if code not in (None, 0):
                    written = (folder / f"{rank}.log").read_text(errors="replace")[-4000:]
                    raise RuntimeError(f"Rank {rank} of {self.num_ranks} ended with {code}:\n{written}")
            if None not in codes:
                return
            if time.monotonic() > deadline_s:
                late = [rank for rank, code in enumerate(codes) if code is None]
                raise TimeoutError(f"Expected all ranks to end in time, but ranks {late} still run.")
            time.sleep(_POLL_S)

    def _make(self) -> None:
        _run("ip", "netns", "add", self._bridge)
        _run("ip", "-n", self._bridge, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", self._bridge, "link", "set", "bridge", "up")
        for index, host in enumerate(self._hosts):
            port = f"port{index}"
            _run("ip", "netns", "add", host)
            peer = ("type", "veth", "peer", "name", port, "netns", self._bridge)
            _run("ip", "link", "add", _DEVICE, "netns", host, *peer)
            _run("ip", "-n", host, "link", "set", _DEVICE, "gso_max_size", str(_LARGEST_SEGMENT))
            _run("ip", "-n", host, "address", "add", f"{_address(index)}/16", "dev", _DEVICE)
            _run("ip", "-n", host, "link", "set", _DEVICE, "up")
            _run("ip", "-n", host, "link", "set", "lo", "up")
            # bbr, where it is the default, paces by its own guess of the rate
            route = ("10.77.0.0/16", "dev", _DEVICE, "proto", "kernel", "scope", "link", "src", _address(index))
            _run("ip", "-n", host, "route", "change", *route, "congctl", "cubic")
            _run("ip", "-n", self._bridge, "link", "set", port, "master", "bridge", "up")

    def _remove(self) -> None:
        existing = _namespaces()
        for name in (*self._hosts, self._bridge):
            if name in existing:
                _run("ip", "netns", "delete", name)


def _address(index: int) -> str:
    return f"10.77.{(index + 1) // 256}.{(index + 1) % 256}"


def _shaping(rate_mbit: float | None) -> Sequence[str]:
    """Command that gives the device of a host its rate."""
    shape: tuple[str, ...] = ("pfifo_fast",)
    if rate_mbit is not None:
        shape = ("tbf", "rate", f"{rate_mbit}mbit", "burst", _BURST, "latency", _QUEUE)
    return ("tc", "qdisc", "replace", "dev", _DEVICE, "root", *shape)


def set_own_rate(rate_mbit: float | None) -> None:
    """Changes what the host of this rank, one of `Hosts`, may send."""
    _run(*_shaping(rate_mbit))


def sent_bytes() -> int | None:
    """Bytes that the host of this rank has sent to others so far, with headers; None where not one of `Hosts`."""
    if os.environ.get("MASTER_ADDR") != _address(0):
        return None
    lines = Path("/proc/self/net/dev").read_text().splitlines()
    (counts,) = (line.partition(":")[2].split() for line in lines if line.strip().startswith(f"{_DEVICE}:"))
    return int(counts[8])  # after eight of what was received


def _run(*command: str) -> str:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise OSError(f"{' '.join(command)!r} ended with {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def _namespaces() -> list[str]:
    return [line.split()[0] for line in _run("ip", "netns", "list").splitlines() if line]


def _remove_abandoned() -> None:
    """Removes namespaces whose process ended without doing so, as one that was killed."""
    for name in _namespaces():
        pid = name.removeprefix(_PREFIX).partition("-")[0]
        if name.startswith(_PREFIX) and pid.isdigit() and not Path("/proc", pid).exists():
            _run("ip", "netns", "delete", name)


def call(target: str, arguments: Mapping[str, Any]) -> Any:
    """Result of a function ``"package.module:function"``."""
    module, _, name = target.partition(":")
    return getattr(importlib.import_module(module), name)(**arguments)


def _run_rank(target: str, folder: Path) -> None:
    """Calls the function, with one thread and gloo as the default process group."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    result = call(target, json.loads((folder / "arguments.json").read_text()))
    (folder / f"{os.environ['RANK']}.json").write_text(json.dumps(result))
    dist.barrier()  # a rank whose peer is gone fails
    sys.stdout.flush()
    # Without the interpreter's end, during which a thread of gloo may still want to drop tensors.
    os._exit(0)


if __name__ == "__main__":
    _run_rank(sys.argv[1], Path(sys.argv[2]))
