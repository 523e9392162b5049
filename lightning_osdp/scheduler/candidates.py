"""Candidates: plans of one structure, to which a module may change while it is trained, and of which any may be best.

Predictions err by more than such plans differ, so steps of training are to tell which one is fastest, see `Race`.
Units, slices, micro-batches and the ranks that units are sharded over stay as planned. Candidates vary what forward
leaves of units, prefetching, blocks that recompute and, where rounding may differ, when gradients are reduced.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter

from lightning_osdp.assign import Modes, Setting, as_far_as_fits, assignment_of
from lightning_osdp.core.axes import Treatment
from lightning_osdp.core.cluster import Cluster
from lightning_osdp.core.plans.plan import Block, Plan
from lightning_osdp.core.profile import ModelProfile
from lightning_osdp.core.units import UnitProfile
from lightning_osdp.engine import FSDP2, effects_of
from lightning_osdp.scheduler.planned import holds_any, plan_of
from lightning_osdp.scheduler.planning import ANY_PREFETCH, planned_setting

MOST_SLOWER = 1.25
"""Predicted seconds, over those of the plan, up to which another one is a candidate; plain ones are so in any case."""
MOST_CANDIDATES = 5
"""Candidates that are not plain, the plan among them."""
CLOSE = 1.15
"""Predicted seconds, over those of the fastest, within which predictions leave open which one is faster."""

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

    def candidate(self, plan: Plan) -> Racer:
        """Plan that it is, in place of the one that it is a variant of."""
        made = plan_of(
            assignment_of(self.setting, self.modes, bound_s=0.0),
            memory_limit_bytes=plan.memory_limit_bytes,
            space=plan.search_space,
            most_samples_per_s=plan.samples_per_s * (1 + plan.gap),
            solver=plan.solver,
            all_zdp_step_time_s=plan.all_zdp_step_time_s,
            all_zdp_peak_bytes=plan.all_zdp_peak_bytes,
            all_zdp_how=plan.all_zdp_how,
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
                found.append(self.made(f"gradients reduced in {value} micro-batch", _all(reduce=value)))
        found += self._recomputing_otherwise()
        yield from (each for each in found if each is not None)

    def _recomputing_otherwise(self) -> Iterator[_Variant | None]:
        """Yields the plan without recomputation, and with all blocks recomputing, for memory that keeps more units."""
        plan = self.plan
        if "recompute" not in plan.search_space.activations or plan.given_blocks or self.planned.setting.is_paper:
            return
        if plan.blocks:
            yield self.made("no recomputation", _all(), blocks=())
            yield self.made("no recomputation, all ZDP", _all(keep="nothing"), blocks=())
        moving = [name for unit in plan.units if "moves" in unit.treatments[0] for name in unit.operators]
        names = [
            block.name
            for block in self.profile.blocks
            if "recompute" in block.segments and not holds_any(block.name, moving)
        ]
        if names:
            blocks = tuple(Block(name=name, treatment=Treatment(saves="recompute")) for name in names)
            yield self.with_most_kept("all blocks recomputing, fewer collectives", blocks)

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
        """Baseline whose units with a choice all leave this after forward; None where one of them is not offered it."""
        found, setting = self.made(name, _all(keep=keep)), self.planned.setting
        if found is None:
            return None
        offers = zip(setting.units, found.modes, setting.costs.options, strict=True)
        kept = {
            mode["keep"]
            for unit, mode, offered in offers
            if not unit.is_root and len({each["keep"] for each in offered}) > 1
        }
        return dataclasses.replace(found, is_plain=True) if kept == {keep} else None

    def with_most_kept(self, name: str, blocks: tuple[Block, ...]) -> _Variant | None:
        """Variant with as many more units kept from forward to backward as fit, the smallest first."""
        freed = [unit for unit, _ in self._by_size(is_kept=False)]
        found, fits, fails = self.made(name, _all(), blocks=blocks), 0, len(freed) + 1
        while found is not None and fails - fits > 1:
            number = (fits + fails) // 2
            more = self.made(name, _only(freed[:number], keep="whole"), blocks=blocks)
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
