"""Torch's ``fully_shard``: each parameter a DTensor, and no wrappers."""
