"""Counts how often a training script on two gloo ranks ends as it should: `python benchmarks/exits.py --count 50`."""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[1] / "tests" / "strategy" / "runtime" / "script.py"


def main() -> int:
    """Runs the script again and again; the exit code is the number of runs that did not end with 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--strategy", default="osdp", help="osdp, osdp_spawn or osdp_fork")
    options = parser.parse_args()
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""}
    failed, start_s = 0, time.monotonic()
    for index in range(options.count):
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, str(SCRIPT), folder, "--strategy", options.strategy]
            run = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        aborted = "terminate called" in run.stderr
        if run.returncode or aborted:
            failed += 1
            sys.stdout.write(f"run {index}: exit code {run.returncode}\n{run.stderr[-500:]}\n")
    seconds = (time.monotonic() - start_s) / options.count
    sys.stdout.write(f"{options.count - failed} of {options.count} ended with 0, {seconds:.1f} s each\n")
    return failed


if __name__ == "__main__":
    sys.exit(main())
