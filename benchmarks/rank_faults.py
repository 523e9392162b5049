"""Ranks that raise, are killed, stall or get SIGTERM: how long until all have ended, and what they say.

.. code-block:: bash

    python benchmarks/rank_faults.py --launchers [popen]
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from jsonargparse import auto_cli
from rich.progress import track
from rich.table import Table

# run as a script, Python looks for modules beside this file only
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measures.section import wide_console
from benchmarks.testbed.faulty import BATCH_SIZE, Model
from benchmarks.testbed.plans import plan_of

SCRIPT = Path(__file__).parent / "testbed" / "faulty.py"
Launcher = Literal["popen", "spawn", "torchrun"]
STALL_S = 30.0
"""The process group's timeout where a rank stalls."""


@dataclass(frozen=True)
class Case:
    """Fault that happens to a run, and what must come of it."""

    name: str
    arguments: tuple[str, ...]
    told: str
    """Regular expression: who failed first, and how, in what the processes have written."""
    signalled: tuple[str, ...] = ()
    """Processes that get SIGTERM then: names of files with process ids, or "launcher"."""
    bound_s: float = 30.0
    """Seconds within which all processes must have ended."""
    num_ranks: int = 2


_RAISED = (
    r"(?i)Rank 1 failed: ValueError: this rank has failed|process 1 terminated[\s\S]*ValueError: this rank has failed"
)
_TERMINATED = r"(?i)Rank \d received SIGTERM|got signal: 15"
CASES = (
    Case("raises in setup", ("--place", "setup", "--fault", "raise"), _RAISED),
    Case("raises in training_step", ("--fault", "raise"), _RAISED),
    Case("raises in validation_step", ("--place", "validation_step", "--fault", "raise"), _RAISED),
    Case("raises, of four ranks", ("--fault", "raise"), _RAISED, num_ranks=4),
    Case("rank 1 is killed", ("--fault", "kill"), r"(?i)rank: 1|process 1 terminated with signal SIGKILL|rank +: 1"),
    Case(
        "rank 0 is killed",
        ("--fault", "kill", "--rank", "0"),
        r"(?i)Rank 0\S* .*without reporting an error|process 0 terminated with signal SIGKILL|rank +: 0",
    ),
    Case("rank 1 stalls", ("--fault", "stall", "--timeout_s", str(STALL_S)), "Rank 1 stalled", bound_s=STALL_S + 30),
    Case("SIGTERM to rank 1", (), "Rank 1 received SIGTERM", ("pid-1",)),
    Case("SIGTERM to the launcher", (), _TERMINATED, ("launcher",)),
    Case("SIGTERM to all", (), _TERMINATED, ("launcher", "pid-0", "pid-1")),
    Case("SIGTERM to the launcher, rank 1 stalls", ("--fault", "stall"), _TERMINATED, ("launcher",)),
)


@dataclass(frozen=True)
class Outcome:
    """Outcome of a case."""

    seconds: float
    """Seconds from the failure, or the signal, until the last process ended."""
    exit_code: int
    """Exit code of the process that was started."""
    told: str | None
    """The line that says who failed first; None if there is none."""
    orphans: tuple[int, ...]
    """Process ids of ranks that were still there at the bound."""
    output: str


def command(case: Case, launcher: Launcher, folder: Path, plan: Path) -> list[str]:
    """Command that starts the ranks."""
    run = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(case.num_ranks)]
    method = "spawn" if launcher == "spawn" else "popen"
    common = ["--method", method, "--ranks", str(case.num_ranks)]
    if case.num_ranks == Case.num_ranks:
        common += ["--plan", str(plan)]
    before = run if launcher == "torchrun" else []
    return [sys.executable, *before, str(SCRIPT), str(folder), *common, *case.arguments]


def is_alive(pid: int) -> bool:
    """Tells if a process runs, which a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def outcome(case: Case, launcher: Launcher, plan: Path, *, on_gpus: bool = False) -> Outcome:
    """Runs a case; nothing of it is left when this returns."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "PYTHONWARNINGS": "ignore"}
        if not on_gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ""
        with (folder / "output").open("w") as output:
            process = subprocess.Popen(
                command(case, launcher, folder, plan), stdout=output, stderr=output, env=environment
            )
        _wait(lambda: (folder / "fault").exists() or process.poll() is not None, 120)
        if not (folder / "fault").exists():
            process.kill()
            raise RuntimeError(
                f"Expected {case.name!r} to reach its fault in 120 s, got {(folder / 'output').read_text()}"
            )
        files = sorted(folder.glob("pid-*"))
        pids = {file.name: int(file.read_text()) for file in files} | {"launcher": process.pid}
        start_s = time.monotonic()
        for target in case.signalled:
            os.kill(pids[target], signal.SIGTERM)
        _wait(lambda: process.poll() is not None and not any(map(is_alive, pids.values())), case.bound_s)
        seconds = time.monotonic() - start_s
        orphans = tuple(pid for pid in pids.values() if is_alive(pid))
        for pid in orphans:
            os.kill(pid, signal.SIGKILL)
        code = process.wait()
        text = (folder / "output").read_text()
    found = re.search(case.told, text)
    return Outcome(seconds, code, found and found.group().splitlines()[-1], orphans, text)


def _wait(condition: Callable[[], bool], longest_s: float) -> None:
    deadline = time.monotonic() + longest_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.05)


def make_plan(folder: Path) -> Path:
    """A plan for all cases of two ranks, so that none of them profiles."""
    module = Model(folder, "training_step", "none", rank=1)
    plan = plan_of(
        module, {"layers.0": "ZDP", "layers.2": "DP"}, world_size=Case.num_ranks, micro_batch_size=BATCH_SIZE
    )
    path = folder / "osdp_plan.json"
    plan.save(path)
    return path


def main(
    launchers: list[Launcher] = ["popen", "spawn", "torchrun"],  # noqa: B006 -- a list shows its default
    cases: list[str] = [],  # noqa: B006
) -> None:
    """Runs all cases under each launcher and prints a table; ends with the number of those that went wrong.

    Args:
        launchers: What starts the ranks.
        cases: Parts of names of cases; none: all.
    """
    console = wide_console()
    table = Table(title="From the fault until all ranks have ended")
    for name in ("fault", "launcher", "seconds", "exit code", "what is said", ""):
        table.add_column(name, justify="right" if name == "seconds" else "left")
    chosen = [case for case in CASES if not cases or any(part in case.name for part in cases)]
    num_wrong = 0
    with tempfile.TemporaryDirectory() as name:
        plan = make_plan(Path(name))
        runs = [(case, launcher) for case in chosen for launcher in launchers]
        for case, launcher in track(runs, description="ranks that fail", console=console):
            found = outcome(case, launcher, plan)
            is_right = found.told is not None and not found.orphans and found.exit_code != 0
            num_wrong += not is_right
            verdict = "as it should" if is_right else f"WRONG, {len(found.orphans)} orphans"
            table.add_row(case.name, launcher, f"{found.seconds:.1f}", str(found.exit_code), found.told, verdict)
            if not is_right:
                console.print(f"{case.name}, {launcher}:\n{found.output[-6000:]}", markup=False)
    console.print(table)
    sys.exit(num_wrong)


if __name__ == "__main__":
    auto_cli(main)
