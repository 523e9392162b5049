"""From a plan to a sharded LightningModule, and what users see of it."""
