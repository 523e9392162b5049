"""The planner needs no torch, and the public names are these."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import lightning_osdp

PACKAGE = Path(lightning_osdp.__file__).parent
PLANNER = ["errors", "core", "machines", "planner", "report"]
BLOCKED = ["torch", "lightning", "fairscale", "torchmetrics"]

PRELUDE = f"""
import importlib, sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {BLOCKED!r}:
            raise ImportError(f"{{name}} is blocked")

sys.meta_path.insert(0, Blocker())
"""


def run(code):
    """Standard output of a fresh interpreter in which the blocked packages cannot be imported."""
    return subprocess.run(
        [sys.executable, "-c", PRELUDE + textwrap.dedent(code)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def modules_of(layer):
    """Names of all modules of a part of the planner."""
    folder = PACKAGE / layer
    files = sorted(folder.rglob("*.py")) if folder.is_dir() else [PACKAGE / f"{layer}.py"]
    names = [".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts) for file in files]
    return [name.removesuffix(".__init__") for name in names]


def test_the_planner_imports_without_torch_and_lightning():
    names = [name for layer in PLANNER for name in modules_of(layer)]
    assert len(names) > 25
    found = run(
        f"""
        for name in {names!r}:
            importlib.import_module(name)
        print(sorted(set(sys.modules) & set({BLOCKED!r})))
        """
    )
    assert (found.returncode, found.stdout, found.stderr) == (0, "[]\n", "")


def test_the_planner_plans_without_torch_and_lightning():
    found = run(
        """
        from lightning_osdp.core.cluster import Cluster, Link
        from lightning_osdp.core.profile import ModelProfile, OperatorProfile
        from lightning_osdp.planner.scheduler import make_plan

        link = Link(latency_s=1e-5, seconds_per_byte=1e-9)
        sizes = dict.fromkeys(["parameter_bytes", "gathered_bytes", "trainable_bytes", "gradient_bytes"], 4000)
        layer = OperatorProfile(
            name="a", kind="Linear", enclosing=("a", ""), num_trainable=1000, optimizer_bytes=8000, **sizes
        )
        cluster = Cluster(world_size=2, all_gather=link, reduce_scatter=link)
        plan = make_plan(ModelProfile.in_turn([layer]), cluster, memory_limit_bytes=10**6, micro_batch_size=1)
        print(plan.decisions[0].modes)
        """
    )
    assert (found.returncode, found.stdout, found.stderr) == (0, "('DP',)\n", "")


@pytest.mark.parametrize("name", BLOCKED)
def test_what_is_blocked_cannot_be_imported(name):
    found = run(f"import {name}")
    assert found.returncode == 1
    assert f"ImportError: {name} is blocked" in found.stderr


@pytest.mark.parametrize("name", ["profiler", "apply", "strategy"])
def test_blocking_stops_what_does_need_torch(name):
    found = run(f"import lightning_osdp.{name}")
    assert found.returncode == 1
    assert "is blocked" in found.stderr


@pytest.mark.slow
def test_importing_the_package_imports_nothing_that_few_need():
    rare = ("fairscale", "matplotlib", "torch.testing._internal")
    code = """
        import sys
        import lightning.pytorch
        known = set(sys.modules)  # torch and Lightning import some of them where they are installed
        import lightning_osdp
        print(*sys.modules.keys() - known)
        """
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code)]
    added = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout.split()
    assert "lightning_osdp.report.picture" in added
    assert [name for name in added if f"{name}.".startswith(tuple(f"{each}." for each in rare))] == []


def test_the_public_names_are_these():
    assert lightning_osdp.__all__ == [
        "FSDP2",
        "Advice",
        "Affine",
        "AllocatorPeaks",
        "Alternative",
        "Alternatives",
        "BatchPolicy",
        "Block",
        "BlockProfile",
        "Case",
        "Cluster",
        "ComputePrecision",
        "ConfigurationError",
        "Contention",
        "Correction",
        "Cost",
        "Crossing",
        "Cut",
        "Decided",
        "Decision",
        "Device",
        "DeviceRates",
        "Difference",
        "Event",
        "Exchange",
        "HandMade",
        "InfeasibleError",
        "Interconnect",
        "Interval",
        "Level",
        "Link",
        "Links",
        "Machine",
        "Measured",
        "ModelProfile",
        "Moment",
        "OSDPError",
        "OSDPPrecision",
        "OSDPStrategy",
        "OperatorProfile",
        "OptimizerProfile",
        "Option",
        "ParameterProfile",
        "PeakMemory",
        "Plan",
        "PlanFormatError",
        "PlanMethod",
        "PlanMismatchError",
        "PlanMonitor",
        "Price",
        "ProfileError",
        "RanksApartError",
        "Rerun",
        "SearchSpace",
        "Segment",
        "ShardedParameterError",
        "StepEstimate",
        "Together",
        "TrainingStep",
        "Treatment",
        "Unit",
        "UnitOverhead",
        "UntraceableError",
        "advise",
        "apply_plan",
        "change_plan",
        "chrome_trace",
        "chunked_cross_entropy",
        "compare_plans",
        "draw_plan",
        "find_alternatives",
        "made_by_hand",
        "make_plan",
        "measure_cluster",
        "memory_price",
        "profile_model",
        "render_plan",
        "simulate",
        "what_if",
    ]
    assert all(hasattr(lightning_osdp, name) for name in lightning_osdp.__all__)
