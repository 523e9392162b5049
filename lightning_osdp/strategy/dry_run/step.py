"""One optimizer step of this rank alone, before the first real one: does it fit, and if not, where not?"""

from __future__ import annotations

import copy
import gc
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import FSDPStrategy
from torch import Tensor
from torch.optim import Optimizer

from lightning_osdp.apply import ShardedModel
from lightning_osdp.callbacks.peak import other_tensors, planned_tensors, tensors_in
from lightning_osdp.profiler import Census, LiveBytes, empty_cache, is_out_of_memory, loss_in, untouched
from lightning_osdp.strategy.batching.first_batch import first_batch, read_once_source
from lightning_osdp.strategy.planning.training_step import muted, step_arguments, to_device
from lightning_osdp.strategy.runtime.error_texts import Shortage, shortage_of


@dataclass(frozen=True)
class DryRun:
    """What a dry run on one rank came to."""

    shortage: Shortage | None = None
    """Where memory ran out, if it did."""
    why_not: str = ""
    """Why the step could not be taken, for another reason."""


def run_dry(trainer: pl.Trainer, sharded: ShardedModel) -> DryRun:
    """Takes an optimizer step like those to come, without the other ranks, and leaves nothing of it.

    The gradients of a step before are alive, and so is the state of optimizers: where there is none yet, a copy of the
    optimizer steps on gradients of zero, and weights are put back from a copy on the host. On CPU tensors are counted,
    those that no plan predicts too, and more than the memory limit of the plan counts as out of memory.

    An error of another kind says nothing of memory, as what units gather is wrong. Call it on all ranks.
    """
    strategy, module = trainer.strategy, trainer.lightning_module
    assert isinstance(strategy, FSDPStrategy)
    others = other_tensors(trainer)  # before there are copies that no other step has
    with (
        sharded.alone(),
        untouched(sharded.module, left_out=sharded.shards),
        muted(trainer, module),
        torch.autograd.set_detect_anomaly(False),
    ):
        try:
            found = DryRun(shortage=_shortage(trainer, strategy, sharded, others))
        except Exception as error:
            found = DryRun(why_not=f"{type(error).__name__}: {error}")
    if found.shortage is not None:
        gc.collect()  # what the error held
        # a step that was broken off may leave tensors until the next one
        census = getattr(strategy, "census", None)
        if isinstance(census, Census):
            census.ignore(other_tensors(trainer, besides=others))
    empty_cache(strategy.root_device)
    return found


def _shortage(
    trainer: pl.Trainer, strategy: FSDPStrategy, sharded: ShardedModel, others: Sequence[Tensor]
) -> Shortage | None:
    """Takes the step, and returns where memory ran out, if it did; other errors are raised."""
    batch = _next_batch(trainer)
    fresh = [_copied(optimizer) for optimizer in strategy.optimizers if not optimizer.state]
    counted = None
    if strategy.root_device.type == "cpu":  # where nothing else limits live tensors
        assert sharded.plan is not None
        counted = LiveBytes("cpu", memory_limit_bytes=sharded.plan.memory_limit_bytes)
        counted.track([*planned_tensors(trainer), *tensors_in(batch), *others])
    with sharded.kept_shards() if fresh else nullcontext():
        try:
            with counted or nullcontext():
                sharded.shard_gradients()
                for optimizer in fresh:
                    with sharded.stepping(optimizer):
                        optimizer.step()
                _window(trainer, strategy, batch)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return shortage_of(error, sharded)
    return None


def _copied(optimizer: Optimizer) -> Optimizer:
    """An optimizer of the same parameters with a state, and hooks, of its own."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return copy.deepcopy(optimizer, {id(parameter): parameter for parameter in parameters})


def _window(trainer: pl.Trainer, strategy: FSDPStrategy, batch: Any) -> None:
    """Micro-batches of an optimizer step, as Lightning's automatic optimization runs them."""
    module, number = trainer.lightning_module, trainer.accumulate_grad_batches
    for index in range(number):
        with nullcontext() if index == number - 1 else strategy.block_backward_sync():
            arguments = step_arguments(module, to_device(trainer, module, batch))
            loss = loss_in(strategy.training_step(*arguments)) / number
            if index == 0:
                for optimizer in strategy.optimizers:
                    optimizer.zero_grad()
            strategy.pre_backward(loss)
            loss.backward()


def _next_batch(trainer: pl.Trainer) -> Any:
    """One that training begins with; neither loaders nor random numbers are different afterwards."""
    ahead = getattr(trainer.fit_loop._data_fetcher, "batches", None)
    if ahead:
        return ahead[0][0]
    loaders = trainer.fit_loop._combined_loader
    assert loaders is not None
    if any(read_once_source(loader) is not None for loader in loaders.flattened):
        raise ValueError("the training loader can be read only once")
    return first_batch(loaders)[0]
