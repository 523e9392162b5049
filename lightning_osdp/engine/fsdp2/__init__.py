"""The rules of ``fully_shard``."""

from lightning_osdp.engine.fsdp2.engine import FSDP2

__all__ = ["FSDP2"]
