"""FSDP1's rules."""

from lightning_osdp.engine.fsdp1.engine import FSDP1

__all__ = ["FSDP1"]
