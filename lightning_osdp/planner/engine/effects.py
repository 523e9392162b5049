"""Effects: what the treatment of a unit does in an optimizer step, whatever its values are called.

Everything else that the planner knows of a treatment follows from these: the schedule of events, bytes that are alive,
seconds of collectives and of the runtime, the closed form of the peak, and what clocks and bounds tell apart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

from lightning_osdp.core.affine import ZERO, Affine
from lightning_osdp.core.axes import LEVELS, Treatment
from lightning_osdp.core.cluster import UNIT_PARTS
from lightning_osdp.core.plans.parts import Unit
from lightning_osdp.core.profile import BlockProfile
from lightning_osdp.core.step import Step
from lightning_osdp.core.units import UnitProfile
from lightning_osdp.planner.engine.events import (
    COLLECTIVES,
    EXCHANGES_OVER,
    GATHER_OVER,
    GATHERS,
    OVERHEAD,
    Collective,
    Kind,
)


@dataclass(frozen=True, kw_only=True)
class Effects:
    """Effects of a treatment on one unit. Ranks are ``all``, those of a ``node``, or ``one``: `Cluster.num_ranks`."""

    sharded_over: str
    """Ranks that the unit is sharded over between steps."""
    left_over: str
    """Ranks over which forward leaves it sharded: it holds 1/n of it on each of n. On ``one`` it stays unsharded until
    its backward is over."""
    reductions: tuple[tuple[Kind, ...], tuple[Kind, ...]]
    """Events of its complete gradients, if it has any: in every micro-batch but the last, and in the last one."""
    stays: bool = False
    """True if the part that forward leaves stays from one micro-batch to the next."""
    is_resident: bool = False
    """True if that part stays from one step to the next, too, and in evaluations: a fit gathers the unit once."""
    exchanges: bool = False
    """True if the unit is never gathered: activations of its operators go to the ranks that hold its shards."""
    updates_on_host: bool = False
    """True if states of the optimizer are in memory of the host, which updates the unit's shard: with a copy of the
    shard and of its gradient, from where the shard is copied back; or the shard that is there."""
    shard_on_host: bool = False
    """True if the unit's shard is in memory of the host, and copied to the device for each all-gather of it. So are
    its gradients, once they are reduced."""

    @property
    def is_on_host(self) -> bool:
        """True if anything of the unit is in memory of the host between steps."""
        return self.updates_on_host or self.shard_on_host

    @property
    def is_passed_over(self) -> bool:
        """True if steps gather nothing of the unit, and so lists of units to gather ahead pass over it."""
        return self.is_resident or self.exchanges

    @property
    def is_replicated(self) -> bool:
        """True if each rank has all of the unit between steps."""
        return self.sharded_over == "one"

    @property
    def is_kept(self) -> bool:
        """True if the unit is unsharded from its forward to the end of its backward."""
        return self.left_over == "one"

    @property
    def leaves_shard(self) -> bool:
        """True if forward leaves a shard of the unit that is larger than its shard between steps."""
        return not self.is_kept and self.left_over != self.sharded_over

    @cached_property
    def holds_whole_gradients(self) -> bool:
        """True if its gradients are whole from one micro-batch to the next."""
        return "accumulate" in self.reductions[0]

    @property
    def waits(self) -> bool:
        """True if the last micro-batch reduces gradients in another way than earlier ones."""
        return self.reductions[0] != self.reductions[1]

    def counts(self, unit: UnitProfile | Unit | None = None, *, num_micro_batches: int = 1) -> Mapping[Kind, int]:
        """Number of times that an optimizer step issues each collective, or leaves gradients whole, by kind of event.

        A unit is gathered at each call in forward, and at each that backward comes to: less those that find it there.
        One that is kept is there at all calls in forward, and at the first that backward comes to; after that nothing
        is left of it but what is sharded between steps. A resident one was gathered in the first step, which is not
        counted. One that exchanges activations does so twice in forward and twice in backward, and where it is sharded
        in the node, gradients of its shard are summed between nodes. A frozen one reduces nothing. A shard on the host
        is copied for each all-gather of it. Where no unit is given, it is one that is trained, and that forward calls
        once; so often is one of a plan called.
        """
        return _counts(self, *_calls(unit), num_micro_batches)

    def collectives(
        self, unit: UnitProfile | Unit | None = None, *, num_micro_batches: int = 1
    ) -> Mapping[Collective, int]:
        """Counts by collective, in the order of `COLLECTIVES`, without collectives that are not issued."""
        return _collectives(self, *_calls(unit), num_micro_batches)

    def overheads(self, unit: UnitProfile | None = None, *, num_micro_batches: int = 1) -> Mapping[str, int]:
        """Counts by part of `Cluster.unit_overhead`."""
        return _overheads(self, *_calls(unit), num_micro_batches)


def _calls(unit: UnitProfile | Unit | None) -> tuple[int, int, bool]:
    """Calls of a unit in forward, those of them at which backward gathers the unit, and whether it has gradients."""
    if unit is None:
        return 1, 1, True
    if isinstance(unit, Unit):
        return 1, int(unit.is_read), unit.gradient_bytes != 0
    num_reached = sum(last >= unit.trained_from for _, last in unit.calls) if unit.is_read else 0
    return len(unit.calls), num_reached, unit.gradient_bytes > 0


@lru_cache(maxsize=2**12)
def _counts(
    effects: Effects, num_calls: int, num_reached: int, has_gradients: bool, num_micro_batches: int
) -> Mapping[Kind, int]:
    counts, first = Counter[Kind](), max(1, num_reached)
    if effects.exchanges:
        counts.update(dict.fromkeys(EXCHANGES_OVER[effects.sharded_over], num_micro_batches))
    elif not effects.is_resident:
        counts[GATHER_OVER[effects.sharded_over]] += first * (1 if effects.stays else num_micro_batches)
    if not (effects.exchanges or effects.is_kept):
        counts[GATHER_OVER[effects.left_over]] += (num_calls + num_reached - first) * num_micro_batches
    if effects.shard_on_host:
        counts["copy_in"] = counts[GATHER_OVER[effects.sharded_over]]
    for kinds, number in zip(effects.reductions, (num_micro_batches - 1, 1), strict=True):
        for kind in kinds if has_gradients else ():
            counts[kind] += number
    return counts


@lru_cache(maxsize=2**12)
def _collectives(effects: Effects, *calls_and_micro_batches: int) -> Mapping[Collective, int]:
    counts = _counts(effects, *calls_and_micro_batches)
    found: dict[Collective, int] = {}
    for kind, collective in COLLECTIVES.items():
        if counts[kind]:
            found[collective] = found.get(collective, 0) + counts[kind]
    return found


@lru_cache(maxsize=2**12)
def _overheads(
    effects: Effects, num_calls: int, num_reached: int, has_gradients: bool, num_micro_batches: int
) -> Mapping[str, int]:
    counts = _counts(effects, num_calls, num_reached, has_gradients, num_micro_batches)
    found = dict.fromkeys(UNIT_PARTS, 0)
    if effects.is_resident:
        found["stay"] = num_micro_batches if has_gradients else 1
    elif not effects.exchanges:
        found["flatten"] = num_micro_batches
    for kind, part in OVERHEAD.items():
        found[part] += counts[kind]
    return found


def num_all_gathers(counts: Mapping[Kind, int]) -> int:
    """Number of all-gathers, over whatever ranks, among `Effects.counts`."""
    return sum(number for kind, number in counts.items() if kind in GATHERS)


_REDUCTIONS: Mapping[tuple[str, str], tuple[tuple[Kind, ...], tuple[Kind, ...]]] = {
    ("all", "every"): (("reduce",), ("reduce",)),
    ("all", "last"): (("accumulate",), ("reduce",)),
    ("node", "every"): (("reduce_in_node", "all_reduce"), ("reduce_in_node", "all_reduce")),
    ("node", "node"): (("scatter_in_node",), ("reduce_in_node", "all_reduce")),
    ("node", "last"): (("accumulate",), ("reduce_in_node", "all_reduce")),
    ("one", "every"): (("reduce_whole",), ("reduce_whole",)),
    ("one", "last"): (("accumulate",), ("reduce_whole",)),
}
"""Ranks that a unit is sharded over, and which micro-batches reduce its gradients -> `Effects.reductions`."""


@lru_cache(maxsize=2**10)
def effects_of(treatment: Treatment) -> Effects:
    """Effects of a unit's treatment on several ranks."""
    home = treatment["home"]
    if treatment["moves"] == "activations":
        sums: tuple[Kind, ...] = ("sum_between",) if home == "node" else ()
        return Effects(sharded_over=home, left_over=home, reductions=(sums, sums), exchanges=True)
    left_over = {"nothing": home, "node": "node", "whole": "one", "always": "one"}[treatment["keep"]]
    is_resident = treatment["keep"] == "always" or home == "one"
    reductions = _REDUCTIONS[home, treatment["sync"]]
    return Effects(
        sharded_over=home,
        left_over=left_over,
        reductions=reductions,
        stays=is_resident or (left_over == "one" and "accumulate" in reductions[0]),
        is_resident=is_resident,
        updates_on_host=treatment["states"] == "host",
        shard_on_host=treatment["shard"] == "host",
    )


