"""Axes: every choice that there is, declared once; and treatments: what is chosen for a subject.

`planner.engine.effects` says what each value does in a step, and `apply` carries it out. Nothing else asks for values
by their names.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

from typing_extensions import override


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A unit and its block, as far as rules of axes ask for them; by default everything applies to it."""

    has_host: bool = True
    """True if the host can update its parameters: the seconds of that were profiled."""
    has_nodes: bool = True
    """True if there are several nodes with several ranks each."""
    is_reached: bool = True
    """True if backward comes to the unit."""
    is_trained: bool = True
    """True if any of its parameters is trained."""
    may_exchange: bool = True
    """True if its operators can work on their parts of all ranks' activations, as an `Exchange` says."""
    may_leave: bool = True
    """True if its shard may be on the host between steps: all or nothing of the unit is trained."""
    may_leave_alone: bool = True
    """True if its shard may be there without states: nothing of the unit is trained."""
    may_replicate: bool = True
    """True if each rank may have all of it: something of the unit is trained, in the precision of its shard."""
    may_stay: bool = True
    """True if its unsharded weights stay right from one step to the next, for nothing of the unit is trained."""
    may_wait: bool = True
    """True if its gradients may wait for the last of several micro-batches: not where forward calls the unit again."""
    profiled: Collection[str] | None = None
    """Values of ``saves`` that its block was profiled with, beside the default; None where the unit is no block."""


ANYTHING, ONE_NODE = Subject(), Subject(has_nodes=False)


@dataclass(frozen=True, kw_only=True)
class Axis:
    """Choice that is made for each unit, or for each block."""

    name: str
    on: str
    """Subject of the choice: a ``unit``, or a ``block``."""
    values: tuple[str, ...]
    """Values of the choice, the one that takes least memory first."""
    default: str
    """Value of a treatment that does not name the axis."""
    applies: Callable[[str, Treatment, Subject], bool]
    """Tells if a value is there for a subject whose treatment is this one in all axes before."""
    can_change: bool = True
    """True if a running module may change from one value to another, between two optimizer steps."""
    by_slice: bool = False
    """True if the slices of one operator may have different values."""


def _moves_applies(value: str, _: Treatment, subject: Subject) -> bool:
    return value == "weights" or subject.may_exchange


def _home_applies(value: str, treatment: Treatment, subject: Subject) -> bool:
    """Tells if a unit can be sharded over these ranks; a frozen one that stays unsharded is whole on each anyway."""
    if value == "one":
        return subject.may_replicate and treatment["moves"] == "weights"
    return value == "all" or subject.has_nodes


def _keep_applies(value: str, treatment: Treatment, subject: Subject) -> bool:
    """Tells if forward can leave so much of a unit: nothing where it moves activations, or each rank has all of it.

    Only frozen units can stay unsharded for ever. They are sharded over all ranks, for a shard in the node would save
    no all-gather where there is one in a fit. A shard in the node serves units that are sharded over more ranks than
    those of a node, and that backward comes to.
    """
    if treatment["moves"] == "activations" or treatment["home"] == "one":
        return value == "nothing"
    if value == "always":
        return subject.may_stay and treatment["home"] == "all"
    return value != "node" or (subject.has_nodes and subject.is_reached and treatment["home"] == "all")


def _sync_applies(value: str, treatment: Treatment, subject: Subject) -> bool:
    """Tells if gradients can be reduced so: in nodes alone only where the unit is sharded there.

    Units that stay unsharded for ever have no gradients, or are whole on each rank. Where activations move, each
    micro-batch makes the gradients of shards as they are after a reduction.
    """
    may_wait = subject.may_wait and treatment["keep"] != "always" and treatment["moves"] == "weights"
    return value == "every" or (may_wait and (value != "node" or treatment["home"] == "node"))


def _states_applies(value: str, treatment: Treatment, subject: Subject) -> bool:
    """Tells if states can be there: on the host those of units alone that have any, and whose weights are gathered."""
    is_gathered = treatment["moves"] == "weights" and treatment["home"] != "one"
    return value == "device" or (subject.has_host and subject.is_trained and is_gathered)


def _shard_applies(value: str, treatment: Treatment, subject: Subject) -> bool:
    """Tells if the shard can be there: on the host that of units alone that are gathered from all ranks each time.

    Units that are trained must have their states there, too.
    """
    gathers = treatment["moves"] == "weights" and treatment["keep"] != "always" and treatment["home"] == "all"
    may_leave = subject.may_leave and (subject.may_leave_alone or treatment["states"] == "host")
    return value == "device" or (may_leave and gathers)


