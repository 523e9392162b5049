"""A plan made real on FSDP2: ``fully_shard`` for each unit, and the state dicts of what it shards."""
