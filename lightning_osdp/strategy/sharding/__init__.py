"""Sharding of a LightningModule by a plan."""
