"""Operators cut into slices that FSDP gathers one after the other; the model's numbers and names stay."""

from __future__ import annotations

from lightning_osdp.splitting.module import SplitModule
from lightning_osdp.splitting.splitters import SPLITTERS, cut_dims, num_features, split, splittable

__all__ = ["SPLITTERS", "SplitModule", "cut_dims", "num_features", "split", "splittable"]
