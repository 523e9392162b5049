"""Ranks on which FSDP with checkpointing and OSDP's plans take turns, as plans all of them."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.families import build
from benchmarks.testbed.beside_fsdp.lightning_fsdp import Way
from benchmarks.testbed.beside_fsdp.turns import fastest_of_slowest
from benchmarks.testbed.ring import ring_reduce_scatters
from benchmarks.testbed.step import Step, time_in_turns
from lightning_osdp import (
    Cluster,
    ModelProfile,
    PlanMethod,
    SearchSpace,
    make_plan,
    measure_cluster,
    profile_model,
    simulate,
)
from lightning_osdp.core.plans.plan import Plan
from lightning_osdp.strategy.runtime.all_ranks import in_step


@dataclass(frozen=True, kw_only=True)
class Entrant:
    """One that takes part: what is predicted, and what was measured."""

    name: str
    plan: str
    """As JSON."""
    predicted_bytes: int
    predicted_s: float
    measured_s: float = 0.0
    """Fastest step of the slowest rank."""


def on_one_rank(*, model: str, limit_bytes: int, micro_batch_size: int, num_rounds: int) -> dict[str, Any]:
    """What every rank runs: profiles, measures the links, plans, and takes steps in turns.

    Args:
        model: name of a family.
        limit_bytes: of OSDP's plans.
        micro_batch_size: samples of a rank and step.
        num_rounds: timed steps.

    Returns:
        Fields of the `Entrant`s, and the seconds that computing and the least traffic take.
    """
    with ring_reduce_scatters():
        cluster = measure_cluster(torch.device("cpu"))
        profile = profile_model(
            build(model), build(model).batch(micro_batch_size), activations=("keep", "recompute"), together=in_step
        )
        found: list[Any] = [None]
        if dist.get_rank() == 0:
            entrants = []
            made = _plans(model, profile, cluster, limit_bytes=limit_bytes, micro_batch_size=micro_batch_size)
            for name, plan in made.items():
                estimate = simulate(plan, profile, cluster)
                entrants.append(
                    Entrant(
                        name=name,
                        plan=replace(plan, memory_limit_bytes=2**62).to_json(),
                        predicted_bytes=estimate.peak.peak_bytes,
                        predicted_s=estimate.time_s,
                    )
                )
            kept = make_plan(profile, cluster, memory_limit_bytes=2**62, micro_batch_size=micro_batch_size)
            found = [(entrants, simulate(kept, profile, cluster).time_s)]
        dist.broadcast_object_list(found, src=0)
        entrants, bound_s = found[0]
        steps = {each.name: Step(build(model), Plan.from_json(each.plan)) for each in entrants}
        fastest = fastest_of_slowest(time_in_turns(steps, num_rounds=num_rounds))
    return {
        "bound_s": bound_s,
        "entrants": [asdict(replace(each, measured_s=fastest[each.name])) for each in entrants],
    }


FSDP, PAPERS_FSDP = "FSDP, a unit for each block", "FSDP, a unit for each Linear"
_FSDP = Way(sharding="FULL_SHARD", is_fully_shard=True, by_operator=True, recomputes=True)
EVERYWHERE, BY_BLOCK = "OSDP, all blocks recompute", "OSDP, block by block"


def _plans(
    model: str, profile: ModelProfile, cluster: Cluster, *, limit_bytes: int, micro_batch_size: int
) -> dict[str, Plan]:
    sizes = {"world_size": cluster.world_size, "micro_batch_size": micro_batch_size}
    osdp = partial(make_plan, profile, cluster, memory_limit_bytes=limit_bytes, micro_batch_size=micro_batch_size)
    blocks = [block.name for block in profile.blocks]
    return {
        FSDP: replace(_FSDP, by_operator=False).plan(build(model), **sizes),
        PAPERS_FSDP: Way(sharding="FULL_SHARD", is_fully_shard=True, by_operator=True, recomputes=True).plan(
            build(model), **sizes
        ),
        EVERYWHERE: osdp(method=PlanMethod(blocks=dict.fromkeys(blocks, "recompute"))),
        BY_BLOCK: osdp(search_space=SearchSpace(activations=("keep", "recompute"))),
    }
