"""Correcting: factors for computing and links with which the steps of plans that have raced are predicted best.

All seconds of a step are either a rank's own or those of collectives. Where the former take c times as long and those
of a link c r times, a step takes c times as long as if the link alone took r times as long, whatever overlaps. So the
ratios r are searched for, and c follows from them by least squares.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from statistics import median
from typing import TypeAlias

from lightning_osdp.core.cluster import Cluster
from lightning_osdp.core.correction import LINKS, Correction
from lightning_osdp.core.plans.plan import Plan
from lightning_osdp.core.profile import ModelProfile
from lightning_osdp.planner.engine import engine_of
from lightning_osdp.planner.simulation import planned_step, seconds_by_link

MOST = 4.0
"""Factor by which seconds are corrected at most, up or down: measuring is not that far off."""
MOST_ERROR = 0.1
"""Fraction that corrected predictions may be off by: beyond it, something else is wrong with them."""
TOLD_APART = 1.5
"""Factor, up or down, that the ratio of a link to computing may be off by in steps that tell the two apart."""
LEAST_ERROR = 0.01
"""Fraction that medians of a few steps are taken to be off by at least."""
_FIRST_STEP, _LAST_STEP = MOST**2, 1.01
"""Factors by which ratios are changed in search of the best ones."""

StepSeconds: TypeAlias = Callable[[Callable[[str], float]], float]
"""Seconds of a plan's step as a function of a factor for collectives by link, see `seconds_by_link`."""
_Ratios: TypeAlias = tuple[float, ...]


def correction_of(
    plans: Sequence[Plan], seconds: Sequence[Sequence[float]], profile: ModelProfile, cluster: Cluster
) -> Correction | str:
    """The correction with which the steps of plans are predicted best; or why they tell none.

    Args:
        plans: of one model; all their blocks are in the profile.
        seconds: measured steps of each plan; one with more of them counts for more.
        profile: of the model.
        cluster: ranks and links.
    """
    if any(plan.cost_model != "simulate" for plan in plans):
        return "predictions are the paper's sums"
    timed = [seconds_by_link(*planned_step(plan, profile, cluster), engine=engine_of(plan)) for plan in plans]
    return nearest(timed, seconds, links=LINKS[:1] if cluster.within_node is None else LINKS)


def nearest(
    timed: Sequence[StepSeconds], seconds: Sequence[Sequence[float]], *, links: Sequence[str] = LINKS[:1]
) -> Correction | str:
    """The correction with which these steps are predicted best; or why they tell none.

    A link that hardly matters to any step is not corrected. Steps tell nothing of one that may as well take
    `TOLD_APART` times as many seconds beside computing, or as few: where, with all else at its best, squares of errors
    are not larger then by those of two standard deviations.

    Args:
        timed: predicted seconds of each plan.
        seconds: measured steps of each.
        links: that collectives may take.

    References:
        Venzon and Moolgavkar (1988), A Method for Computing Profile-Likelihood-Based Confidence Intervals.
    """
    steps = _Steps(timed, seconds, links)
    as_measured = (1.0,) * len(links)
    free = [place for place in range(len(links)) if steps.depend_on(place)]
    number, num_factors = len(timed), 1 + len(free)
    if number <= num_factors:
        return f"{number} plans are too few to tell {num_factors} factors"
    best = steps.nearest(as_measured, free)
    found = steps.corrected(best)
    if found.error > MOST_ERROR:
        return f"predictions would be {found.error:.0%} off at best"
    significant = 4 * max(LEAST_ERROR**2, number * found.error**2 / (number - num_factors))
    for place in free:
        for factor in (TOLD_APART, 1 / TOLD_APART):
            other = steps.nearest(_moved(best, place, factor), [each for each in free if each != place])
            if number * (steps.corrected(other).error ** 2 - found.error**2) < significant:
                return "its plans do not tell apart what is off of computing and of links"
    unused = {link: 1.0 for place, link in enumerate(links) if place not in free}
    found = replace(found, links={**found.links, **unused})
    if not all(1 / MOST <= factor <= MOST for factor in (found.computing, *found.links.values())):
        return f"predictions would be best with seconds that are more than {MOST:g} times as many, or as few"
    return replace(found, error_before=steps.error(steps.parts(as_measured)))


class _Steps:
    """Predicted and measured steps of plans."""

    def __init__(self, timed: Sequence[StepSeconds], seconds: Sequence[Sequence[float]], links: Sequence[str]) -> None:
        self.timed, self.seconds, self.links = timed, seconds, links
        self._known: dict[_Ratios, Correction] = {}

    def error(self, parts: Sequence[float]) -> float:
        """Root mean square of what these parts of the measured seconds are off by, weighted by numbers of steps."""
        squares = (len(own) * (part - 1) ** 2 for own, part in zip(self.seconds, parts, strict=True))
        return math.sqrt(sum(squares) / sum(map(len, self.seconds)))

    def parts(self, ratios: _Ratios) -> list[float]:
        """Predicted seconds over measured ones if links take so many times as long, and computing as measured."""
        factor = Correction(links=dict(zip(self.links, ratios, strict=True))).factor
        return [timed(factor) / median(own) for timed, own in zip(self.timed, self.seconds, strict=True)]

    def corrected(self, ratios: _Ratios) -> Correction:
        """The best correction in which links take so many times as long as computing."""
        if ratios not in self._known:
            parts = self.parts(ratios)
            weighted = [len(own) * part for own, part in zip(self.seconds, parts, strict=True)]
            computing = sum(weighted) / sum(each * part for each, part in zip(weighted, parts, strict=True))
            self._known[ratios] = Correction(
                computing=computing,
                links={link: computing * ratio for link, ratio in zip(self.links, ratios, strict=True)},
                error=self.error([computing * part for part in parts]),
                num_plans=len(self.timed),
            )
        return self._known[ratios]

    def depend_on(self, place: int) -> bool:
        """Tells whether a link matters to any step, however slow it is."""
        before, after = (self.parts(_moved((1.0,) * len(self.links), place, each)) for each in (1.0, MOST**2))
        return any(other > (1 + LEAST_ERROR) * one for one, other in zip(before, after, strict=True))

    def nearest(self, ratios: _Ratios, free: Collection[int]) -> _Ratios:
        """The best ratios found from these on, by ever smaller steps of those that are free."""
        step = _FIRST_STEP
        while step > _LAST_STEP:
            tried = [_moved(ratios, place, factor) for place in free for factor in (step, 1 / step)]
            # what only rounding makes better is not
            found = min((ratios, *tried), key=lambda each: round(self.corrected(each).error, 6))
            ratios, step = found, step if found != ratios else math.sqrt(step)
        return ratios


def _moved(ratios: _Ratios, place: int, factor: float) -> _Ratios:
    """Ratios with one of them so many times as large, within those that corrections may have."""
    moved = min(max(ratios[place] * factor, 1 / MOST**2), MOST**2)
    return (*ratios[:place], moved, *ratios[place + 1 :])
