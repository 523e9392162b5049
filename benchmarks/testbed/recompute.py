"""Models whose blocks have to recompute, and ranks on which FSDP with checkpointing and OSDP's plans take turns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import override

from benchmarks.families import Family
from benchmarks.families.base import Batch
from benchmarks.families.text import MinGPT, next_token_loss
from benchmarks.testbed.plans import plan_of
from benchmarks.testbed.ring import ring_reduce_scatters
from benchmarks.testbed.step import Step, time_in_turns
from examples.mingpt.model import Block, GPTConfig
from lightning_osdp import Cluster, ModelProfile, SearchSpace, make_plan, measure_cluster, profile_model, simulate
from lightning_osdp.core import plan as plans
from lightning_osdp.core.plan import Plan


class NarrowDeep(MinGPT):
    """Ten million parameters in twelve blocks."""

    config = GPTConfig(vocabulary_size=256, sequence_length=128, num_layers=12, num_heads=4, hidden_size=256)


class WideShallow(MinGPT):
    """38 million parameters in three blocks."""

    config = GPTConfig(vocabulary_size=256, sequence_length=128, num_layers=3, num_heads=8, hidden_size=1024)


class Tiny(MinGPT):
    """As quick as can be."""

    config = GPTConfig(vocabulary_size=32, sequence_length=16, num_layers=3, num_heads=2, hidden_size=32)


class ChangingWidth(Family):
    """22 million parameters in blocks of growing widths, with a projection where the width changes."""

    widths = (256, 256, 256, 512, 512, 768, 768)
    vocabulary_size, length = 256, 128

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__(optimizer)
        self.tokens = nn.Embedding(self.vocabulary_size, self.widths[0])
        self.blocks = nn.ModuleList(Block(GPTConfig(num_heads=4, hidden_size=width)) for width in self.widths)
        self.changes = nn.ModuleList(
            nn.Identity() if old == new else nn.Linear(old, new) for old, new in pairwise(self.widths)
        )
        self.head = nn.Linear(self.widths[-1], self.vocabulary_size)

    @override
    def loss(self, batch: Batch) -> Tensor:
        x = self.tokens(batch[0])  # (B, T, C)
        for block, change in zip(self.blocks, [*self.changes, nn.Identity()], strict=True):
            x = change(block(x))
        return next_token_loss(self.head(x), batch[1])

    @override
    def draw(self, num_samples: int) -> Batch:
        tokens = torch.randint(self.vocabulary_size, (num_samples, self.length + 1))
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


MODELS: Mapping[str, type[Family]] = {
    "narrow and deep": NarrowDeep,
    "wide and shallow": WideShallow,
    "of changing width": ChangingWidth,
    "tiny": Tiny,
}


def build(name: str) -> Family:
    """One of `MODELS`, with the same weights on every rank."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return MODELS[name]()


def fsdp_plan(
    module: Family, *, world_size: int, micro_batch_size: int, by_operator: bool, recomputes: bool, mode: str = "ZDP"
) -> Plan:
    """FSDP with all units in one mode, as a plan.

    Args:
        module: the model.
        world_size: N.
        micro_batch_size: samples.
        by_operator: whether every Linear is a unit, as the paper's baseline has it, or every block.
        recomputes: whether blocks are checkpointed, inside of their units or around the units inside.
        mode: ``"ZDP"`` for FULL_SHARD, ``"DP"`` for SHARD_GRAD_OP.
    """
    kind = nn.Linear if by_operator else Block
    names = [name for name, child in module.named_modules() if isinstance(child, kind)]
    plan = plan_of(module, dict.fromkeys(names, mode), world_size=world_size, micro_batch_size=micro_batch_size)
    blocks = [name for name, child in module.named_modules() if isinstance(child, Block)] if recomputes else []
    return replace(plan, blocks=tuple(plans.Block(name=name, activations="recompute") for name in blocks))


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
        model: of `MODELS`.
        limit_bytes: of OSDP's plans.
        micro_batch_size: samples of a rank and step.
        num_rounds: timed steps.

    Returns:
        Fields of the `Entrant`s, and the seconds that computing and the least traffic take.
    """
    with ring_reduce_scatters():
        cluster = measure_cluster(torch.device("cpu"))
        profile = profile_model(build(model), build(model).batch(micro_batch_size), activations=("keep", "recompute"))
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
        taken = time_in_turns(steps, num_rounds=num_rounds)
        seconds = torch.tensor([*taken.values()], dtype=torch.float64)
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        fastest = dict(zip(taken, seconds.min(1).values.tolist(), strict=True))
    return {
        "bound_s": bound_s,
        "entrants": [asdict(replace(each, measured_s=fastest[each.name])) for each in entrants],
    }


FSDP, PAPERS_FSDP = "FSDP, a unit for each block", "FSDP, a unit for each Linear"
EVERYWHERE, BY_BLOCK = "OSDP, all blocks recompute", "OSDP, block by block"


def _plans(
    model: str, profile: ModelProfile, cluster: Cluster, *, limit_bytes: int, micro_batch_size: int
) -> dict[str, Plan]:
    fsdp = partial(fsdp_plan, build(model), world_size=cluster.world_size, micro_batch_size=micro_batch_size)
    osdp = partial(make_plan, profile, cluster, memory_limit_bytes=limit_bytes, micro_batch_size=micro_batch_size)
    blocks = [block.name for block in profile.blocks]
    return {
        FSDP: fsdp(by_operator=False, recomputes=True),
        PAPERS_FSDP: fsdp(by_operator=True, recomputes=True),
        EVERYWHERE: osdp(blocks=dict.fromkeys(blocks, "recompute")),
        BY_BLOCK: osdp(search_space=SearchSpace(activations=("keep", "recompute"))),
    }