LEVELS = ("selective_1", "selective_2", "selective_3", "selective_4")
"""Values of ``saves`` with which a block keeps some results of heavy operations and makes the rest again; each keeps
more bytes than the one before. Which results these are is profiled for each kind of block."""


def _saves_applies(value: str, _: Treatment, subject: Subject) -> bool:
    return value == "keep" or subject.profiled is None or value in subject.profiled


AXES: Mapping[str, Axis] = {
    axis.name: axis
    for axis in (
        # Tensors that go from rank to rank for a unit: its weights, which are gathered; or activations of its
        # operators, each rank working with its part of the weights on the samples of all.
        Axis(
            name="moves",
            on="unit",
            values=("activations", "weights"),
            default="weights",
            applies=_moves_applies,
            can_change=False,
        ),
        # Over which ranks a unit is sharded between steps: all, or those of a node; each node then has all of it, and
        # what a rank gets of reduced gradients is all-reduced between nodes. Or one: each rank has all of it, unsharded
        # for ever, and gradients are all-reduced over all ranks.
        Axis(
            name="home",
            on="unit",
            values=("all", "node", "one"),
            default="all",
            applies=_home_applies,
            can_change=False,
        ),
        # Part of a unit that forward leaves for backward beside its shard: nothing; a shard in each node, from which
        # backward gathers without the network between nodes; the whole unsharded unit; or that for ever: gathered
        # once, it stays unsharded beside its shard through all steps and evaluations.
        Axis(
            name="keep",
            on="unit",
            values=("nothing", "node", "whole", "always"),
            default="nothing",
            applies=_keep_applies,
            by_slice=True,
        ),
        # Micro-batches that reduce a unit's gradients: every one; every one inside of nodes and the last one between
        # them; or the last one, until which gradients are whole, and a unit that is kept stays unsharded.
        Axis(name="sync", on="unit", values=("every", "node", "last"), default="every", applies=_sync_applies),
        # Place of what an optimizer keeps of a unit's parameters: the memory of the host, which then updates the rows
        # of this rank, or of the device.
        Axis(
            name="states",
            on="unit",
            values=("host", "device"),
            default="device",
            applies=_states_applies,
            can_change=False,
            by_slice=True,
        ),
        # Place of a unit's shard between steps: the memory of the host, from where it is copied to the device before
        # each all-gather from there, or of the device.
        Axis(
            name="shard",
            on="unit",
            values=("host", "device"),
            default="device",
            applies=_shard_applies,
            can_change=False,
            by_slice=True,
        ),
        # Fate of the tensors that a block saves for backward: dropped, with the block's inputs on the host, and
        # made again by running its forward in backward; moved to host memory and back; dropped and made again, all of
        # them or all but some results; kept.
        Axis(
            name="saves",
            on="block",
            values=("recompute_offload", "offload", "recompute", *LEVELS, "keep"),
            default="keep",
            applies=_saves_applies,
        ),
    )
}
"""Axes by name, in the order in which they are decided: rules may ask for what comes before."""


