"""OSDP beside FSDP, each at its best, on links of a chosen rate."""
