"""What the planner may choose from."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_osdp.core.modes import MODES
from lightning_osdp.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class SearchSpace:
    """Limits on the decisions of a plan.

    Raises:
        ConfigurationError: a mode that does not exist, none at all, or a negative number of bytes.
    """

    modes: tuple[str, ...] = tuple(MODES)
    """Sharding modes that a unit may take: ``("ZDP",)`` is plain FSDP, ``("DP",)`` keeps all parameters gathered."""
    min_unit_bytes: int | None = None
    """Operators with fewer parameter bytes join their parent's unit; None: 64 KiB, or 1% of the model if less."""
    share_units: bool = True
    """Whether adjacent operators of one mode may share a unit where that is predicted to be faster and fits."""

    def __post_init__(self) -> None:
        unknown = [mode for mode in self.modes if mode not in MODES]
        if unknown or not self.modes:
            raise ConfigurationError(
                f"SearchSpace(modes=...) must name at least one of {tuple(MODES)}, got {self.modes!r}."
            )
        if self.min_unit_bytes is not None and self.min_unit_bytes < 0:
            raise ConfigurationError(
                f"SearchSpace(min_unit_bytes=...) must be None or at least 0, got {self.min_unit_bytes!r}."
            )
