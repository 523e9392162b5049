"""Events of an optimizer step, and what each kind of them uses: ranks and a link, or the device."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Literal, NamedTuple

Kind = Literal[
    "copy_in",
    "gather",
    "await",
    "linger",
    "forward",
    "free",
    "retain",
    "gather_in_node",
    "zero",
    "rerun",
    "backward",
    "flatten",
    "stay",
    "accumulate",
    "reduce",
    "reduce_in_node",
    "all_reduce",
    "scatter_in_node",
    "reduce_whole",
    "release",
    "exchange_inputs",
    "exchange_outputs",
    "exchange_output_gradients",
    "exchange_input_gradients",
    "exchange_inputs_in_node",
    "exchange_outputs_in_node",
    "exchange_output_gradients_in_node",
    "exchange_input_gradients_in_node",
    "sum_between",
]
"""``copy_in``: a shard on the host is copied to the device. ``gather``: an all-gather is issued. ``gather_in_node``: so
it is in each node, of a unit that is sharded there, or of which forward has left a shard there. ``await``: what follows
needs the unsharded unit. ``linger``: a forward that is run again has awaited it. ``retain``: forward leaves a shard of
a unit in each node, then frees it. ``zero``: Lightning drops the gradients of the step before, between the first
forward and its backward. ``rerun``: forward again, in backward. ``flatten``: a unit's gradients are complete, before it
is freed. ``stay``: backward is through with a resident unit, which stays; its gradients are complete, if it has any.
``reduce``: gradients are reduced and scattered. ``reduce_in_node``: so they are in each node, and then each rank's are
reduced between nodes, ``all_reduce``. ``scatter_in_node``: the same without that, which the last micro-batch does for
all. ``reduce_whole``: gradients of a unit that each rank has all of are all-reduced over all ranks. ``accumulate``:
they are left whole for the next micro-batch. ``release``: what a segment had saved is gone. ``exchange_inputs``,
``exchange_outputs``: before and after forward of a unit that moves activations, ranks send inputs and outputs to each
other. So they do with gradients before and after its backward, ``exchange_output_gradients`` and
``exchange_input_gradients``. Where the unit is sharded in the node, ranks of each node do so,
``exchange_inputs_in_node`` and so on, and gradients of its shards are summed between nodes, ``sum_between``."""


class Event(NamedTuple):
    """One thing that the host has done."""

    kind: Kind
    of: int
    """The segment that is run (``forward``, ``rerun``, ``backward``, ``release``), else the unit."""


event = lru_cache(maxsize=2**16)(Event)
"""One object for each event: a search goes through the same ones again and again."""


class Collective(NamedTuple):
    """Collective that a kind of event issues, or the copy of a shard before one."""

    operation: str
    """``all_gather``, ``reduce_scatter``, ``all_reduce``, ``copy``, or the kind of an exchange, see
    `exchanges.messages`."""
    over: str
    """Ranks that take part: ``all``, those of a ``node``, or those that have the same place in all ``nodes``."""
    link: str
    """Links that it takes: those of ``all`` ranks, of a ``node``, or that of each device to its ``host``. Collectives
    of one link run one by one."""


EXCHANGES: tuple[Kind, ...] = (
    "exchange_inputs",
    "exchange_outputs",
    "exchange_output_gradients",
    "exchange_input_gradients",
)
"""Kinds of events of a unit that moves activations, in the order in which a micro-batch issues them. Computing goes on
when they are over."""

EXCHANGES_OVER: Mapping[str, tuple[Kind, ...]] = {
    "all": EXCHANGES,
    "node": (
        "exchange_inputs_in_node",
        "exchange_outputs_in_node",
        "exchange_output_gradients_in_node",
        "exchange_input_gradients_in_node",
    ),
}
"""Ranks that a unit is sharded over -> `EXCHANGES` among these."""

HOLDING_UP: tuple[Kind, ...] = (*EXCHANGES, *EXCHANGES_OVER["node"], "sum_between")
"""Kinds of collectives that hold up computing: all that a unit issues that moves activations."""

COPY = Collective("copy", "all", "host")
"""Copies of shards on the host, each rank's of its own."""

COLLECTIVES: Mapping[Kind, Collective] = {
    "copy_in": COPY,
    "gather": Collective("all_gather", "all", "all"),
    "gather_in_node": Collective("all_gather", "node", "node"),
    "reduce": Collective("reduce_scatter", "all", "all"),
    "reduce_in_node": Collective("reduce_scatter", "node", "node"),
    "scatter_in_node": Collective("reduce_scatter", "node", "node"),
    "all_reduce": Collective("all_reduce", "nodes", "all"),
    "reduce_whole": Collective("all_reduce", "all", "all"),
    **{
        kind: Collective(operation, over, over)
        for over, kinds in EXCHANGES_OVER.items()
        for kind, operation in zip(kinds, EXCHANGES, strict=True)
    },
    "sum_between": Collective("all_reduce", "nodes", "all"),
}
"""Kind of an event -> the collective that it issues, if any."""

REDUCTIONS = frozenset({"reduce", "reduce_in_node", "scatter_in_node", "reduce_whole"})
"""Kinds of collectives that take a unit's gradients as backward makes them."""

GATHER_OVER: Mapping[str, Kind] = {"all": "gather", "node": "gather_in_node"}
"""Ranks that hold a unit's shards -> the event that gathers it from these."""

GATHERS = frozenset(GATHER_OVER.values())

OVERHEAD: Mapping[Kind, str] = {
    "gather": "gather",
    "gather_in_node": "gather",
    "flatten": "flatten",
    "stay": "stay",
    "reduce": "reduce",
    "reduce_in_node": "reduce",
    "scatter_in_node": "reduce",
    "reduce_whole": "reduce",
    "accumulate": "accumulate",
}
"""Kind of an event -> the part of `Cluster.unit_overhead` that the runtime takes for it."""
