"""The program ``lightning-osdp``: looks into plans that are there, and makes others of the profiles beside them.

It needs no GPU, no Trainer and no model: nothing in here imports torch or Lightning.
"""

from lightning_osdp.cli.program import main

__all__ = ["main"]
