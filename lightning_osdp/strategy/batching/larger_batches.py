"""Batches that are larger than the one that a plan was made for."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from itertools import islice
from typing import Any

from lightning_osdp.callbacks.peak import elements_in
from lightning_osdp.callbacks.plan_monitor import num_samples

NUM_LOOKED_AT = 100
"""Batches of the loader, the longest of which is taken."""


def longest(batches: Iterable[Any]) -> Any:
    """The first of those with most elements among the first `NUM_LOOKED_AT`; None where there are none."""
    return max(islice(batches, NUM_LOOKED_AT), key=elements_in, default=None)


class BatchWatch:
    """Says, once, that a batch has more elements for a sample than the one that was profiled.

    Args:
        batch: that one.
    """

    def __init__(self, batch: Any) -> None:
        self._most = _elements_per_sample(batch)

    def look(self, batch: Any, rank: int) -> None:
        """Warns where training gives this rank such a batch."""
        found = _elements_per_sample(batch)
        if self._most and found > self._most:
            factor, self._most = found / self._most, float("inf")
            warnings.warn(
                f"OSDP: rank {rank} has a batch with {factor:.3g} times as many elements for a sample as the one that"
                " was profiled: steps with such batches take more memory and time than the plan says. Give it the"
                " largest: OSDPStrategy(profile_batch='longest').",
                stacklevel=2,
            )


def _elements_per_sample(batch: Any) -> float:
    return elements_in(batch) / max(1, num_samples(batch))
