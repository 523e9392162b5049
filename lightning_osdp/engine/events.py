"""What the host does in a step, one thing after the other."""

from __future__ import annotations

from typing import Literal, NamedTuple

Kind = Literal[
    "gather",
    "await",
    "linger",
    "forward",
    "free",
    "zero",
    "rerun",
    "backward",
    "flatten",
    "accumulate",
    "reduce",
    "release",
]
"""``gather``: an all-gather is issued. ``await``: what follows needs the gathered unit. ``linger``: what awaited it was
a forward that is run again. ``zero``: Lightning drops the gradients of the step before, between the first forward and
its backward. ``rerun``: forward again, in backward. ``flatten``: a unit's gradients are complete, before it is freed.
``reduce``: they are reduced and scattered. ``accumulate``: they are left whole for the next micro-batch. ``release``:
what a segment had saved is gone."""

GatherRule = Literal["frees", "computing", "copies"]
"""``frees``: until units before the latest two that were freed are no longer in use. ``computing``: for all computing
that was issued before. ``copies``: until all units before are copied out, in forward but for the latest one."""

MOST_SIMULATED = 3
"""Micro-batches that are gone through one by one: first, steady, last. Further ones are like the steady one."""


class Event(NamedTuple):
    """One thing that the host has done."""

    kind: Kind
    of: int
    """The segment that is run (``forward``, ``rerun``, ``backward``, ``release``), else the unit."""
