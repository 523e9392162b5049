"""Lightning's own Trainer under a plan, on whatever process group exists already."""

from __future__ import annotations

import io
import logging
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.pytorch.accelerators import CUDAAccelerator
from lightning.pytorch.strategies import ParallelStrategy
from typing_extensions import override

from benchmarks.families import Family
from lightning_osdp import OSDPStrategy
from lightning_osdp.core.plans.plan import Plan


def train(
    module: Family,
    plan: Plan,
    *,
    num_steps: int,
    precision: Any = "32-true",
    callbacks: Sequence[pl.Callback] = (),
    strategy: ParallelStrategy | None = None,
) -> None:
    """Trains for so many optimizer steps on this rank of the default process group, as a user's Trainer would.

    Args:
        module: the model that the plan is for; it is wrapped in place.
        plan: with the micro-batch and the number of micro-batches to train with.
        num_steps: optimizer steps.
        precision: the Trainer's argument of this name.
        callbacks: of the Trainer.
        strategy: that trains instead of `OSDPStrategy`; of the plan only its micro-batches count then.
    """
    num_batches = num_steps * plan.num_micro_batches
    strategy = strategy or OSDPStrategy(plan=plan, batch_size="keep", node_size=plan.node_size)
    options = {"precision": precision, "accumulate_grad_batches": plan.num_micro_batches}
    with trainer_of(strategy, num_steps=num_steps, callbacks=callbacks, **options) as trainer:
        trainer.fit(module, module.loader(plan.micro_batch_size, num_batches=num_batches))


@contextmanager
def trainer_of(
    strategy: ParallelStrategy, *, num_steps: int, callbacks: Sequence[pl.Callback] = (), **options: Any
) -> Iterator[pl.Trainer]:
    """Trainer on the default process group, with a folder of its own within the context, which takes so many steps."""
    with tempfile.TemporaryDirectory() as folder:
        yield pl.Trainer(
            strategy=strategy,
            accelerator="cpu",
            devices=dist.get_world_size(),
            plugins=[StartedRanks()],
            max_steps=num_steps,
            callbacks=list(callbacks),
            default_root_dir=folder,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
            **options,
        )


class SharedGPU(CUDAAccelerator):
    """The first GPU for every rank. A Trainer refuses that, since ranks by NCCL need a GPU each."""

    @staticmethod
    @override
    def parse_devices(devices: Any) -> list[int]:
        return [0] * int(devices)

    @staticmethod
    @override
    def get_parallel_devices(devices: list[int]) -> list[torch.device]:
        return [torch.device("cuda", index) for index in devices]


class StartedRanks(ClusterEnvironment):
    """The ranks of the default process group, all of them on one node."""

    @property
    @override
    def creates_processes_externally(self) -> bool:
        return True

    @property
    @override
    def main_address(self) -> str:
        return "127.0.0.1"

    @property
    @override
    def main_port(self) -> int:
        return 0

    @staticmethod
    @override
    def detect() -> bool:
        return False

    @override
    def world_size(self) -> int:
        return dist.get_world_size()

    @override
    def set_world_size(self, size: int) -> None:
        return None

    @override
    def global_rank(self) -> int:
        return dist.get_rank()

    @override
    def set_global_rank(self, rank: int) -> None:
        return None

    @override
    def local_rank(self) -> int:
        return dist.get_rank()

    @override
    def node_rank(self) -> int:
        return 0


@contextmanager
def quiet() -> Iterator[None]:
    """Silences, within the context, what Lightning and the plan have to say on every fit."""
    log = logging.getLogger("lightning.pytorch")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)
