"""Units and blocks of a plan: what is decided of each, and what the alternatives cost."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

from lightning_osdp.core.axes import AXES, Treatment, named


class Cost(NamedTuple):
    """Seconds and bytes that a unit takes in some treatments, beyond the best of its menu."""

    seconds: float
    """Seconds of an optimizer step."""
    num_bytes: float

    def beyond(self, other: Cost) -> Cost:
        """The difference from another one."""
        return Cost(self.seconds - other.seconds, self.num_bytes - other.num_bytes)


@dataclass(frozen=True, kw_only=True)
class Option:
    """One way to treat a unit in all its slices, with all else as planned."""

    treatment: Treatment
    more_s: float = 0.0
    """Predicted seconds of an optimizer step beyond the fastest option of the unit."""
    more_bytes: int = 0
    """Bytes that the unit holds beyond its smallest option, from forward to backward or all the time."""


@dataclass(frozen=True, kw_only=True)
class Unit:
    """Parameters that are all-gathered and freed at once, with the treatment of each slice."""

    name: str
    """Qualified name of the module that is sharded; the empty string is the root."""
    operators: tuple[str, ...]
    """Qualified names of the operators whose parameters it holds, in forward order."""
    kind: str
    """Class names of the operators, for reports."""
    treatments: tuple[Treatment, ...]
    """Treatments of the slices; one where the operator is not split."""
    modules: tuple[str, ...] = ()
    """Modules that are grouped in this unit; empty where it is just the module of its name. The unit stays gathered
    from the first call of these modules to the last."""
    exchange: str = ""
    """Exchange by which activations of its operators can move, one of ``core.exchange.KINDS``; empty where none can."""
    exchanged_bytes: int = 0
    """Bytes that a rank sends for that in an optimizer step, where they move."""
    is_read: bool = True
    """True where backward reads the unit's parameters, and so gathers the unit."""
    parameter_bytes: int = 0
    """Gathered parameters of all slices."""
    gradient_bytes: int | None = None
    """Gradients of all slices, in the dtype in which they are reduced: 0 where all is frozen. None: as many as of
    parameters."""
    time_s: float = 0.0
    """Predicted seconds per optimizer step: communication and the operators' own computation."""
    menu: tuple[Option, ...] = ()
    """All treatments that apply to it, offered or not; empty for the root, on one rank and where nothing is
    predicted."""

    @property
    def modes(self) -> tuple[str, ...]:
        """Names of how parameters are treated, one per slice: ``DP``, ``ZDP`` and others of ``core.axes``."""
        return tuple(treatment.name for treatment in self.treatments)

    @property
    def sync(self) -> str:
        """Micro-batches that reduce gradients: one of ``core.axes.SYNC_CHOICES``."""
        return self.treatments[0]["sync"]

    @property
    def wrapped_modules(self) -> tuple[str, ...]:
        """Names of the modules that the unit consists of, in forward order."""
        return self.modules or (self.name,)

    @property
    def num_slices(self) -> int:
        """Number of slices."""
        return len(self.treatments)

    def in_modes(self, *names: str, sync: str | None = None) -> Unit:
        """The unit with treatments of these names, one per slice; ``sync`` None leaves gradient reduction as it is."""
        return replace(self, treatments=named(*names, sync=self.sync if sync is None else sync))

    def treated(self, **changed: str) -> Unit:
        """The unit with other values in some axes, in all slices."""
        return replace(self, treatments=tuple(treatment.but(**changed) for treatment in self.treatments))

    def with_least(self, axis: str) -> Unit:
        """The unit with the value of an axis that takes least memory, in all slices."""
        return self.treated(**{axis: AXES[axis].values[0]})

    def cost(self, *treatments: Treatment) -> Cost:
        """Cost of these treatments of equal shares of the unit, by its `menu`; of its own treatments without any."""
        chosen, options = treatments or self.treatments, {option.treatment: option for option in self.menu}
        priced = [options.get(each, Option(treatment=each)) for each in chosen]
        return Cost(
            sum(option.more_s for option in priced) / len(chosen),
            sum(option.more_bytes for option in priced) / len(chosen),
        )


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The modes of one operator, one per slice: what a plan says, seen from the operator."""

    operator: str
    unit: str
    modes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Block:
    """A module that does not simply keep what it saves for backward."""

    name: str
    """Qualified name of the module; none is inside another."""
    treatment: Treatment
    """Treatment of the tensors that the module saves for backward."""
    kept: tuple[int, ...] = ()
    """Results that a block at one of ``core.axes.LEVELS`` keeps, see ``core.profile.Level.kept``."""
    frees_bytes: int = 0
    """Bytes of a micro-batch that do not stay on the device from its forward to its backward."""
    costs_s: float = 0.0
    """Predicted seconds per optimizer step that the treatment takes."""

    @classmethod
    def recomputing(cls, names: Iterable[str]) -> tuple[Block, ...]:
        """Blocks of these names, all of which recompute everything."""
        return tuple(cls(name=name, treatment=Treatment(saves="recompute")) for name in names)

    @property
    def activations(self) -> str:
        """Value of the axis ``saves``, not ``keep``."""
        return self.treatment["saves"]
