"""The step that the simulator predicts beside the one that ``torch.profiler`` traces: minGPT on two CPU ranks.

.. code-block:: bash

    python benchmarks/traces.py
    python benchmarks/traces.py --steps 6 --picture null

The plan is made in a first fit. A second one trains under it and is traced, past the first steps, in which live bytes
are counted. Both traces stay in the folder, for ui.perfetto.dev.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

import yaml  # type: ignore[import-untyped]
from jsonargparse import auto_cli
from lightning import Trainer
from lightning.pytorch.profilers import PyTorchProfiler
from torch.profiler import ProfilerAction, schedule

# run as a script, Python looks for modules beside this file only
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measures.section import PICTURES, wide_console
from benchmarks.measures.traces import predicted_step, real_steps, table
from examples.mingpt.data import VOCABULARY_SIZE, TextDataModule
from examples.mingpt.module import MinGPT
from lightning_osdp import Cluster, ModelProfile, OSDPStrategy, Plan, chrome_trace

CONFIG = Path(__file__).resolve().parents[1] / "examples" / "mingpt" / "configs" / "osdp_cpu.yaml"
TRACED_STEPS = 5
_FIRST_STEPS = 7


def steady(step: int, *, num_micro_batches: int) -> ProfilerAction:
    """Action of the profiler in a micro-batch: none before live bytes have been counted."""
    first, traced = _FIRST_STEPS * num_micro_batches, TRACED_STEPS * num_micro_batches
    action: ProfilerAction = schedule(skip_first=first, wait=0, warmup=1, active=traced, repeat=1)(step)
    return action


def fit(folder: Path, *, max_steps: int, plan: Path | None = None, profiler: PyTorchProfiler | None = None) -> None:
    """Trains minGPT as its configuration has it for a CPU; ranks end when it returns."""
    config = yaml.safe_load(CONFIG.read_text(encoding="utf-8"))
    data = config["data"]
    memory_limit = config["trainer"]["strategy"]["init_args"]["memory_limit"] if plan is None else None
    trainer = Trainer(
        strategy=OSDPStrategy(memory_limit, plan, start_method="spawn"),
        accelerator="cpu",
        devices=config["trainer"]["devices"],
        max_steps=max_steps,
        limit_val_batches=0,
        gradient_clip_val=config["trainer"]["gradient_clip_val"],
        default_root_dir=folder,
        profiler=profiler,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    sizes = {"vocabulary_size": VOCABULARY_SIZE, "sequence_length": data["sequence_length"]}
    trainer.fit(MinGPT(**config["model"], **sizes), TextDataModule(**data))


def main(folder: Path = Path("runs/traces"), picture: Path | None = PICTURES / "traces.svg", steps: int = 30) -> None:
    """Trains twice, prints a table of one step, and draws it.

    Args:
        folder: where plan and traces go.
        picture: SVG to draw, which needs matplotlib; null for none.
        steps: of the fit that makes the plan.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for before in folder.glob("*.pt.trace.json"):
        before.unlink()
    fit(folder, max_steps=steps)
    inputs = (
        Plan.load(folder / "osdp_plan.json"),
        ModelProfile.load(folder / "osdp_profile.json"),
        Cluster.load(folder / "osdp_cluster.json"),
    )
    predicted, number = chrome_trace(*inputs), inputs[0].num_micro_batches
    (folder / "predicted.json").write_text(json.dumps(predicted), encoding="utf-8")
    profiler = PyTorchProfiler(dirpath=folder, filename="traced", schedule=partial(steady, num_micro_batches=number))
    fit(folder, max_steps=_FIRST_STEPS + TRACED_STEPS + 3, plan=folder / "osdp_plan.json", profiler=profiler)
    (path,) = folder.glob("*-0-*.pt.trace.json")
    traced = json.loads(path.read_text(encoding="utf-8"))
    step, real = predicted_step(predicted), real_steps(traced, num_micro_batches=number)
    console = wide_console()
    console.print(table(step, real))
    same = all(each.collectives == step.collectives for each in real)
    console.print(f"{len(step.collectives)} collectives, in {'the same' if same else 'ANOTHER'} order; {path}")
    if picture is not None:
        from benchmarks.pictures.traces import draw

        draw(step, real, picture)


if __name__ == "__main__":
    auto_cli(main)
