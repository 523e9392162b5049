"""One fit of minGPT on one device, in a process of its own: OSDP's, or one that is written by hand."""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from benchmarks.testbed.training import quiet
from examples.mingpt.model import Block
from examples.mingpt.module import MinGPT
from lightning_osdp import OSDPStrategy
from lightning_osdp.profiler import is_out_of_memory

COUNTED_STEPS = 10
"""Last steps of a fit, whose median and whose peak count."""


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Model, batch, limit, and who decides."""

    num_layers: int
    hidden_size: int
    sequence_length: int
    vocabulary_size: int
    micro_batch_size: int
    limit_bytes: int | None
    way: str
    """``osdp``; ``plain``; ``checkpointing`` of every block; or ``cpu_offload``, of all parameters, gradients and
    states by ``fully_shard``, with every block checkpointed."""
    num_steps: int = 24


class Watched(pl.Callback):
    """Seconds between the ends of batches, with the device waited for, and the most bytes of each batch."""

    def __init__(self, device_type: str) -> None:
        self.seconds: list[float] = []
        self.peaks: list[int] = []
        self.losses: list[float] = []
        self.begun_s = 0.0
        self._is_cuda = device_type == "cuda"
        self._last_s = time.perf_counter()

    @override
    def on_train_batch_start(self, *_: Any) -> None:
        if not self.begun_s:
            self.begun_s = time.perf_counter() - self._last_s
            self._last_s = time.perf_counter()
        if self._is_cuda:
            torch.cuda.reset_peak_memory_stats()

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, *_: Any) -> None:
        self.losses.append(float(outputs["loss"]))  # waits for the device
        if self._is_cuda:
            torch.cuda.synchronize()
            self.peaks.append(torch.cuda.max_memory_allocated())
        now = time.perf_counter()
        self.seconds.append(now - self._last_s)
        self._last_s = now


class Offloaded(MinGPT):
    """MinGPT whose shards, gradients and states are on the host, as ``fully_shard`` offloads."""

    @override
    def configure_model(self) -> None:
        options: dict[str, Any] = {
            "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
            "offload_policy": CPUOffloadPolicy(),
        }
        for block in [child for child in self.modules() if isinstance(child, Block)]:
            fully_shard(block, **options)
        fully_shard(self.model, **options)


class OnHost(ModelParallelStrategy):
    """Lightning's strategy, which moves to the GPU what ``fully_shard`` has put on the host, without that."""

    @override
    def model_to_device(self) -> None:
        assert self.model is not None
        for buffer in self.model.buffers():
            buffer.data = buffer.data.to(self.root_device)


def run(fit: Fit) -> dict[str, Any]:
    """Seconds of a step, peak, seconds until the first step, losses, and what was predicted where OSDP decides."""
    device_type = "cuda" if torch.cuda.is_available() else "cpu"
    sizes = {name: getattr(fit, name) for name in ("num_layers", "hidden_size", "sequence_length", "vocabulary_size")}
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    begun = time.perf_counter()
    made = Offloaded if fit.way == "cpu_offload" else MinGPT
    with torch.device("cpu" if fit.way == "cpu_offload" else device_type):
        module = made(**sizes, num_heads=max(2, fit.hidden_size // 128))
    made_s = time.perf_counter() - begun
    if fit.way in ("checkpointing", "cpu_offload"):
        wrapper = partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.NO_REENTRANT)
        apply_activation_checkpointing(
            module, checkpoint_wrapper_fn=wrapper, check_fn=lambda child: isinstance(child, Block)
        )
    strategy: Any = "auto"
    if fit.way == "osdp":
        strategy = OSDPStrategy(memory_limit=fit.limit_bytes, batch_size="keep")
    elif fit.way == "cpu_offload":
        strategy = OnHost(
            data_parallel_size=1,
            tensor_parallel_size=1,
            process_group_backend="cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo",
        )
    generator = torch.Generator().manual_seed(1)
    shape = (fit.num_steps * fit.micro_batch_size, fit.sequence_length + 1)
    tokens = torch.randint(fit.vocabulary_size, shape, generator=generator)
    loader = DataLoader(TensorDataset(tokens[:, :-1], tokens[:, 1:]), batch_size=fit.micro_batch_size)
    watched = Watched(device_type)
    with tempfile.TemporaryDirectory() as folder, quiet():
        trainer = pl.Trainer(
            strategy=strategy,
            accelerator="gpu" if device_type == "cuda" else "cpu",
            devices=1,
            precision="32-true" if fit.way == "cpu_offload" else "bf16-mixed",
            max_steps=fit.num_steps,
            callbacks=[watched],
            default_root_dir=folder,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(module, loader)
    found: dict[str, Any] = {
        "step_s": statistics.median(watched.seconds[-COUNTED_STEPS:]),
        "peak_bytes": max(watched.peaks[-COUNTED_STEPS:], default=None),
        "made_s": made_s,
        "setup_s": watched.begun_s,
        "losses": [watched.losses[0], watched.losses[-1]],
        "num_parameters": sum(parameter.numel() for parameter in module.parameters()),
    }
    if isinstance(strategy, OSDPStrategy):
        plan = strategy.plan
        assert plan is not None
        overhead = {} if strategy.cluster is None else strategy.cluster.unit_overhead
        found |= {
            "unit_s": sum(part.fixed_s for name, part in overhead.items() if name != "stay"),
            "predicted_s": plan.step_time_s,
            "predicted_bytes": plan.peak_bytes,
            "blocks": _counted(block.activations for block in plan.blocks),
            "states": _counted(unit.treatments[0]["states"] for unit in plan.units),
            "gap": plan.gap,
        }
    return found


def _counted(values: Any) -> Mapping[str, int]:
    found = dict[str, int]()
    for value in values:
        found[str(value)] = found.get(str(value), 0) + 1
    return found


def main(text: str) -> None:
    """Runs a fit that is given as JSON; prints what was found, or how it failed, as one line of JSON."""
    warnings.simplefilter("ignore")
    fit = Fit(**json.loads(text))
    try:
        found = run(fit)
    except Exception as error:
        found = {"failed": f"{type(error).__name__}: {error}"[:2000]}
        if is_out_of_memory(error):
            found = {"failed": "out of memory"}
    print(json.dumps({"fit": asdict(fit)} | found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
