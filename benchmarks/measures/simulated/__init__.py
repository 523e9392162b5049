"""OSDP beside FSDP on machines that are not here, simulated."""
