"""Lightning strategy, which connects the other parts with the Trainer."""

from __future__ import annotations

from lightning_osdp.strategy.osdp import OSDPStrategy
from lightning_osdp.strategy.precision import OSDPPrecision

__all__ = ["OSDPPrecision", "OSDPStrategy"]
