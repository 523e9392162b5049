"""Room for all private names of torch's ``fully_shard``: nothing outside of it reads or sets such a name.

Each module is a subject. Callers, also in the room, write its name in front: ``gathering.reshard(...)``.

==============  =========================================================================================
`access`        objects that ``fully_shard`` makes of a unit, and checks that torch has all that is used of them
`dtensors`      rows of DTensors, and operations on them
`sharding`      changes of modules before and after ``fully_shard``, and undoing it
`gathering`     all-gathers and reduce-scatters, and what they leave
`host_shards`   shards in memory of the host, of which all-gathers take copies
`in_flight`     reductions that go on while backward computes
`unsharded`     changes of parameters while they are unsharded, which shards take over
`resident`      units that stay unsharded for ever
`backward`      the end of backward for each unit, and gradients that are not reduced yet
`calls`         hooks around calls of modules of units
`shortcuts`     what torch does anew at each call of a hook, done once
==============  =========================================================================================
"""

from __future__ import annotations

import torch

try:
    from lightning_osdp.apply.internals import (
        access,
        backward,
        calls,
        dtensors,
        gathering,
        host_shards,
        in_flight,
        resident,
        sharding,
        shortcuts,
        unsharded,
    )
except ImportError as error:
    _text = f"Expected a torch with the parts of fully_shard that 2.13 to 2.15 have, got {torch.__version__}: {error}"
    raise ImportError(_text) from error

__all__ = [
    "access",
    "backward",
    "calls",
    "dtensors",
    "gathering",
    "host_shards",
    "in_flight",
    "resident",
    "sharding",
    "shortcuts",
    "unsharded",
]
