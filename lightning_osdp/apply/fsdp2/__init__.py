"""FSDP2: torch's ``fully_shard``, one DTensor a parameter, no wrappers."""
