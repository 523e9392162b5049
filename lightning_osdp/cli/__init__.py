"""The program ``lightning-osdp``: estimates, looks into plans that are there, and makes others of saved profiles.

It needs no GPU and no Trainer. Nothing in here imports torch or Lightning but ``estimate``, which has a model.
"""

from lightning_osdp.cli.program import main

__all__ = ["main"]
