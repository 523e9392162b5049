"""Ranks on which OSDP, ``fully_shard`` by hand and Lightning's strategies train the same units, in turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.utils._pytree import tree_leaves

from benchmarks.families import Family, build
from benchmarks.testbed.beside_fsdp.contest import after_the_first_steps
from benchmarks.testbed.beside_fsdp.lightning_fsdp import Way
from benchmarks.testbed.beside_fsdp.turns import Turns, fits_in_turns, seconds_of, slowest_ranks
from benchmarks.testbed.by_hand import gather_ahead, scatter_in_flight, waited_reduce_scatters
from benchmarks.testbed.memory import WARM_UP_STEPS, count_step
from benchmarks.testbed.training import quiet, train
from lightning_osdp.apply.internals import gathering
from lightning_osdp.apply.updating.updates import stepping_on_rows
from lightning_osdp.callbacks.peak import living_tensors
from lightning_osdp.core.plans.plan import Plan
from lightning_osdp.planner.engine import effects_of
from lightning_osdp.profiler import LiveBytes

BY_HAND, BY_HAND_ON_ROWS = "fully_shard by hand", "fully_shard by hand, steps on rows"
BY_HAND_AHEAD = "fully_shard by hand, with prefetch"
REPLICATED = "fully_shard by hand, on a mesh of N x 1"
"""Units are whole on every rank, as under DDP, and their gradients are all-reduced."""
OSDP, LIGHTNING, DDP = "OSDP", "FSDPStrategy", "DDPStrategy"
CONTESTANTS = (BY_HAND, BY_HAND_AHEAD, BY_HAND_ON_ROWS, REPLICATED, OSDP, LIGHTNING, DDP)
_BY_HAND: dict[str, dict[str, bool]] = {
    BY_HAND: {},
    BY_HAND_AHEAD: {"is_prefetched": True},
    BY_HAND_ON_ROWS: {"on_rows": True},
    REPLICATED: {"is_replicated": True},
}
_SHARDINGS: dict[str, str] = {"ZDP": "FULL_SHARD", "DP": "SHARD_GRAD_OP"}
_NUM_COUNTED = 5
"""Steps, of whose peaks the least counts: a thread of gloo may hold a tensor longer than a step does."""


class ByHand:
    """Code of a user who knows ``fully_shard`` and wants nothing else; all-gathers are asynchronous.

    Args:
        module: which is sharded in place.
        plan: whose units it gets, and whose samples; they are all in one mode, and there is one micro-batch.
        on_rows: whether its optimizer computes on rows, as it does in OSDP, instead of DTensors.
        is_replicated: whether every rank has all of every unit.
        is_in_flight: whether its units reduce while backward computes, as OSDP's do.
        is_prefetched: whether each unit gathers the next one ahead, in forward and in backward, as OSDP's may.
    """

    def __init__(
        self,
        module: Family,
        plan: Plan,
        *,
        on_rows: bool = False,
        is_replicated: bool = False,
        is_in_flight: bool = True,
        is_prefetched: bool = False,
    ) -> None:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        if is_replicated:
            mesh = init_device_mesh("cpu", (dist.get_world_size(), 1), mesh_dim_names=("copies", "shards"))
        blocks: list[Any] = []
        for unit in plan.units:
            if unit.name:
                blocks.append(module.get_submodule(unit.name))
                fully_shard(blocks[-1], mesh=mesh, reshard_after_forward=not effects_of(unit.treatments[0]).is_kept)
        fully_shard(module, mesh=mesh)
        if is_prefetched:
            gather_ahead(module, blocks)
        register_fsdp_forward_method(module, "loss")
        gathering.set_asynchronous(module, is_asynchronous=True)
        if is_in_flight:
            scatter_in_flight(module)
        self.module, self.batch = module, module.batch(plan.micro_batch_size)
        self.optimizer = module.configure_optimizers()
        self._stepping: Callable[..., Any] = stepping_on_rows if on_rows else nullcontext

    def __call__(self) -> None:
        """Takes one step."""
        loss = self.module.loss(self.batch)
        self.optimizer.zero_grad()
        loss.backward()
        with self._stepping(self.optimizer):
            self.optimizer.step()


def plan_for(module: Family, *, mode: str, world_size: int) -> Plan:
    """Plan with every block a unit in this mode, one sample a step."""
    plan = Way(sharding=_SHARDINGS[mode]).plan(module, world_size=world_size, micro_batch_size=1)
    return replace(plan, asynchronous_unshard=True)


def times(*, model: str, mode: str, contestants: Sequence[str], num_rounds: int) -> dict[str, list[float]]:
    """Seconds of every step of each, one sample, on the rank that is slowest in it. Call it on all ranks."""
    fits = {name: partial(_fit, name, model, mode, num_steps=1 + num_rounds) for name in contestants}
    with waited_reduce_scatters(), quiet(), after_the_first_steps():
        return slowest_ranks(seconds_of(fits_in_turns(fits, num_rounds=num_rounds)))


def peaks(*, model: str, mode: str, contestants: Sequence[str]) -> dict[str, int]:
    """Bytes of live storages that a step of each takes on this rank. Call it on all ranks."""
    with waited_reduce_scatters():
        return {name: _peak_bytes(name, model, mode) for name in contestants}


def _strategy(name: str, mode: str, module: Family) -> Any:
    """Lightning's own, or none where it is OSDP's."""
    shardings: dict[str, str] = {LIGHTNING: _SHARDINGS[mode], DDP: "DDP"}
    return Way(sharding=shardings[name]).strategy(module) if name in shardings else None


def _fit(name: str, model: str, mode: str, turns: Turns, *, num_steps: int) -> None:
    module = build(model)
    plan = plan_for(module, mode=mode, world_size=dist.get_world_size())
    if name not in _BY_HAND:
        train(module, plan, num_steps=num_steps, callbacks=[turns], strategy=_strategy(name, mode, module))
        return
    step = ByHand(module, plan, **_BY_HAND[name])
    for _ in range(num_steps):
        turns.begin()
        step()
        turns.end()


def _peak_bytes(name: str, model: str, mode: str) -> int:
    module = build(model)
    plan = plan_for(module, mode=mode, world_size=dist.get_world_size())
    if name not in _BY_HAND:
        return count_step(module, plan, num_steps=_NUM_COUNTED, strategy=_strategy(name, mode, module)).peak_bytes
    step = ByHand(module, plan, **_BY_HAND[name])
    for _ in range(WARM_UP_STEPS):
        step()
    return min(_counted(step) for _ in range(_NUM_COUNTED))


def _counted(step: ByHand) -> int:
    live = LiveBytes("cpu")
    live.track(living_tensors(step.module, [step.optimizer]))
    live.track(leaf for leaf in tree_leaves(step.batch) if isinstance(leaf, Tensor))
    with live:
        step()
    return live.peak_bytes
