"""Which operators share a unit: the wrapping, before any mode is chosen."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from lightning_osdp.core.profile import ModelProfile, OperatorProfile


@dataclass(frozen=True, kw_only=True)
class UnitProfile:
    """One candidate unit: the operators that it gathers together, as sums over them."""

    name: str
    """Qualified name of the module to wrap; the empty string is the root."""
    operators: tuple[OperatorProfile, ...]
    first: int
    """Position, in forward order of all operators, of the first operator that runs inside the wrapped module."""
    last: int
    """Position of the last one."""

    @property
    def is_root(self) -> bool:
        """The root unit: FSDP never frees it between forward and backward, whatever its mode."""
        return self.name == ""

    @property
    def kind(self) -> str:
        """Class names of the operators, each once."""
        return ", ".join(dict.fromkeys(operator.kind for operator in self.operators))

    @property
    def num_calls(self) -> int:
        """Times that forward calls the wrapped module, and so gathers the unit, as far as its operators tell."""
        own = [operator.num_calls for operator in self.operators if operator.name == self.name]
        return min(own or [operator.num_calls for operator in self.operators], default=1)

    @property
    def parameter_bytes(self) -> int:
        """Parameters at rest, unsharded."""
        return sum(operator.parameter_bytes for operator in self.operators)

    @property
    def gathered_bytes(self) -> int:
        """Parameters as gathered for computing."""
        return sum(operator.gathered_bytes for operator in self.operators)

    @property
    def trainable_bytes(self) -> int:
        """Trainable parameters at rest, and their reduced gradients."""
        return sum(operator.trainable_bytes for operator in self.operators)

    @property
    def gradient_bytes(self) -> int:
        """Unsharded gradients."""
        return sum(operator.gradient_bytes for operator in self.operators)

    @property
    def optimizer_bytes(self) -> int:
        """Optimizer state, unsharded."""
        return sum(operator.optimizer_bytes for operator in self.operators)

    @property
    def activation_bytes_per_sample(self) -> float:
        """Tensors saved for backward."""
        return sum(operator.activation_bytes_per_sample for operator in self.operators)

    @property
    def compute_s_per_sample(self) -> float:
        """Forward and backward seconds per sample: gamma of equation 2."""
        return sum(operator.compute_s_per_sample for operator in self.operators)

    @property
    def compute_fixed_s(self) -> float:
        """Forward and backward seconds of a micro-batch, whatever its size."""
        return sum(operator.compute_fixed_s for operator in self.operators)


SMALL_UNIT_BYTES = 64 * 1024
SMALL_UNIT_FRACTION = 0.01


def default_min_unit_bytes(profile: ModelProfile) -> int:
    """Bytes below which an operator joins its parent's unit: 64 KiB, or 1% of the model where that is less.

    A unit costs collectives and bookkeeping of its own, milliseconds on CPU and tens of microseconds on a GPU, while
    keeping so few bytes gathered costs next to nothing.
    """
    total = sum(operator.parameter_bytes for operator in profile)
    return min(SMALL_UNIT_BYTES, int(total * SMALL_UNIT_FRACTION))


def partition(profile: ModelProfile, *, min_unit_bytes: int | None = None) -> tuple[UnitProfile, ...]:
    """Candidate units, root first, then in forward order; every operator is in exactly one.

    Each operator gets a unit at the smallest module that encloses all uses of its parameters; operators with the
    same such module (tied ones) share it. A unit smaller than ``min_unit_bytes`` joins the nearest unit above it in
    the module tree -- which is where FSDP puts parameters that no unit of their own holds -- unless it is also used
    outside that unit's forward, where its parameters would not be gathered.
    """
    if min_unit_bytes is None:
        min_unit_bytes = default_min_unit_bytes(profile)
    members: dict[str, list[OperatorProfile]] = {"": []}
    for operator in profile:
        members.setdefault(operator.enclosing[0], []).append(operator)
    for name in sorted(members, key=_depth, reverse=True):
        if name == "" or sum(operator.parameter_bytes for operator in members[name]) >= min_unit_bytes:
            continue
        above = next(ancestor for ancestor in _ancestors(name) if ancestor in members)
        if all(above in operator.enclosing for operator in members[name]):
            members[above] += members.pop(name)
    return _units(profile, members)


def merged(
    profile: ModelProfile, units: Sequence[UnitProfile], names: Collection[str]
) -> tuple[UnitProfile, ...] | None:
    """The units with one at each named module in place of all units and parameters inside it; None where one cannot be.

    A module cannot hold all parameters below it where some of them are also used outside its forward.

    Args:
        profile: the model.
        units: its partition so far.
        names: modules, none of them inside another.
    """
    wanted = set(names)
    members: dict[str, list[OperatorProfile]] = {"": []}
    for unit in units:
        for operator in unit.operators:
            above = next((name for name in (operator.name, *_ancestors(operator.name)) if name in wanted), None)
            if above is not None and above not in operator.enclosing:
                return None
            members.setdefault(unit.name if above is None else above, []).append(operator)
    return _units(profile, members)


def grouped(profile: ModelProfile, members: Mapping[str, Collection[str]]) -> tuple[UnitProfile, ...]:
    """The units of these names, made of the operators of these names."""
    operators = {operator.name: operator for operator in profile}
    return _units(profile, {unit: [operators[name] for name in names] for unit, names in members.items()})


def _units(profile: ModelProfile, members: Mapping[str, Sequence[OperatorProfile]]) -> tuple[UnitProfile, ...]:
    """Units by name, with the span of operators that run inside them; root first, then in forward order."""
    position = {operator.name: index for index, operator in enumerate(profile)}
    first: dict[str, int] = {"": 0}
    last: dict[str, int] = {"": 0}
    for index, operator in enumerate(profile):
        for name in operator.enclosing:
            first.setdefault(name, index)
            last[name] = index
    units = (
        UnitProfile(
            name=name,
            operators=tuple(sorted(operators, key=lambda operator: position[operator.name])),
            first=first[name],
            last=last[name],
        )
        for name, operators in members.items()
    )
    # of units that span the same operators the outer one comes first
    return tuple(
        sorted(units, key=lambda unit: (not unit.is_root, unit.first, -unit.last, _depth(unit.name), unit.name))
    )


def _depth(name: str) -> int:
    return name.count(".") + 1 if name else 0


def _ancestors(name: str) -> Sequence[str]:
    """Qualified names of the modules above ``name``, nearest first, ending with the root."""
    parts = name.split(".")
    return [".".join(parts[:length]) for length in range(len(parts) - 1, -1, -1)]
