"""Measurements of the process group, the device and the host."""