class Treatment(Mapping[str, str]):
    """Choices for one subject, by axis; iterating gives the axes in which it is not the default.

    Raises:
        KeyError: there is no such axis, or it has no such value.

    Example:
        >>> kept = Treatment(keep="whole")
        >>> kept["keep"], kept["sync"], dict(kept.but(sync="last", keep="nothing"))
        ('whole', 'every', {'sync': 'last'})
    """

    __slots__ = ("_chosen",)
    _chosen: dict[str, str]

    def __new__(cls, **chosen: str) -> Treatment:
        """The one object of these values: searches look treatments up all the time."""
        for name, value in chosen.items():
            if value not in AXES[name].values:
                raise KeyError(f"Expected {name!r} to be one of {AXES[name].values}, got {value!r}.")
        departs = {name: value for name, value in chosen.items() if value != AXES[name].default}
        return _only(tuple((name, departs[name]) for name in AXES if name in departs))

    @override
    def __getitem__(self, axis: str) -> str:
        found = self._chosen.get(axis)
        return AXES[axis].default if found is None else found

    @override
    def __contains__(self, axis: object) -> bool:
        return axis in self._chosen

    @override
    def __iter__(self) -> Iterator[str]:
        return iter(self._chosen)

    @override
    def __len__(self) -> int:
        return len(self._chosen)

    __eq__ = object.__eq__
    __hash__ = object.__hash__

    @override
    def __repr__(self) -> str:
        return f"Treatment({', '.join(f'{name}={value!r}' for name, value in self._chosen.items())})"

    @override
    def __reduce__(self) -> tuple[Any, ...]:  # a copy, too, is the same object
        return _treatment, (dict(self._chosen),)

    @property
    def name(self) -> str:
        """Name of the treatment of a unit's parameters in tables, which tell apart how its gradients are reduced."""
        own = self.only(*_OF_NAMES)
        return next(name for name, named in NAMED_MODES.items() if named == own)

    @property
    def needs_nodes(self) -> bool:
        """True if it is of use only on several nodes with several ranks each."""
        return self.within(ONE_NODE) != self

    @property
    def of_all_slices(self) -> Treatment:
        """Part of the treatment in which the slices of one operator must agree."""
        return self.only(*(name for name, axis in AXES.items() if not axis.by_slice))

    def on(self, subject: str) -> Treatment:
        """Part of the treatment that is about a ``unit``, or about a ``block``."""
        return self.only(*(name for name, axis in AXES.items() if axis.on == subject))

    def but(self, **changed: str) -> Treatment:
        """Returns the treatment with other values in some axes."""
        return Treatment(**{**self._chosen, **changed})

    def only(self, *axes: str) -> Treatment:
        """Returns the treatment in these axes, with the default in all others."""
        return Treatment(**{name: value for name, value in self._chosen.items() if name in axes})

    def within(self, subject: Subject) -> Treatment:
        """Returns the treatment as far as its values apply to a subject, with the default elsewhere."""
        if not self._chosen:
            return self
        found = Treatment()
        for name, value in self._chosen.items():
            if AXES[name].applies(value, found, subject):
                found = found.but(**{name: value})
        return found


@cache
def _only(departs: tuple[tuple[str, str], ...]) -> Treatment:
    found: Treatment = object.__new__(Treatment)
    found._chosen = dict(departs)
    return found


def _treatment(chosen: Mapping[str, str]) -> Treatment:
    return Treatment(**chosen)


ZDP = Treatment()
"""Resharded after forward, gathered again for backward: ``FULL_SHARD`` or ``reshard_after_forward=True``."""

DP = Treatment(keep="whole")
"""Gathered once, unsharded from forward to the end of its backward: ``SHARD_GRAD_OP`` or
``reshard_after_forward=False``."""

HPZ = Treatment(keep="node")
"""Resharded after forward but for a shard in each node, from which backward gathers: ZeRO++'s secondary partition, or
``reshard_after_forward=<ranks of a node>``."""

RESIDENT = Treatment(keep="always")
"""Gathered once and never freed, of units in which nothing is trained: ``reshard_after_forward=False`` with
``set_reshard_after_backward(False)`` for ever."""

HSDP = Treatment(home="node")
"""ZDP among the ranks of a node, replicated across nodes: ``HYBRID_SHARD``, or ``fully_shard`` on a mesh of nodes
and ranks of a node."""

HDP = Treatment(home="node", keep="whole")
"""DP among the ranks of a node, replicated across nodes: ``_HYBRID_SHARD_ZERO2``."""

REPLICATED = Treatment(home="one")
"""Whole on each rank, with its gradients and states, and never gathered: gradients are all-reduced, as by DDP."""

STATIONARY = Treatment(moves="activations")
"""Never gathered: ranks exchange inputs and outputs of its operators, of which each computes its part. Column-wise and
row-wise tensor parallelism of an operator, with data parallelism around it."""

NODE_STATIONARY = Treatment(moves="activations", home="node")
"""Stationary among the ranks of a node, replicated across nodes: tensor parallelism in the node."""

NAMED_MODES: Mapping[str, Treatment] = {
    "ZDP": ZDP,
    "hpZ": HPZ,
    "DP": DP,
    "resident": RESIDENT,
    "HSDP": HSDP,
    "HDP": HDP,
    "replicated": REPLICATED,
    "stationary": STATIONARY,
    "node_stationary": NODE_STATIONARY,
}
"""Treatments of a unit's parameters by the names that people know, in the order in which they are offered: of those
that gather a unit over the same ranks, the one with the least memory first."""

_OF_NAMES = ("moves", "home", "keep")
"""Axes that names tell."""

_EVERYWHERE = Subject(has_nodes=False, may_replicate=False, may_stay=False, may_exchange=False)

