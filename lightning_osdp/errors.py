"""Errors that this package raises on purpose; all derive from `OSDPError`."""

from __future__ import annotations


class OSDPError(Exception):
    """Base class of the errors that ``lightning_osdp`` raises on purpose."""


class ConfigurationError(OSDPError, ValueError):
    """An option has an impossible value, or two options contradict each other."""


class InfeasibleError(OSDPError):
    """No plan fits under the memory limit.

    The text names the limit, the least bytes that any plan needs, the three largest contributors and the nearest
    remedy.
    """


class PlanMismatchError(OSDPError):
    """A plan was made for another model or another number of ranks; the text names the first differences."""


class PlanFormatError(OSDPError, ValueError):
    """A plan, profile or cluster cannot be read from its file: not JSON, another schema, a missing or wrong entry."""


class ProfileError(OSDPError):
    """A model cannot be profiled, so no plan can be made; the text says why and what to do."""


class RanksApartError(OSDPError):
    """Ranks do different things, or one of them failed, so that all ranks stop."""


class CalledOffError(OSDPError):
    """A rank ran out of memory in a step that all ranks give up then, and may take again."""


class UntraceableError(ProfileError):
    """A training step cannot be run on fake tensors; the text says why, and its cause is attached."""


class ShardedParameterError(OSDPError, RuntimeError):
    """User code reads a whole parameter on a rank that has a shard; the text says where to read whole values."""
