"""The room for all that is private in torch's ``fully_shard``: nothing outside of it reads or sets such a name.

A module is a subject, and others write its name in front of what they call: ``gathering.reshard(...)``.

==============  =========================================================================================
`access`        objects that ``fully_shard`` makes of a unit, and checks that torch has what is used of them
`dtensors`      rows of DTensors, and operations on them
`sharding`      what is done to modules around ``fully_shard``, and undone
`gathering`     all-gathers and reduce-scatters, and what they leave
`unsharded`     changes of parameters while they are unsharded, which shards take over
`backward`      when backward is through with units, and gradients that are not reduced yet
==============  =========================================================================================
"""

from __future__ import annotations

import torch

try:
    from lightning_osdp.apply.internals import access, backward, dtensors, gathering, sharding, unsharded
except ImportError as error:
    _text = f"Expected a torch with the parts of fully_shard that 2.13 to 2.15 have, got {torch.__version__}: {error}"
    raise ImportError(_text) from error

__all__ = ["access", "backward", "dtensors", "gathering", "sharding", "unsharded"]
