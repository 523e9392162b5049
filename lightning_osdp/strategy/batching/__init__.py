"""Loaders, micro-batches and gradient accumulation as planned."""
