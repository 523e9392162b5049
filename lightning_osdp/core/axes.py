"""Axes: every choice that there is, declared once; and treatments: what is chosen for a subject.

What a value does in a step is in `engine.effects`, how it is carried out in `apply`. Nothing else asks for values by
their names.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Any

from typing_extensions import override


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A unit and its block, as far as rules of axes ask for them; by default everything applies to it."""

    has_nodes: bool = True
    """Whether there are several nodes with several ranks each."""
    is_reached: bool = True
    """Whether backward comes to the unit."""
    is_trained: bool = True
    """Whether it has anything to train."""
    may_stay: bool = True
    """Whether what is gathered of it stays right from one step to the next, as nothing of it is trained."""
    may_wait: bool = True
    """Whether its gradients may wait for the last of several micro-batches: not where forward calls it again."""
    profiled: Collection[str] | None = None
    """What its block was profiled with beside keeping all that it saves; none where the unit is no block."""


ANYTHING, ONE_NODE = Subject(), Subject(has_nodes=False)


@dataclass(frozen=True, kw_only=True)
class Axis:
    """One choice."""

    name: str
    on: str
    """What it is a choice of: a ``unit``, or a ``block``."""
    values: tuple[str, ...]
    """The one that takes least memory first."""
    default: str
    """What a treatment takes that does not name the axis."""
    applies: Callable[[str, Treatment, Subject], bool]
    """Whether a value is there for a subject whose treatment is this one in all axes before."""
    can_change: bool = True
    """Whether a running module may change from one value to another, between two optimizer steps."""
    by_slice: bool = False
    """Whether the slices of one operator may have different values."""


def _home_applies(value: str, _: Treatment, subject: Subject) -> bool:
    return value == "all" or subject.has_nodes


def _keep_applies(value: str, treatment: Treatment, subject: Subject) -> bool:
    """What stays for ever is frozen, and sharded over all ranks: it is not gathered again, so nodes are of no use.

    A shard for the node is left of what is sharded over more ranks, for a backward that comes to it.
    """
    if value == "always":
        return subject.may_stay and treatment["home"] == "all"
    return value != "node" or (subject.has_nodes and subject.is_reached and treatment["home"] == "all")


def _reduce_applies(value: str, treatment: Treatment, subject: Subject) -> bool:
    """Gradients are reduced in nodes alone where the unit is sharded there; what stays for ever has none."""
    may_wait = subject.may_wait and treatment["keep"] != "always"
    return value == "every" or (may_wait and (value != "node" or treatment["home"] == "node"))


def _saves_applies(value: str, _: Treatment, subject: Subject) -> bool:
    return value == "keep" or subject.profiled is None or value in subject.profiled


AXES: Mapping[str, Axis] = {
    axis.name: axis
    for axis in (
        # Over which ranks a unit is sharded between steps: all, or those of a node; each node then has all of it, and
        # what a rank gets of reduced gradients is all-reduced between nodes.
        Axis(name="home", on="unit", values=("all", "node"), default="all", applies=_home_applies, can_change=False),
        # What forward leaves of a unit for backward beside that: nothing; a shard in each node, from which backward
        # gathers without the network between nodes; the whole unsharded unit; or that for ever: gathered once, it
        # stays unsharded beside its shard through all steps and evaluations.
        Axis(
            name="keep",
            on="unit",
            values=("nothing", "node", "whole", "always"),
            default="nothing",
            applies=_keep_applies,
            by_slice=True,
        ),
        # Which micro-batches reduce a unit's gradients: every one; every one inside of nodes and the last one between
        # them; or the last one, until which gradients are whole, and a unit that is kept stays unsharded.
        Axis(name="reduce", on="unit", values=("every", "node", "last"), default="every", applies=_reduce_applies),
        # What becomes of the tensors that a block saves for backward: dropped, with the block's inputs on the host, and
        # made again by running its forward in backward; moved to host memory and back; dropped and made again; kept.
        Axis(
            name="saves",
            on="block",
            values=("recompute_offload", "offload", "recompute", "keep"),
            default="keep",
            applies=_saves_applies,
        ),
    )
}
"""By name, in the order in which they are decided: rules may ask for what comes before."""


