"""Models that are only described: built on the meta device, and profiled by the rates of a device."""

from lightning_osdp.profiler.without_weights.described import described
from lightning_osdp.profiler.without_weights.model import PRECISIONS, DescribedModel
from lightning_osdp.profiler.without_weights.optimizers import optimizers_by_name

__all__ = ["PRECISIONS", "DescribedModel", "described", "optimizers_by_name"]
