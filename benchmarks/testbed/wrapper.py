"""Ranks on which FSDP1 by hand, Lightning's strategy and OSDP's train under one and the same plan, in turns."""

from __future__ import annotations

from functools import partial

import torch
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from benchmarks.families import build
from benchmarks.testbed.contest import no_steps_counted
from benchmarks.testbed.lightning_fsdp import Way
from benchmarks.testbed.training import quiet, train
from benchmarks.testbed.turns import Turns, fits_in_turns, slowest_ranks
from examples.mingpt.model import Block

BY_HAND, LIGHTNING, OSDP = "FSDP1 by hand", "FSDPStrategy", "OSDPStrategy"
_WAY = Way(sharding="FULL_SHARD")


def on_one_rank(*, model: str, world_size: int, num_rounds: int) -> dict[str, list[float]]:
    """Seconds of every step of each, one sample, on the rank that is slowest in it.

    Args:
        model: name of a family of blocks.
        world_size: N.
        num_rounds: timed steps of each.
    """
    plan = _WAY.plan(build(model), world_size=world_size, micro_batch_size=1)
    num_steps = 1 + num_rounds

    def through_trainer(turns: Turns, *, is_osdp: bool) -> None:
        strategy = None if is_osdp else _WAY.strategy()
        train(build(model), plan, num_steps=num_steps, callbacks=[turns], strategy=strategy)

    fits = {
        BY_HAND: partial(_by_hand, model, num_steps=num_steps),
        LIGHTNING: partial(through_trainer, is_osdp=False),
        OSDP: partial(through_trainer, is_osdp=True),
    }
    with quiet(), no_steps_counted():
        return slowest_ranks(fits_in_turns(fits, num_rounds=num_rounds))


def _by_hand(model: str, turns: Turns, *, num_steps: int) -> None:
    """What a user writes who knows FSDP1 and wants nothing else."""
    module = build(model)
    batch = module.batch(1)
    module.forward = module.loss  # type: ignore[method-assign]  # FSDP's hooks are around forward
    root = FullyShardedDataParallel(
        module,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        sharding_strategy=ShardingStrategy.FULL_SHARD,
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )
    optimizer = module.configure_optimizers()
    for _ in range(num_steps):
        turns.begin()
        loss = root(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        turns.end()
