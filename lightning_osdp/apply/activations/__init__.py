"""Blocks that recompute or offload what they save for backward."""
