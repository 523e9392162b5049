"""Ranks on which OSDP and what it is compared with train in turns."""
