"""Limits on what the planner may choose."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from lightning_osdp.core.axes import (
    ACTIVATION_CHOICES,
    DEFAULT_ACTIVATIONS,
    NAMED_MODES,
    SELECTIVE,
    SHARD_CHOICES,
    STATES_CHOICES,
    SYNC_CHOICES,
    Treatment,
    modes_of,
    values_of,
)
from lightning_osdp.core.profile import ModelProfile
from lightning_osdp.errors import ConfigurationError

_BY_DEFAULT = tuple(name for name, mode in NAMED_MODES.items() if "moves" not in mode and mode["home"] != "one")

MOST_TRAINED = 0.1
"""Share of the parameters' bytes that is trained, at most, where ``replicated`` is offered unasked: as of adapters."""
_SLICES = (1, 2, 4, 8, 16)


@dataclass(frozen=True, kw_only=True)
class SearchSpace:
    """Limits on the decisions of a plan.

    Raises:
        ConfigurationError: a field names a choice that does not exist, or no choice; a number is out of range; or a
            value has another type.
    """

    modes: tuple[str, ...] | None = None
    """Sharding modes that a unit may take: ``("ZDP",)`` frees every one after forward, ``("DP",)`` keeps all parameters
    gathered; ``("hpZ",)`` leaves a shard in each node; ``("HSDP", "HDP")`` shards in the node and replicates across. On
    one node these are ZDP and DP. ``resident`` keeps frozen units for ever. ``replicated`` has all of a trained unit on
    each rank, and all-reduces its gradients. ``stationary`` moves activations of operators in place of
    their weights, and ``node_stationary`` among the ranks of each node. None: all in which weights move,
    ``replicated`` only where a tenth of the model or less is trained, by elementwise optimizers and not with manual
    optimization, and operators by themselves may move activations if a step is predicted to take a fifth less so, and
    0.1 s less."""
    sync: tuple[str, ...] = SYNC_CHOICES
    """Micro-batches that may reduce a unit's gradients: ``("every",)`` keeps none whole between micro-batches;
    ``"node"`` reduces those of HSDP and HDP inside of nodes in every one, and between nodes in the last."""
    states: tuple[str, ...] = STATES_CHOICES[:1]
    """Places of what the optimizer keeps of a unit. ``host``, which is offered only where it is named, and on
    GPUs where nothing fits else, has the host update the unit: beside ``device`` where the unit does not fit else,
    alone wherever anything is trained."""
    shards: tuple[str, ...] = SHARD_CHOICES[:1]
    """Places of a unit's shard between steps. ``host``, which is offered only where it is named, has shards of units
    there of which nothing is trained, or all with states there, and copies them to the device before each all-gather:
    beside ``device`` where they do not fit else, alone wherever the shard of a unit may be there."""
    slices: tuple[int, ...] = _SLICES
    """Numbers of slices that an operator may be split into; 1, whole, is always among them: ``(1,)`` splits none. The
    default is for torch's elementwise optimizers: others, which may look at whole parameters, get it where other
    numbers are named."""
    activations: tuple[str, ...] = DEFAULT_ACTIVATIONS
    """Choices of a block for the tensors that it saves for backward; ``keep`` is always among them. ``offload`` and
    ``recompute_offload`` are for devices with memory of their own; ``selective`` recomputes all but results of some
    matrix products, convolutions and attentions, and is for blocks that may recompute."""
    min_unit_bytes: int | None = None
    """Operators with fewer parameter bytes join their parent's unit; None: 64 KiB, or 1% of the model if less."""
    share_units: bool = True
    """True: adjacent operators of one mode share a unit where the plan is predicted to be faster for it and fits."""

    def __post_init__(self) -> None:
        for name, given, choices in (
            ("modes", self.offered_modes, tuple(NAMED_MODES)),
            ("sync", self.sync, SYNC_CHOICES),
            ("states", self.states, STATES_CHOICES),
            ("shards", self.shards, SHARD_CHOICES),
            ("activations", self.activations, (*ACTIVATION_CHOICES, SELECTIVE)),
        ):
            members = _members(given)
            if not members or any(each not in choices for each in members):
                raise ConfigurationError(f"SearchSpace({name}=...) must name at least one of {choices}, got {given!r}.")
        if not modes_of(self.offered_modes, self.sync):
            raise ConfigurationError(
                "SearchSpace(sync=('node',)) is for HSDP and HDP: expected one of them among modes, or another sync,"
                f" got modes={self.modes!r}."
            )
        if "keep" not in self.activations:
            raise ConfigurationError(
                f"SearchSpace(activations=...) must have 'keep' among them, got {self.activations!r}. To have blocks"
                " recompute whatever it costs, use activation_checkpointing_policy."
            )
        slices = _members(self.slices)
        if 1 not in slices or not all(_is_whole(number, least=1) for number in slices):
            raise ConfigurationError(
                f"SearchSpace(slices=...) must be whole numbers from 1 on, 1 among them, got {self.slices!r}."
            )
        if self.min_unit_bytes is not None and not _is_whole(self.min_unit_bytes, least=0):
            raise ConfigurationError(
                f"SearchSpace(min_unit_bytes=...) must be None or a whole number, at least 0, got"
                f" {self.min_unit_bytes!r}."
            )
        if not isinstance(self.share_units, bool):
            raise ConfigurationError(f"SearchSpace(share_units=...) must be True or False, got {self.share_units!r}.")
        # plans cannot store the lists and sets that users give
        for name in ("modes", "sync", "states", "shards", "slices", "activations"):
            given = getattr(self, name)
            object.__setattr__(self, name, None if given is None else tuple(given))

    @property
    def offered_modes(self) -> tuple[str, ...]:
        """`modes`, or those that are offered where nobody has named any."""
        return _BY_DEFAULT if self.modes is None else self.modes

    @property
    def treatments(self) -> tuple[Treatment, ...]:
        """Treatments of units by `offered_modes`, micro-batches that reduce, and places; least memory first."""
        return modes_of(self.offered_modes, self.sync, self.states, self.shards)

    def unasked(self, profile: ModelProfile) -> SearchSpace:
        """These limits, with ``replicated`` where nobody has named modes and a plain step trains little of a model.

        Operators stay whole for optimizers that may look at whole parameters, unless numbers of slices are named.
        """
        stays_whole = self.slices == _SLICES and not profile.optimizer.is_elementwise
        space = replace(self, slices=(1,)) if stays_whole else self
        trained_bytes = sum(operator.trainable_bytes for operator in profile)
        is_little = 0 < trained_bytes <= MOST_TRAINED * sum(operator.parameter_bytes for operator in profile)
        return space.offering("replicated") if self.modes is None and profile.is_plain and is_little else space

    def offering(self, *names: str) -> SearchSpace:
        """These limits with modes by name: those that are offered, and more."""
        more = (name for name in names if name not in self.offered_modes)
        return replace(self, modes=(*self.offered_modes, *more))

    @property
    def saves(self) -> tuple[str, ...]:
        """Values of the axis ``saves`` that `activations` offer."""
        return values_of(self.activations)

    @property
    def may_move(self) -> bool:
        """True if modes are named in which activations move."""
        return any("moves" in NAMED_MODES[name] for name in self.offered_modes)

    def of(self, profile: ModelProfile) -> ModelProfile:
        """The profile as far as these limits let it be used: without exchanges where activations are not to move.

        Nor are there exchanges that cut parameters of which an optimizer may look at more than single elements.
        """
        may_cut = profile.optimizer.is_elementwise
        kept = tuple(each for each in profile.exchanges if self.may_move and (may_cut or not each.cuts_parameters))
        return profile if len(kept) == len(profile.exchanges) else replace(profile, exchanges=kept)


def _members(value: object) -> Collection[object]:
    """Members of a tuple, a list or a set; no members where the value is anything else."""
    return value if isinstance(value, Collection) and not isinstance(value, str) else ()


def _is_whole(value: object, *, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
