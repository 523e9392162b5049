"""Machines to plan for before one has them: devices and links as data, and clusters of them as numbers."""

from lightning_osdp.machines.catalog import Catalog, Device, Interconnect, read_catalog
from lightning_osdp.machines.machine import PUBLISHED_RATES, Machine

__all__ = ["PUBLISHED_RATES", "Catalog", "Device", "Interconnect", "Machine", "read_catalog"]
