"""A device that one does not have, by what it can do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lightning_osdp.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class DeviceRates:
    """What a device reaches, for planning without it; a data sheet's numbers are too good.

    Raises:
        ConfigurationError: a rate is not positive, or those of operations are not by dtype.

    Example:
        >>> DeviceRates(flops_per_s={"float32": 30e12, "bfloat16": 400e12}, bytes_per_s=2.5e12).bytes_per_s
        2500000000000.0
    """

    flops_per_s: Mapping[str, float]
    """Floating-point operations per second of large matrix products, by dtype."""
    bytes_per_s: float
    """Bytes per second to and from its memory."""

    def __post_init__(self) -> None:
        if not isinstance(self.flops_per_s, Mapping):
            raise ConfigurationError(
                f"Expected flops_per_s by dtype, got {self.flops_per_s!r}. Name the dtypes that the model computes in:"
                f' flops_per_s={{"float32": ..., "bfloat16": {self.flops_per_s!r}}}.'
            )
        for name, rate in {**self.flops_per_s, "bytes_per_s": self.bytes_per_s}.items():
            if not rate > 0:
                raise ConfigurationError(f"Expected rates of a device to be positive, got {rate!r} for {name!r}.")
