"""Checks for the first person with a GPU: every assumption about CUDA, one line each.

.. code-block:: bash

    make gpu-check
    python benchmarks/gpu_check.py --checks [links,order]

With one device it takes about 4 minutes, and more with two, of which the first two are used. Without one, it runs its
emulated half: a made-up clock and memory, an accelerator of fake tensors, and the same checks on CPU, where they check
themselves and times decide nothing. The exit code is the number of lines that say FAIL.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path

import torch
from jsonargparse import auto_cli

# run as a script, Python looks for modules beside this file only
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measures.gpu.emulated import EMULATED
from benchmarks.measures.gpu.finding import Check, Finding, findings_of
from benchmarks.measures.gpu.one_device import ON_ANY_DEVICE, ON_CUDA
from benchmarks.measures.gpu.two_devices import ON_SHARED, ON_TWO


def chosen_checks(num_devices: int, names: list[str]) -> tuple[Mapping[str, Check], str]:
    """The checks for so many CUDA devices, and which half of all of them that is.

    Raises:
        ValueError: a name is none of a check that can run here.
    """
    if num_devices == 0:
        half = (
            f"emulated half: there is no CUDA device. Left out: {', '.join(ON_CUDA)}, and whether what is measured on a"
            " GPU is true."
        )
        checks = {**EMULATED, **ON_ANY_DEVICE, **ON_TWO}
    elif num_devices == 1:
        left_out = ", ".join(name for name in ON_TWO if name not in ON_SHARED)
        half = f"half of one device. Left out, for they need two: {left_out}."
        checks = {**EMULATED, **ON_ANY_DEVICE, **ON_CUDA, **ON_SHARED}
    else:
        half = "whole, on two devices."
        checks = {**EMULATED, **ON_ANY_DEVICE, **ON_CUDA, **ON_TWO}
    unknown = [name for name in names if name not in checks]
    if unknown:
        raise ValueError(f"Expected names of checks that can run here, {[*checks]}, got {unknown}.")
    return {name: check for name, check in checks.items() if not names or name in names}, half


def found(checks: Mapping[str, Check], device: torch.device) -> Iterator[Finding]:
    """Yields the findings of all checks."""
    for name, check in checks.items():
        yield from findings_of(name, check, device)


def main(output: Path = Path("gpu_check.json"), checks: list[str] = []) -> None:  # noqa: B006 -- a list shows its default
    """Prints PASS or FAIL and numbers for everything that is checked; ends with the number of failures.

    Args:
        output: JSON file of all findings.
        checks: Names of checks; none: all.
    """
    num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    device = torch.device("cuda", 0) if num_devices else torch.device("cpu")
    chosen, half = chosen_checks(num_devices, checks)
    print(f"This is the {half}", flush=True)
    findings: list[Finding] = []
    for finding in found(chosen, device):
        findings.append(finding)
        print(finding, flush=True)
        document = {
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "half": half,
            "findings": [asdict(each) for each in findings],
        }
        output.write_text(json.dumps(document, indent=1) + "\n")
    num_bad = sum(not finding.is_good for finding in findings)
    print(f"{len(findings) - num_bad} passed, {num_bad} failed: {half} Numbers in {output}.")
    sys.exit(num_bad)


if __name__ == "__main__":
    auto_cli(main)
