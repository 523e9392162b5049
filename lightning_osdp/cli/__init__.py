"""The program ``lightning-osdp``: estimates, looks into plans, and makes other plans of saved profiles.

The program needs no GPU and no Trainer. Only the command ``estimate``, which builds a model, imports torch.
"""

from lightning_osdp.cli.program import main

__all__ = ["main"]
