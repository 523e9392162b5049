"""Steps of optimizers on what each rank has of the parameters, and which optimizers can take them."""

from lightning_osdp.apply.updates.local_step import stepping_on_rows
from lightning_osdp.apply.updates.optimizers import try_optimizer

__all__ = ["stepping_on_rows", "try_optimizer"]