class BlockEffects(NamedTuple):
    """Work of a block in one micro-batch beside its forward and backward."""

    reruns: bool
    """True if the block runs its forward again in backward."""
    rerun_s: Affine
    """Seconds of the second forward."""
    copied_bytes: Affine
    """Bytes that its forward copies to host memory, and its backward back."""


class Saving(NamedTuple):
    """Fate of the tensors that a block saves."""

    reruns: bool
    """True if backward runs the block's forward again, for some or all of them."""
    copies: bool
    """True if they, or the inputs of a block that runs again, go to host memory and back."""


SAVING: Mapping[str, Saving] = {
    "keep": Saving(reruns=False, copies=False),
    "recompute": Saving(reruns=True, copies=False),
    "offload": Saving(reruns=False, copies=True),
    "recompute_offload": Saving(reruns=True, copies=True),
    **dict.fromkeys(LEVELS, Saving(reruns=True, copies=False)),
}
"""Values of ``saves`` -> what they do; how many bytes and seconds that takes is profiled."""


def block_effects(block: BlockProfile, choice: str) -> BlockEffects:
    """Effects of a value of ``saves``."""
    if choice in block.levels:
        return BlockEffects(True, block.levels[choice].rerun_s, ZERO)
    reruns = SAVING[choice].reruns
    return BlockEffects(reruns, block.rerun_s if reruns else ZERO, block.copied_bytes.get(choice, ZERO))


FREED = Effects(sharded_over="all", left_over="all", reductions=_REDUCTIONS["all", "every"])
"""Effects with the fewest bytes: the unit is freed after forward, and reduces its gradients at once."""
KEPT = replace(FREED, left_over="one")


def effects_in(step: Step, modes: Sequence[Treatment]) -> list[Effects]:
    """Effects of these modes, one per unit; one rank leaves no gradients to be reduced later."""
    found = [effects_of(mode) for mode in modes]
    if step.cluster.world_size > 1:
        return found
    return [replace(each, reductions=FREED.reductions, stays=False) if each.waits else each for each in found]
