"""Candidates: plans of one structure, to which a module may change while it is trained, and of which any may be best.

Predictions err by more than such plans differ, so steps of training are to tell which one is fastest, see `Race`.
Units, slices, micro-batches and the ranks that units are sharded over stay as planned. Candidates vary what forward
leaves of units, prefetching, blocks that recompute and, where rounding may differ, when gradients are reduced.
`thriftier` finds one for a longer batch, and `room_for_longer` tells how long a batch each of them has room for.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter

from lightning_osdp.core.cluster import Cluster
from lightning_osdp.core.plans.parts import Block
from lightning_osdp.core.plans.plan import Plan
from lightning_osdp.core.profile import ModelProfile
from lightning_osdp.core.units import UnitProfile
from lightning_osdp.planner.assign import Modes, Setting, as_far_as_fits, assignment_of
from lightning_osdp.planner.cost import evaluation_peak
from lightning_osdp.planner.engine import FSDP2, effects_of
from lightning_osdp.planner.scheduler.planned import may_recompute, plan_of
from lightning_osdp.planner.scheduler.planning import ANY_PREFETCH, planned_setting
from lightning_osdp.planner.scheduler.replanning.known_batches import Room

MOST_SLOWER = 1.25
"""Predicted seconds, over those of the plan, up to which another one is a candidate; plain ones are so in any case."""
MOST_CANDIDATES = 5
"""Candidates that are not plain, the plan among them."""
CLOSE = 1.15
"""Predicted seconds, over those of the fastest, within which predictions leave open which one is faster."""
ROOMY = 0.8
"""Part of the memory limit that the second plan for a longer batch takes at most, where one can: the next may be longer
yet."""
MOST_LONGER = 8
"""Factor up to which `room_for_longer` looks."""
_NUM_HALVINGS = 4
"""Sizes that `room_for_longer` tries between the batch and the longest one; between two of them peaks are at most the
chord, for a peak is a largest sum of bytes that grow by the sample."""
_NUM_SHARES = 4
"""Steps in which `thriftier` has more blocks recompute, up to all."""
_STAY = ("home", "moves")
"""Axes of units that no change of plan changes while training goes on."""

_Change = Callable[[UnitProfile], dict[str, str]]
"""Values of axes that a unit is to have; where these are not offered for the unit, it stays as planned."""


@dataclass(frozen=True, kw_only=True)
class Racer:
    """A plan with its name in sentences."""

    name: str
    plan: Plan
    is_plain: bool = False
    """True of baselines, which have all units DP or all units ZDP."""


def candidates(
    plan: Plan, profile: ModelProfile, cluster: Cluster, *, engine: FSDP2 = ANY_PREFETCH, may_round: bool = False
) -> tuple[Racer, ...]:
    """The plan first, then others that are predicted to fit its memory limit, the fastest first and plain ones last.

    The user's search space and prefetch settings hold for all, and `check_change` lets each follow any other.

    Args:
        plan: made for this model and cluster.
        profile: of the model.
        cluster: ranks and links.
        engine: settings of prefetching that candidates must keep; those that are ``"auto"`` may differ.
        may_round: also plans that reduce gradients in other micro-batches, which adds them up in another order.

    Raises:
        PlanMismatchError: the plan is for another model or another number of ranks.
        ConfigurationError: it has operators, slices or blocks that the model has not.
    """
    setting, modes = planned_setting(plan, profile, cluster)
    most_s = MOST_SLOWER * setting.costs.step_time_s(modes)
    planned = _Variant("the plan", setting, modes)
    made = [*_Variants(plan, profile, planned, engine).all(may_round=may_round)]
    found = {planned.run: planned}
    for each in sorted((each for each in made if each.is_plain or each.time_s <= most_s), key=attrgetter("time_s")):
        found.setdefault(each.run, each)
    others = [each for each in found.values() if each is not planned]
    chosen = [each for each in others if not each.is_plain][: MOST_CANDIDATES - 1]
    chosen += [each for each in others if each.is_plain]
    return (Racer(name="the plan", plan=plan), *(each.candidate(plan) for each in chosen))


def room_for_longer(plan: Plan, profile: ModelProfile, cluster: Cluster, *, num_samples: int) -> Room:
    """Factors by which a batch may be longer than the profiled one before the plan takes more than its memory limit.

    Bytes are taken to grow at most with the square of a dimension's length, as those of attention do: a batch that is r
    times as long takes at most as much as one of r^2 times as many samples. At most `MOST_LONGER`; 0 if not even the
    profiled batch fits.

    Args:
        plan: of the model, whatever its micro-batches have.
        profile: of the model on that batch.
        cluster: ranks and links.
        num_samples: samples in the batch.
    """
    setting, modes = planned_setting(plan.as_profiled(profile), profile, cluster)
    limit_bytes, most = plan.memory_limit_bytes, num_samples * MOST_LONGER**2

    def room(peak_bytes: Callable[[Setting], float]) -> float:
        fitting, exceeding = ((samples, peak_bytes(setting.at(samples))) for samples in (num_samples, most))
        if exceeding[1] <= limit_bytes:
            return MOST_LONGER
        if fitting[1] > limit_bytes:
            return 0.0
        for _ in range(_NUM_HALVINGS):
            middle = round(math.sqrt(fitting[0] * exceeding[0]))
            found = middle, peak_bytes(setting.at(middle))
            if found[1] <= limit_bytes:
                fitting = found
            else:
                exceeding = found
        share = (limit_bytes - fitting[1]) / (exceeding[1] - fitting[1])
        return math.sqrt((fitting[0] + share * (exceeding[0] - fitting[0])) / num_samples)

    return Room(
        training=room(lambda sized: sized.costs.exact_peak_bytes(modes)),
        evaluating=room(lambda sized: evaluation_peak(sized, modes, engine=sized.bytes_engine)),
    )


def thriftier(
    plan: Plan, profile: ModelProfile, cluster: Cluster, *, num_samples: int, engine: FSDP2 = ANY_PREFETCH
) -> tuple[Plan, ...]:
    """The fastest variants found of a plan for a longer batch: within its memory limit, then within `ROOMY` of it.

    The second has room for batches that are longer yet; where none is found, it is the one with least memory. One plan
    where both are the same; where none fits, the one with least memory, which takes more than the limit. As many units
    are kept as fit, the smallest first, and more and more blocks recompute, as far as the search space has that.
    Gradients are reduced as planned, so that the plans can follow even between two micro-batches. Predictions are those
    of the batch.

    Args:
        plan: in use for shorter batches.
        profile: of the model on the longer batch.
        cluster: ranks and links.
        num_samples: samples in the batch.
        engine: settings of prefetching that stay; those that are ``"auto"`` may differ.
    """
    found = []
    for share in (1.0, ROOMY):
        limit_bytes = round(share * plan.memory_limit_bytes)
        variants = _longer_variants(plan, profile, cluster, num_samples, engine, limit_bytes=limit_bytes)
        if made := [each for each in variants.thriftier() if each is not None]:
            found.append(variants.for_longer(plan, min(made, key=attrgetter("time_s"))))
    if len(found) < 2:
        found.append(thriftiest(plan, profile, cluster, num_samples=num_samples, engine=engine))
    return (*found,) if found[0].step_time_s < found[-1].step_time_s else (found[-1],)


def thriftiest(
    plan: Plan, profile: ModelProfile, cluster: Cluster, *, num_samples: int, engine: FSDP2 = ANY_PREFETCH
) -> Plan:
    """The variant of a plan that takes least memory for a longer batch, be it more than the limit.

    Arguments are those of `thriftier`, and gradients are reduced as planned, too.
    """
    variants = _longer_variants(plan, profile, cluster, num_samples, engine, limit_bytes=2**62)
    return variants.for_longer(plan, min(variants.least(), key=attrgetter("peak_bytes")))


def _longer_variants(
    plan: Plan, profile: ModelProfile, cluster: Cluster, num_samples: int, engine: FSDP2, *, limit_bytes: int
) -> _Variants:
    longer = dataclasses.replace(plan.as_profiled(profile), micro_batch_size=num_samples)
    planned = _Variant("the plan", *planned_setting(longer, profile, cluster))
    return _Variants(dataclasses.replace(longer, memory_limit_bytes=limit_bytes), profile, planned, engine)


def are_close(found: Sequence[Racer], cluster: Cluster) -> bool:
    """Tells whether predictions leave open which of some candidates is the fastest.

    They do where the best two are within `CLOSE`, and computing may hide communication: how far each slows down the
    other is what a simulated clock knows least about.
    """
    seconds = sorted(each.plan.step_time_s for each in found)
    return cluster.overlaps and cluster.world_size > 1 and len(seconds) > 1 and seconds[1] <= CLOSE * seconds[0]


@dataclass(frozen=True)
class _Variant:
    """A setting with modes of its units, which fit."""

    name: str
    setting: Setting
    modes: Modes
    is_plain: bool = False

    @property
    def run(self) -> object:
        """All that decides how a step runs."""
        return self.modes, tuple(sorted(self.setting.decided.blocks.items())), self.setting.engine

    @cached_property
    def time_s(self) -> float:
        """Predicted seconds of a step."""
        return self.setting.costs.step_time_s(self.modes)

    @cached_property
    def peak_bytes(self) -> int:
        """Predicted peak of a step."""
        return self.setting.costs.exact_peak_bytes(self.modes)

    def candidate(self, plan: Plan) -> Racer:
        """Plan that it is, in place of the one that it is a variant of."""
        made = plan_of(
            assignment_of(self.setting, self.modes, bound_s=0.0),
            memory_limit_bytes=plan.memory_limit_bytes,
            host_limit_bytes=plan.host_limit_bytes,
            space=plan.search_space,
            most_samples_per_s=plan.samples_per_s * (1 + plan.gap),
            solver=plan.solver,
            all_zdp_step_time_s=plan.all_zdp_step_time_s,
            all_zdp_peak_bytes=plan.all_zdp_peak_bytes,
            all_zdp_how=plan.all_zdp_how,
            correction=plan.correction,
        )
        return Racer(name=self.name, plan=dataclasses.replace(made, notes=plan.notes), is_plain=self.is_plain)


@dataclass(frozen=True)
class _Variants:
    """Variants of a plan, each with as much gathered ahead as fits."""

    plan: Plan
    profile: ModelProfile
    planned: _Variant
    engine: FSDP2

    def all(self, *, may_round: bool) -> Iterator[_Variant]:
        """Yields all that fit, among which may be equal ones."""
        plan, cluster = self.plan, self.planned.setting.cluster
        found: list[_Variant | None] = []
        if cluster.world_size > 1:
            found += [
                self._plain("all ZDP", keep="nothing"),
                self._plain("all DP", keep="whole"),
                self.with_most_kept("fewer collectives", plan.blocks),
                self.made("less memory", _only(self._largest_kept(), keep="nothing")),
            ]
            for ahead in self.engine.alternatives(overlaps=True, has_streams=cluster.has_streams):
                how = "all gathered ahead" if ahead.asynchronous_unshard else "synchronous all-gathers"
                late = "nothing gathered ahead" if ahead.asynchronous_unshard else "synchronous all-gathers, none ahead"
                found += [
                    self.made(how, _all(), ahead=ahead),
                    self.made(late, _all(), ahead=self.engine.without_prefetch(ahead)),
                ]
            for value in plan.search_space.sync if may_round and plan.num_micro_batches > 1 else ():
                found.append(self.made(f"gradients reduced in {value} micro-batch", _all(sync=value)))
        found += self._recomputing_otherwise()
        yield from (each for each in found if each is not None)

    @property
    def _may_recompute(self) -> Sequence[str] | None:
        """Names of blocks that can recompute; None where users or the paper's sums leave no choice of blocks."""
        plan, setting = self.plan, self.planned.setting
        if "recompute" not in plan.search_space.activations or plan.given_blocks or setting.is_paper:
            return None
        return [block.name for block in may_recompute(setting, self.planned.modes)]

    def _recomputing_otherwise(self) -> Iterator[_Variant | None]:
        """Yields the plan without recomputation, and with all blocks recomputing, for memory that keeps more units."""
        names = self._may_recompute
        if names is None:
            return
        if self.plan.blocks:
            yield self.made("no recomputation", _all(), blocks=())
            yield self.made("no recomputation, all ZDP", _all(keep="nothing"), blocks=())
        if names:
            yield self.with_most_kept("all blocks recomputing, fewer collectives", Block.recomputing(names))

    def thriftier(self) -> Iterator[_Variant | None]:
        """Yields variants with ever more blocks recomputing, each with as many units kept as fit."""
        for blocks in self._with_more_recomputing():
            yield self.with_most_kept("less memory", blocks, frees=True)

    def least(self) -> list[_Variant]:
        """Variants with nothing gathered ahead: with units freed or as planned, and blocks recomputing or as planned.

        A unit that is kept for ever may take less than the buffers of its all-gathers.
        """
        none_ahead = self.engine.without_prefetch(self.planned.setting.engine.all_ahead)
        choices = self._with_more_recomputing()
        found = (
            self.made("least memory", change, blocks=blocks, ahead=none_ahead)
            for blocks in dict.fromkeys((choices[0], choices[-1]))
            for change in (_all(keep="nothing"), _all())
        )
        return [each for each in found if each is not None]

    def for_longer(self, plan: Plan, chosen: _Variant) -> Plan:
        """Plan of one of these for longer batches, with limit and micro-batch of the plan that it takes over from."""
        made = chosen.candidate(dataclasses.replace(self.plan, memory_limit_bytes=plan.memory_limit_bytes)).plan
        return dataclasses.replace(made, micro_batch_size=plan.micro_batch_size)

    def _with_more_recomputing(self) -> Sequence[tuple[Block, ...]]:
        """Blocks as planned, then with more and more of the others recomputing."""
        planned = {block.name: block for block in self.plan.blocks}
        others = [name for name in self._may_recompute or () if name not in planned or planned[name].kept]
        chosen = []
        for share in range(_NUM_SHARES + 1):
            more = Block.recomputing(others[: math.ceil(len(others) * share / _NUM_SHARES)])
            chosen.append(tuple((planned | {block.name: block for block in more}).values()))
        return [*dict.fromkeys(chosen)]

    def made(
        self,
        name: str,
        change: _Change,
        *,
        blocks: tuple[Block, ...] | None = None,
        ahead: FSDP2 | None = None,
    ) -> _Variant | None:
        """Variant with units treated otherwise, and perhaps other blocks and prefetching; None where it exceeds."""
        plan, setting, modes = self.plan, self.planned.setting, self.planned.modes
        if blocks is not None and blocks != plan.blocks:
            other = dataclasses.replace(plan, blocks=blocks)
            setting, modes = planned_setting(other, self.profile, setting.cluster)
        ahead = setting.engine.all_ahead if ahead is None else ahead
        setting = dataclasses.replace(setting, engine=ahead, least_ahead=self.engine.without_prefetch(ahead))
        modes = tuple(
            wanted if not unit.is_root and (wanted := mode.but(**change(unit))) in offered else mode
            for unit, mode, offered in zip(setting.units, modes, setting.costs.options, strict=True)
        )
        fitting = as_far_as_fits(setting, modes, memory_limit_bytes=plan.memory_limit_bytes)
        return None if fitting is None else _Variant(name, fitting, modes)

    def _plain(self, name: str, *, keep: str) -> _Variant | None:
        """Baseline whose units with a choice all leave this after forward; None where one of them is not offered it.

        Units that are replicated, or move activations, stay so while training goes on, and have no choice.
        """
        found, setting = self.made(name, _all(keep=keep)), self.planned.setting
        if found is None:
            return None
        offers = zip(setting.units, found.modes, setting.costs.options, strict=True)
        kept = {
            mode["keep"]
            for unit, mode, offered in offers
            if not unit.is_root
            and len({each["keep"] for each in offered if each.only(*_STAY) == mode.only(*_STAY)}) > 1
        }
        return dataclasses.replace(found, is_plain=True) if kept == {keep} else None

    def with_most_kept(self, name: str, blocks: tuple[Block, ...], *, frees: bool = False) -> _Variant | None:
        """Variant with as many more units kept from forward to backward as fit, the smallest first.

        With ``frees`` units that are kept as planned have their turn like others, and are freed where they do not fit.
        """
        sizes, kept = self._by_size(is_kept=False), dict(self._by_size(is_kept=True)) if frees else {}
        units = [unit for unit, _ in sorted([*sizes, *kept.items()], key=lambda each: each[1])]

        def made(number: int) -> _Variant | None:
            more, left = {*units[:number]}.difference(kept), {*units[number:]} if frees else ()

            def change(unit: UnitProfile) -> dict[str, str]:
                return {"keep": "whole"} if unit.name in more else {"keep": "nothing"} if unit.name in left else {}

            return self.made(name, change, blocks=blocks)

        found, fits, fails = made(0), 0, len(units) + 1
        while found is not None and fails - fits > 1:
            number = (fits + fails) // 2
            more = made(number)
            if more is None:
                fails = number
            else:
                found, fits = more, number
        return found

    def _largest_kept(self) -> list[str]:
        """Names of the largest units that are kept from forward to backward, which have half of the bytes of all."""
        sizes = self._by_size(is_kept=True)
        left_bytes, names = sum(num_bytes for _, num_bytes in sizes) / 2, list[str]()
        for name, num_bytes in reversed(sizes):
            if left_bytes <= 0:
                break
            names.append(name)
            left_bytes -= num_bytes
        return names

    def _by_size(self, *, is_kept: bool) -> list[tuple[str, float]]:
        """Names and gathered bytes of units but the root that are kept, or that are not, the smallest first."""
        units = zip(self.planned.setting.units, self.planned.modes, strict=True)
        own = [unit for unit, mode in units if not unit.is_root and effects_of(mode).is_kept == is_kept]
        return sorted(((unit.name, unit.gathered_bytes) for unit in own), key=lambda each: each[1])


def _all(**values: str) -> _Change:
    return lambda _: values


def _only(names: Sequence[str], **values: str) -> _Change:
    return lambda unit: values if unit.name in names else {}
