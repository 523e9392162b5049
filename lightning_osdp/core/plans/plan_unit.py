"""What a plan says of one unit, of one operator, and of one block."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lightning_osdp.core.modes import MODES, ShardingMode


@dataclass(frozen=True, kw_only=True)
class Unit:
    """What is gathered and freed at once, and how."""

    name: str
    """Qualified name of the module that is sharded; the empty string is the root."""
    operators: tuple[str, ...]
    """Qualified names of the operators whose parameters it holds, in forward order."""
    kind: str
    """Class names of the operators, for reports."""
    modes: tuple[str, ...]
    """Sharding mode of each slice; one slice where the operator is not split."""
    modules: tuple[str, ...] = ()
    """Modules that are grouped in this unit, where that is not just the module of its name: it stays gathered from the
    first of their calls to the last."""
    sync: str = "every"
    """Which micro-batches reduce gradients: ``every`` or ``last``."""
    parameter_bytes: int = 0
    """Gathered parameters of all slices."""
    time_s: float = 0.0
    """Predicted seconds per optimizer step: communication and the operators' own computation."""
    keep_saves_s: float = 0.0
    """Predicted seconds per optimizer step that keeping every slice gathered (DP) saves over sharding it (ZDP)."""
    keep_costs_bytes: int = 0
    """Bytes that stay allocated from forward to backward if every slice is kept gathered."""
    accumulate_saves_s: float = 0.0
    """Predicted seconds per optimizer step that reducing gradients in the last micro-batch only saves."""
    accumulate_costs_bytes: int = 0
    """Bytes that stay allocated from one micro-batch to the next for that."""

    @property
    def sharding_modes(self) -> tuple[ShardingMode, ...]:
        """What the names of `modes` and `sync` stand for, one per slice."""
        return tuple(replace(MODES[mode], sync=self.sync) for mode in self.modes)

    @property
    def num_slices(self) -> int:
        """Number of slices."""
        return len(self.modes)


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
    activations: str
    """One of `ACTIVATION_CHOICES`, not ``keep``."""
    frees_bytes: int = 0
    """Bytes of a micro-batch that do not stay on the device from its forward to its backward."""
    costs_s: float = 0.0
    """Predicted seconds per optimizer step that this takes."""
