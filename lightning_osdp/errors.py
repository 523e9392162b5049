"""What can go wrong, as types: every error that this package raises on purpose derives from `OSDPError`."""

from __future__ import annotations


class OSDPError(Exception):
    """Base class of the errors that ``lightning_osdp`` raises on purpose."""


class ConfigurationError(OSDPError, ValueError):
    """An option has a value that cannot be used, or two options contradict each other."""


class InfeasibleError(OSDPError):
    """No plan fits under the memory limit.

    The text names the limit, the least bytes that any plan needs, the three largest contributors and the nearest
    remedy.
    """


class PlanMismatchError(OSDPError):
    """A plan does not belong to this model or to this number of ranks; the text names the first differences."""


class PlanFormatError(OSDPError, ValueError):
    """A plan, profile or cluster cannot be read from its file: not JSON, another schema, a missing or wrong entry."""


class ProfileError(OSDPError):
    """The model cannot be profiled, and therefore cannot be planned; the text says why and what to do."""


class RanksApartError(OSDPError):
    """Ranks diverged: they were to do the same and did not, or one of them failed; all ranks stop."""


class UntraceableError(ProfileError):
    """A training step cannot be run on fake tensors; the text says why, and its cause is attached."""


class ShardedParameterError(OSDPError, RuntimeError):
    """The values of a whole parameter are read on a rank that has a shard of it; the text says where to read them."""