MODES = {name: mode for name, mode in NAMED_MODES.items() if mode.within(_EVERYWHERE) == mode}
"""Named modes that apply to any unit on any cluster, in the same order."""

SYNC_CHOICES = ("every", "last", "node")
"""Values of ``sync``, in the order in which they are offered."""

STATES_CHOICES = ("device", "host")
"""Values of ``states``, in the order in which they are offered."""

SHARD_CHOICES = ("device", "host")
"""Values of ``shard``, in the order in which they are offered."""

ACTIVATION_CHOICES = ("keep", "recompute", "offload", "recompute_offload")
"""Values of ``saves`` that treat all that a block saves alike, in the order in which they are offered."""

SELECTIVE = "selective"
"""Name by which all of `LEVELS` are offered."""

DEFAULT_ACTIVATIONS = ("keep", "recompute", SELECTIVE)
"""Names of choices for what a block saves that are offered where nothing is said."""

KEEP = AXES["saves"].default
"""Value of ``saves`` with which a block does nothing of its own."""


def values_of(activations: Iterable[str]) -> tuple[str, ...]:
    """Values of ``saves`` that these names offer.

    Example:
        >>> values_of(("keep", "selective"))
        ('keep', 'selective_1', 'selective_2', 'selective_3', 'selective_4')
    """
    return tuple(value for name in activations for value in (LEVELS if name == SELECTIVE else (name,)))


def named(*names: str, sync: str = "every") -> tuple[Treatment, ...]:
    """Treatments of these names, with gradients reduced likewise in all of them."""
    return tuple(NAMED_MODES[name].but(sync=sync) for name in names)


def freed_and_kept(treatment: Treatment) -> tuple[Treatment, Treatment]:
    """Returns the treatment twice: with nothing of the unit left after forward, and with all of it kept.

    A unit that is kept for ever is so in the second, and one that each rank has all of in both. Where activations move,
    weights do in both.
    """
    gathered = treatment.but(moves="weights")
    if gathered["home"] == "one":
        return gathered, gathered
    kept = gathered if gathered["keep"] == "always" else gathered.but(keep="whole")
    return gathered.but(keep="nothing"), kept


PLACES = ("states", "shard")
"""Axes of what may be on the host between steps."""


def on_device(treatment: Treatment) -> Treatment:
    """Returns the treatment with all of a unit on the device that may be on the host between steps."""
    return treatment.but(**dict.fromkeys(PLACES, "device"))


def modes_of(
    names: Collection[str] = tuple(MODES),
    sync: Collection[str] = SYNC_CHOICES,
    states: Collection[str] = STATES_CHOICES[:1],
    shards: Collection[str] = SHARD_CHOICES[:1],
) -> tuple[Treatment, ...]:
    """Treatments of these names, micro-batches that reduce, and places of states and shards; least memory first.

    All values are offered of axes of units that none of these says anything of. A shard that cannot be on the host
    with the other values is on the device; where states are offered on the host alone, what each rank has all of is
    offered only where nothing else is.
    """
    modes = [mode for name, mode in NAMED_MODES.items() if name in names]
    offered_of = {axis.name: axis.values for axis in AXES.values() if axis.on == "unit"} | {
        name: tuple(value for value in AXES[name].values if value in of)
        for name, of in zip(PLACES, (states, shards), strict=True)
    }
    others = {name: of for name, of in offered_of.items() if name not in {*_OF_NAMES, "sync"}}
    values = [dict(zip(others, each, strict=True)) for each in product(*others.values())]
    offered = (
        mode.but(sync=each, **more) for each in SYNC_CHOICES if each in sync for mode in modes for more in values
    )
    there_are = (each for each in offered if on_device(each).within(ANYTHING) == on_device(each))
    found = tuple(dict.fromkeys(each.within(ANYTHING) for each in there_are))
    return tuple(each for each in found if each["home"] != "one" or each["states"] in states) or found


@cache
def treatments_of(subject: Subject) -> tuple[Treatment, ...]:
    """All treatments of a unit that apply to a subject, least memory first."""
    own = [axis for axis in AXES.values() if axis.on == "unit"]
    chosen = (dict(zip((axis.name for axis in own), each, strict=True)) for each in product(*(a.values for a in own)))
    return tuple(each for each in (Treatment(**values) for values in chosen) if each.within(subject) == each)


ALL_MODES = modes_of()
"""Treatments of all `MODES`, with every choice of micro-batches that reduce."""
