"""Loaders, micro-batches and gradient accumulation in the sizes of a plan."""
