"""FSDP1: flat parameters, a wrapper around the module of each unit."""
