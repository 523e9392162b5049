"""One optimizer step as Lightning takes it, without its Trainer: several models can then take turns in one process."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.families import Family
from lightning_osdp.apply import ShardedModel
from lightning_osdp.core.plans.plan import Plan
from lightning_osdp.profiler.machine.stopwatch import synchronize
from lightning_osdp.strategy.precision import OSDPPrecision

_CPU = torch.device("cpu")


class Step:
    """A model under a plan on this rank of the default process group, and what an optimizer step does with it.

    Forward, zeroing and backward come in the order of Lightning's automatic optimization, the last of them within the
    optimizer's step, and gradients are reduced when the plan says, as `OSDPStrategy` does.

    Args:
        module: the model that the plan is for; it is sharded in place.
        plan: with the micro-batch and the number of micro-batches to train with.
        precision: the Trainer's argument of this name.
        device: where the rank trains.
    """

    def __init__(self, module: Family, plan: Plan, *, precision: Any = "32-true", device: torch.device = _CPU) -> None:
        self._precision = OSDPPrecision(precision)
        self._precision.use_device(device)
        self._module = module
        mixed_precision = self._precision.mixed_precision_config
        self.sharded = ShardedModel.planned(module, plan, device=device, mixed_precision=mixed_precision)
        self.optimizer = module.configure_optimizers()
        self.batch = tuple(tensor.to(device) for tensor in module.batch(plan.micro_batch_size))
        self._num_micro_batches = plan.num_micro_batches

    def __call__(self) -> None:
        """Takes one step."""
        last = self._num_micro_batches - 1
        for index in range(last):
            with self.sharded.accumulating():
                self._backward(index)

        def closure() -> float:
            self._backward(last)
            self.sharded.before_optimizer_step(self.optimizer)
            return 0.0

        with self.sharded.stepping(self.optimizer):
            self.optimizer.step(closure)
        self.sharded.reshard()

    def _backward(self, index: int) -> None:
        loss = self._forward(index) / self._num_micro_batches
        if index == 0:
            self.optimizer.zero_grad()
        with self.sharded.reaching_alike(loss) as loss:
            self.sharded.before_backward()
            loss.backward()

    def _forward(self, index: int) -> Tensor:
        step = self._module.training_step
        with self._precision.train_step_context():
            loss: Any = self.sharded.run(step, self.batch, index)
        assert isinstance(loss, Tensor)
        return loss


def time_in_turns(
    steps: Mapping[str, Callable[[], None]], *, num_rounds: int, device: torch.device = _CPU
) -> dict[str, list[float]]:
    """Seconds of each step, taken A B C A B C: what slows the machine for a while slows all of them.

    Ranks begin each step together. Call it on all ranks of the default process group.

    Args:
        steps: by name.
        num_rounds: timed ones, after one to warm up.
        device: waited for, at the end of each.
    """
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(1 + num_rounds):
        for name, step in steps.items():
            dist.barrier()
            start_s = time.perf_counter()
            step()
            synchronize(device)
            seconds[name].append(time.perf_counter() - start_s)
    return {name: found[1:] for name, found in seconds.items()}
