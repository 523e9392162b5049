"""Instruments that measure training on one machine: live bytes, shaped links, simulated ranks, a memory limit."""
