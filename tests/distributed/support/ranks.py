"""Ranks that start once and run many cases; what costs seconds to import is imported once for all of them."""

import faulthandler
import gc
import importlib.util
import inspect
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
import warnings
from multiprocessing import current_process, get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

TIMEOUT_S = 240
IMPORTED = ["tests.distributed.support.imported"]
"""Modules imported once, before ranks are forked."""


class _RankDiedError(AssertionError):
    """Error of a rank whose process ended in a case."""

    def __init__(self, text, exitcode):
        super().__init__(text)
        self.exitcode = exitcode


class RankPool:
    """Processes with gloo between them, as ``torchrun`` would have started them.

    Args:
        world_size: how many.
        start_method: "forkserver", or "spawn" for ranks that have no memory and no environment of earlier ones.
    """

    def __init__(self, world_size, *, start_method="forkserver"):
        self.world_size = world_size
        self._start_method = start_method
        self.timeout_s = TIMEOUT_S
        self._start()

    def _start(self):
        context = get_context(self._start_method)
        context.set_forkserver_preload(IMPORTED)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._connections, self._processes, self._faults = [], [], []
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            faults = tempfile.NamedTemporaryFile("r", prefix=f"rank{rank}-")  # noqa: SIM115
            arguments = (theirs, rank, self.world_size, port, faults.name)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)
            self._faults.append(faults)

    def run(self, case, **kwargs):
        """Runs ``case(**kwargs)`` on all ranks; returns their results by rank, raises if any raised or hung.

        Args:
            case: a function at the top level of a file, given as itself.
            **kwargs: arguments that can be pickled.
        """
        outcomes = self.outcomes(case, **kwargs)
        failed = {rank: text for rank, (ok, text) in enumerate(outcomes) if not ok}
        if failed:
            raise AssertionError("\n".join(f"--- rank {rank}\n{text}" for rank, text in failed.items()))
        return [result for _, result in outcomes]

    def outcomes(self, case, **kwargs):
        """Returns by rank (True, result) or (False, the traceback's text).

        A segmentation fault is nothing that Python code can do: about once in thirty runs of all tests one is in
        gloo's threads (torch 2.13, "pt_gloo_runloop" in malloc), in the first case of a pool. The case runs once more
        on new ranks, and a warning tells.
        """
        try:
            return self._outcomes(case, kwargs)
        except _RankDiedError as error:
            if error.exitcode != -signal.SIGSEGV:
                raise
            warnings.warn(f"{case.__name__} runs again after a segmentation fault: {error}", stacklevel=2)
            self._start()
            return self._outcomes(case, kwargs)

    def _outcomes(self, case, kwargs):
        path = inspect.unwrap(case).__code__.co_filename
        for connection in self._connections:
            connection.send((case.__module__, path, case.__name__, bytes(ForkingPickler.dumps(kwargs))))
        outcomes = [None] * self.world_size
        deadline = time.monotonic() + self.timeout_s
        while None in outcomes:
            pending = [c for c, outcome in zip(self._connections, outcomes, strict=True) if outcome is None]
            ready = wait(pending, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                missing = [rank for rank, outcome in enumerate(outcomes) if outcome is None]
                self.close()
                raise AssertionError(f"Ranks {missing} did not answer in {self.timeout_s} s; the others: {outcomes}")
            for connection in ready:
                rank = self._connections.index(connection)
                try:
                    outcomes[rank] = connection.recv()
                except EOFError:
                    self._processes[rank].join(10)
                    exitcode, threads = self._processes[rank].exitcode, self._faults[rank].read()
                    self.close()
                    died = f"Rank {rank} died, exit code {exitcode}; the others: {outcomes}"
                    raise _RankDiedError(f"{died}\n{threads}", exitcode) from None
        return outcomes

    @property
    def is_alive(self):
        return all(process.is_alive() for process in self._processes)

    def close(self):
        for process in self._processes:
            process.kill()
            process.join()
        for faults in self._faults:
            faults.close()


def _serve(connection: Connection, rank, world_size, port, faults):
    faulthandler.enable(Path(faults).open("w"))  # noqa: SIM115 - open as long as the process lives
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        GROUP_RANK="0",
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_RUN_ID="tests",
        GLOO_SOCKET_IFNAME="lo",
    )
    current_process()._config["daemon"] = False  # a case's loaders may have workers
    import torch
    import torch.distributed as dist
    from lightning.pytorch.trainer.connectors import callback_connector

    from lightning_osdp.profiler import optimizer
    from lightning_osdp.profiler.timing import rerun_time, step_time
    from lightning_osdp.strategy.planning import publish

    publish.save_picture = lambda *_, **__: None  # of every plan: pictures take a good part of all seconds
    # as repeating what is timed does, and no test asks for good times
    step_time._REPEATS = optimizer._REPEATS = rerun_time._REPEATS = 1
    # each Trainer looks through all packages for them
    callback_connector._load_external_callbacks = lambda _: []
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world_size)
    _leave_out()
    while True:
        module, path, name, kwargs = connection.recv()
        try:
            case = getattr(_load(module, path), name)
            outcome = (True, case(**ForkingPickler.loads(kwargs)))  # they may be of classes in the same file
        except BaseException:
            outcome = (False, traceback.format_exc())
        connection.send(outcome)
        _leave_out()


def _leave_out():
    """Leaves what is there out of collections, and what was imported out of fits, which look for tensors everywhere."""
    gc.collect()
    gc.freeze()


def _load(name, path):
    """The file of a case, under the name that it has where it was sent: what is pickled here and there is the same."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]