class Treatment(Mapping[str, str]):
    """What is chosen for one subject, by axis; iterating gives the axes in which it is not the default.

    Raises:
        KeyError: there is no such axis, or it has no such value.

    Example:
        >>> kept = Treatment(keep="whole")
        >>> kept["keep"], kept["reduce"], dict(kept.but(reduce="last", keep="nothing"))
        ('whole', 'every', {'reduce': 'last'})
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
        """What tables call the treatment of a unit's parameters; how its gradients are reduced is told apart."""
        own = self.only("home", "keep")
        return next(name for name, named in NAMED_MODES.items() if named == own)

    @property
    def needs_nodes(self) -> bool:
        """Whether it is of use on several nodes with several ranks each only."""
        return self.within(ONE_NODE) != self

    @property
    def of_all_slices(self) -> Treatment:
        """Its part in which the slices of one operator must agree."""
        return self.only(*(name for name, axis in AXES.items() if not axis.by_slice))

    def on(self, subject: str) -> Treatment:
        """Its part that is about a ``unit``, or about a ``block``."""
        return self.only(*(name for name, axis in AXES.items() if axis.on == subject))

    def but(self, **changed: str) -> Treatment:
        """The same with other values in some axes."""
        return Treatment(**{**self._chosen, **changed})

    def only(self, *axes: str) -> Treatment:
        """The same in these axes, and the default in all others."""
        return Treatment(**{name: value for name, value in self._chosen.items() if name in axes})

    def within(self, subject: Subject) -> Treatment:
        """The same as far as its values apply to a subject, and the default elsewhere."""
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
"""As ZDP among the ranks of a node, replicated across nodes: ``HYBRID_SHARD``, or ``fully_shard`` on a mesh of nodes
and ranks of a node."""

HDP = Treatment(home="node", keep="whole")
"""As DP among the ranks of a node, replicated across nodes: ``_HYBRID_SHARD_ZERO2``."""

NAMED_MODES: Mapping[str, Treatment] = {
    "ZDP": ZDP,
    "hpZ": HPZ,
    "DP": DP,
    "resident": RESIDENT,
    "HSDP": HSDP,
    "HDP": HDP,
}
"""Treatments of a unit's parameters by the names that people know, in the order in which they are offered: of those
that are sharded over the same ranks, the one with the least memory first."""

MODES = {
    name: mode for name, mode in NAMED_MODES.items() if mode.within(Subject(has_nodes=False, may_stay=False)) == mode
}
"""Those that there are on any cluster for any unit, in the same order."""

SYNC_CHOICES = ("every", "last", "node")
"""Values of ``reduce``, in the order in which they are offered."""

ACTIVATION_CHOICES = ("keep", "recompute", "offload", "recompute_offload")
"""Values of ``saves``, in the order in which they are offered."""

KEEP = AXES["saves"].default
"""Value of ``saves`` with which a block does nothing of its own."""


def named(*names: str, reduce: str = "every") -> tuple[Treatment, ...]:
    """Treatments of these names, with gradients reduced likewise in all of them."""
    return tuple(NAMED_MODES[name].but(reduce=reduce) for name in names)


def freed_and_kept(treatment: Treatment) -> tuple[Treatment, Treatment]:
    """The same, once with nothing of the unit left after forward, and once with all of it kept.

    What is kept for ever is so then, too.
    """
    kept = treatment if treatment["keep"] == "always" else treatment.but(keep="whole")
    return treatment.but(keep="nothing"), kept


def modes_of(names: Collection[str] = tuple(MODES), sync: Collection[str] = SYNC_CHOICES) -> tuple[Treatment, ...]:
    """Treatments of these names, with each of these choices of micro-batches that reduce; least memory first.

    All values are offered of axes of units that neither says anything of.
    """
    modes = [mode for name, mode in NAMED_MODES.items() if name in names]
    others = [axis for axis in AXES.values() if axis.on == "unit" and axis.name not in {"home", "keep", "reduce"}]
    values = [
        dict(zip((axis.name for axis in others), each, strict=True))
        for each in product(*(axis.values for axis in others))
    ]
    offered = (
        mode.but(reduce=each, **more) for each in SYNC_CHOICES if each in sync for mode in modes for more in values
    )
    return tuple(each for each in offered if each.within(ANYTHING) == each)


def treatments_of(subject: Subject) -> tuple[Treatment, ...]:
    """All treatments of a unit that apply to a subject, least memory first."""
    own = [axis for axis in AXES.values() if axis.on == "unit"]
    chosen = (dict(zip((axis.name for axis in own), each, strict=True)) for each in product(*(a.values for a in own)))
    return tuple(each for each in (Treatment(**values) for values in chosen) if each.within(subject) == each)


ALL_MODES = modes_of()
"""Each of `MODES` with every choice of micro-batches that reduce."""
