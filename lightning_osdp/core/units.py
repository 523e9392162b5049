"""Partitions of operators into units, before any mode is chosen."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from types import MappingProxyType

from lightning_osdp.core.affine import ZERO, Affine
from lightning_osdp.core.exchange import Exchange
from lightning_osdp.core.profile import BlockProfile, ModelProfile, OperatorProfile, ParameterProfile, Segment, Span
from lightning_osdp.core.text.names import upwards


@dataclass(frozen=True, kw_only=True, eq=False)
class UnitProfile:
    """One candidate unit: the operators that it gathers together, as sums over them."""

    name: str
    """Qualified name of its module; the empty string is the root."""
    operators: tuple[OperatorProfile, ...]
    segments: tuple[Segment, ...]
    """Segments of the unit's operators."""
    calls: tuple[Span, ...]
    """Spans in which forward runs the module, and so gathers the unit."""
    trained_from: int = 0
    """First segment of the model with trainable parameters. Backward comes to no segment before this one, and modules
    that are called in or before this segment have inputs that need no gradient."""
    modules: tuple[str, ...] = ()
    """Modules that are one unit together, in forward order; empty where the unit is just the module of its name."""
    is_read: bool = True
    """True where backward reads the unit's parameters, and so gathers the unit."""
    block: BlockProfile | None = None
    """Unit's module as a block, whose activations are chosen with the unit's modes; None where the module is no block
    or other units lie inside."""
    exchange: Exchange | None = None
    """Exchange by which its activations can move; None where they cannot."""

    @property
    def is_root(self) -> bool:
        """True for the root unit, which is never freed between forward and backward, whatever its mode."""
        return self.name == ""

    @property
    def kind(self) -> str:
        """Class names of the operators, each once."""
        return ", ".join(dict.fromkeys(operator.kind for operator in self.operators))

    @property
    def wrapped_modules(self) -> tuple[str, ...]:
        """Names of the modules that the unit consists of, in forward order."""
        return self.modules or (self.name,)

    @property
    def first(self) -> int:
        """Segment in which the module is called first."""
        return self.calls[0][0]

    @property
    def last(self) -> int:
        """Segment in which the module's last call ends."""
        return self.calls[-1][1]

    @cached_property
    def parameters(self) -> tuple[ParameterProfile, ...]:
        """Parameters in the order of ``named_parameters()``; none where an operator's profile lacks them."""
        if not all(operator.parameters or not operator.parameter_bytes for operator in self.operators):
            return ()
        every = (parameter for operator in self.operators for parameter in operator.parameters)
        return tuple(sorted(every, key=lambda parameter: parameter.position))

    @cached_property
    def parameter_bytes(self) -> int:
        """Bytes of parameters at rest, unsharded."""
        return sum(operator.parameter_bytes for operator in self.operators)

    @cached_property
    def gathered_bytes(self) -> int:
        """Bytes of parameters as gathered for computing."""
        return sum(operator.gathered_bytes for operator in self.operators)

    @cached_property
    def trainable_bytes(self) -> int:
        """Bytes of trainable parameters at rest, which are those of their reduced gradients, too."""
        return sum(operator.trainable_bytes for operator in self.operators)

    @cached_property
    def gradient_bytes(self) -> int:
        """Bytes of unsharded gradients."""
        return sum(operator.gradient_bytes for operator in self.operators)

    @cached_property
    def optimizer_bytes(self) -> int:
        """Bytes of optimizer state, unsharded."""
        return sum(operator.optimizer_bytes for operator in self.operators)

    @cached_property
    def saved_bytes(self) -> Affine:
        """Bytes of tensors saved for backward."""
        return sum((segment.saved_bytes for segment in self.segments), ZERO)

    @cached_property
    def compute_s(self) -> Affine:
        """Forward and backward seconds of a micro-batch."""
        return sum((segment.forward_s + segment.backward_s for segment in self.segments), ZERO)


SMALL_UNIT_BYTES = 64 * 1024
SMALL_UNIT_FRACTION = 0.01
_NEVER_CALLED: tuple[Span, ...] = ((0, 0),)
"""Calls of a module that this batch does not run: the module is never gathered, and matters to no plan."""


def default_min_unit_bytes(profile: ModelProfile) -> int:
    """Bytes below which an operator joins its parent's unit: 64 KiB, or 1% of the model where that is less.

    A unit costs collectives and bookkeeping of its own, milliseconds on CPU and tens of microseconds on a GPU, while
    keeping so few bytes gathered costs next to nothing.
    """
    total = sum(operator.parameter_bytes for operator in profile)
    return min(SMALL_UNIT_BYTES, int(total * SMALL_UNIT_FRACTION))


def partition(profile: ModelProfile, *, min_unit_bytes: int | None = None) -> tuple[UnitProfile, ...]:
    """Candidate units, root first, then in forward order; every operator is in exactly one.

    Each operator gets a unit at the smallest module that encloses all uses of its parameters; operators with one such
    module (tied ones) share the unit. A unit smaller than ``min_unit_bytes`` joins the nearest unit above it in the
    module tree, where ``fully_shard`` puts parameters that no unit of their own holds. Exceptions are units that are
    also used outside of that unit's forward, where their parameters would not be gathered, and units of another dtype.
    A small unit joins the outermost module around it rather than the root: children of the root may be called, and run
    backward, one by one.
    """
    if min_unit_bytes is None:
        min_unit_bytes = default_min_unit_bytes(profile)
    members: dict[str, list[OperatorProfile]] = {"": []}
    for operator in profile:
        members.setdefault(operator.enclosing[0], []).append(operator)
    around = {name for operator in profile for name in operator.enclosing}
    for name in sorted(members, key=_depth, reverse=True):
        num_bytes = sum(operator.parameter_bytes for operator in members[name])
        if name == "" or num_bytes >= min_unit_bytes or any(operator.stands_alone for operator in members[name]):
            continue
        above = next(ancestor for ancestor in _ancestors(name) if ancestor in members)
        child = _child(name)
        if not above and child in around and any(one.name != child for one in members[name]):
            above = child
        joined = (*members.get(above, ()), *members[name])
        if above != name and have_one_dtype(joined) and all(above in one.enclosing for one in members[name]):
            members.setdefault(above, []).extend(members.pop(name))
    return _units(profile, members)


def apart(
    profile: ModelProfile, units: Sequence[UnitProfile], *, takes_trained: bool = False
) -> tuple[UnitProfile, ...]:
    """Units without frozen operators beside trained ones, or in the root, as far as they can be units of their own.

    Where ``takes_trained``, operators that are trained are units of their own, too, unless they are in the root.
    """
    members: dict[str, list[OperatorProfile]] = {"": []}
    for unit in units:
        are_trained = {bool(operator.num_trainable) for operator in unit.operators}
        is_mixed = len(are_trained) > 1 or (takes_trained and not unit.is_root and True in are_trained)
        bound = [operator.name for operator in unit.operators if operator.enclosing[0] != operator.name]
        around = {name for inner in bound for name in _ancestors(inner)}
        for operator in unit.operators:
            leaves = is_mixed or (unit.is_root and not operator.num_trainable)
            is_free = leaves and operator.name not in {*bound, *around}
            members.setdefault(operator.name if is_free else unit.name, []).append(operator)
    return _units(profile, members)


def outermost(operators: Sequence[OperatorProfile]) -> dict[str, list[OperatorProfile]]:
    """Operators by the outermost module that may be their unit: a child of the root, or else the root.

    A child that is the unit of operators inside it holds its own parameters, too.
    """
    children = {
        child
        for operator in operators
        if (child := _child(operator.name)) in operator.enclosing and child != operator.name
    }
    found: dict[str, list[OperatorProfile]] = {"": []}
    for operator in operators:
        child = _child(operator.name)
        found.setdefault(child if child in children and child in operator.enclosing else "", []).append(operator)
    return found


def merged(
    profile: ModelProfile, units: Sequence[UnitProfile], names: Collection[str], *, but: Collection[str] = ()
) -> tuple[UnitProfile, ...] | None:
    """Units with one at each named module in place of all units and parameters inside; None where one cannot be.

    A module cannot hold all parameters below it where some of them are also used outside its forward, or where they
    train in several dtypes: gradients of a unit are reduced in one tensor. Nor can it where it takes a part of a unit
    of several modules. No named module is inside another. Units whose names are in ``but`` stay as they are.
    """
    wanted = set(names)
    members: dict[str, list[OperatorProfile]] = {"": []}
    modules: dict[str, tuple[str, ...]] = {}
    for unit in units:
        num_taken = 0
        for operator in unit.operators:
            stays = operator.stands_alone or unit.name in but
            around = () if stays else (operator.name, *_ancestors(operator.name))
            above = next((name for name in around if name in wanted), None)
            if above is not None and above not in operator.enclosing:
                return None
            members.setdefault(unit.name if above is None else above, []).append(operator)
            num_taken += above is not None
        if unit.modules and num_taken == 0:
            modules[unit.name] = unit.modules
        elif unit.modules and num_taken < len(unit.operators):
            return None
    if not all(have_one_dtype(members.get(name, ())) for name in wanted):
        return None
    return _units(profile, members, modules)


def joined(
    profile: ModelProfile, units: Sequence[UnitProfile], groups: Collection[Sequence[str]]
) -> tuple[UnitProfile, ...] | None:
    """Units with each group as one unit, named after the first of the group; None where one cannot be.

    Groups are names of units, each of which may be joined with the one that follows, see `may_join`; each name is in
    one group.
    """
    by_name = {unit.name: unit for unit in units}
    into = {other: first for first, *others in groups for other in others}
    members: dict[str, list[OperatorProfile]] = {}
    modules: dict[str, tuple[str, ...]] = {}
    for unit in units:
        members.setdefault(into.get(unit.name, unit.name), []).extend(unit.operators)
        if unit.modules:
            modules[unit.name] = unit.modules
    if not all(have_one_dtype(members[group[0]]) for group in groups):
        return None
    for group in groups:
        for name in group:
            modules.pop(name, None)
        modules[group[0]] = tuple(module for name in group for module in by_name[name].wrapped_modules)
    return _units(profile, members, modules)


def next_to(units: Sequence[UnitProfile], place: int) -> int:
    """Place of the unit that the one at this place may be joined with: the next, or of trained ones the next trained.

    Frozen units may be there all the time, and then gather nothing between the two.
    """
    found = place + 1
    while units[place].gradient_bytes and found < len(units) and not units[found].gradient_bytes:
        found += 1
    return found


def may_join(profile: ModelProfile, units: Sequence[UnitProfile], place: int) -> bool:
    """Tells if the unit at this place and that `next_to` it may be one, gathered from their first call to their last.

    Both are called once, one after the other, with no unit inside them, and none but frozen ones begin meanwhile. Both
    lie inside the same units and the same blocks that recompute, and neither is a block itself. Both lie inside the
    same child of the root where children of the root run backward one by one.
    """
    behind = next_to(units, place)
    if behind == len(units):
        return False
    first, second = units[place], units[behind]
    operators = (*first.operators, *second.operators)
    are_called_in_turn = len(first.calls) == len(second.calls) == 1 and first.last < second.first
    if first.is_root or not operators or any(operator.stands_alone for operator in operators) or not are_called_in_turn:
        return False
    called = first.wrapped_modules + second.wrapped_modules
    inside = takewhile(lambda unit: unit.first <= second.last, units[behind + 1 :])
    for unit in (*units[place + 1 : behind], *inside):
        is_inside = any(above in called for name in unit.wrapped_modules for above in _ancestors(name))
        if is_inside or unit.gradient_bytes or not first.gradient_bytes:
            return False
    if not all(name in profile.spans for name in called) or second.last < second.trained_from:
        return False
    for again in profile.rerun.values():
        roles = {(again.surrounds(unit.first, unit.last), unit.name in again.modules) for unit in (first, second)}
        if len(roles) > 1 or again.span in {*first.calls, *second.calls}:
            return False
    around = {name for unit in units if unit.name for name in unit.wrapped_modules}
    is_inside_same = len({tuple(above for above in _ancestors(name) if above in around) for name in called}) == 1
    # the module through which the root calls each operator; the root, where it calls the operator itself
    children = {operator.enclosing[-2] if len(operator.enclosing) > 2 else "" for operator in operators}
    return is_inside_same and (not profile.children_apart or len(children) == 1)


def grouped(
    profile: ModelProfile,
    members: Mapping[str, Collection[str]],
    modules: Mapping[str, Collection[str]] = MappingProxyType({}),
) -> tuple[UnitProfile, ...]:
    """Units by name, made of the operators of these names; ``modules`` names those of units of several modules."""
    operators = {operator.name: operator for operator in profile}
    found = {unit: [operators[name] for name in names] for unit, names in members.items()}
    return _units(profile, found, modules)


def _units(
    profile: ModelProfile,
    members: Mapping[str, Sequence[OperatorProfile]],
    modules: Mapping[str, Collection[str]] = MappingProxyType({}),
) -> tuple[UnitProfile, ...]:
    """Units of these operators, with their segments and calls; root first, then in forward order."""
    position = {operator.name: index for index, operator in enumerate(profile)}
    above = {around for name in members for around in _ancestors(name)}
    blocks = {block.name: block for block in profile.blocks if block.name not in above}
    segments: dict[str, list[Segment]] = {}
    for segment in profile.segments[:-1]:  # the loss is of no unit, not even of an operator that is the root
        segments.setdefault(segment.operator, []).append(segment)
    trained_from = _trained_from(profile)
    exchanges = {each.operators: each for each in profile.exchanges}
    units = []
    for name, unordered in members.items():
        calls = _calls(profile, name, modules.get(name))
        operators = tuple(sorted(unordered, key=lambda operator: position[operator.name]))
        exchange = exchanges.get(tuple(operator.name for operator in operators))
        if exchange is not None and not _may_exchange(profile, exchange, modules.get(name, (name,)), calls):
            exchange = None
        units.append(
            UnitProfile(
                name=name,
                operators=operators,
                segments=tuple(part for operator in operators for part in segments.get(operator.name, ())),
                calls=calls,
                trained_from=trained_from,
                is_read=_is_read(profile, modules.get(name, (name,)), operators, calls, trained_from),
                modules=tuple(modules.get(name, ())),
                block=None if name in modules else blocks.get(name),
                exchange=exchange,
            )
        )
    # where units span equal segments, the outer one comes first
    return tuple(
        sorted(units, key=lambda unit: (not unit.is_root, unit.first, -unit.last, _depth(unit.name), unit.name))
    )


def _may_exchange(profile: ModelProfile, exchange: Exchange, modules: Collection[str], calls: Sequence[Span]) -> bool:
    """Tells if a unit of these modules is an exchange's operators and nothing else, and runs once in each step.

    Operators that are run again in backward would exchange their inputs again; inputs that are copied to the host would
    be gathered.
    """
    if tuple(modules) != exchange.operators or len(calls) != 1:
        return False
    ((first, last),) = calls
    spans = [span for name in exchange.operators for span in profile.spans.get(name, ())]
    is_again = any(
        any(each.surrounds(*span) for span in spans) or not {*each.modules}.isdisjoint(exchange.operators)
        for each in profile.rerun.values()
    )
    return not is_again and not any(start <= last and first <= end for (start, end), _ in profile.copied)


def _is_read(
    profile: ModelProfile,
    names: Collection[str],
    operators: Sequence[OperatorProfile],
    calls: Sequence[Span],
    trained_from: int,
) -> bool:
    """Tells whether backward reads the parameters of a unit of these modules.

    Where its inputs need gradients that is taken for granted: only where they need none does a step in which they do
    tell itself apart. Inputs of operators are known, those of modules around them where training has not begun. The
    root is gathered anyway, and what is run again is read for that.
    """
    needs_none = {*names} == {operator.name for operator in operators} or all(
        first <= trained_from for first, _ in calls
    )
    if "" in names or not needs_none or any(operator.is_read for operator in operators):
        return True
    again = {*profile.rerun, *(name for each in profile.rerun.values() for name in each.modules)}
    return not again.isdisjoint(names) or any(block.name in names for block in profile.blocks)


def _calls(profile: ModelProfile, name: str, modules: Collection[str] | None) -> tuple[Span, ...]:
    """Calls of the unit's module, or one span from the first call of its several modules to the last."""
    if not name:
        return ((0, len(profile.segments) - 1),)
    if modules is None:
        return profile.spans.get(name, _NEVER_CALLED)
    spans = [span for module in modules for span in profile.spans.get(module, ())]
    return ((min(first for first, _ in spans), max(last for _, last in spans)),) if spans else _NEVER_CALLED


def _trained_from(profile: ModelProfile) -> int:
    """First segment whose operator has trainable parameters; 0 where only the root has some, whose place is unknown.

    An operator that is never called itself counts where the nearest module around it is called. Without trainable
    parameters, the result is the number of segments.
    """
    trained = [operator for operator in profile if operator.num_trainable]
    first: dict[str, int] = {}
    for index, segment in enumerate(profile.segments[:-1]):
        first.setdefault(segment.operator, index)
    for operator in trained:
        around = (profile.spans[name][0][0] for name in operator.enclosing if name in profile.spans)
        first.setdefault(operator.name, next(around, len(profile.segments)))
    places = [first[operator.name] for operator in trained if operator.name]
    return min(places, default=0 if trained else len(profile.segments))


def have_one_dtype(operators: Iterable[OperatorProfile]) -> bool:
    """Tells if trainable operators have one dtype, as those of a unit must: its gradients are reduced in one tensor."""
    return len({each.dtype for each in operators if each.num_trainable}) <= 1


def _depth(name: str) -> int:
    return name.count(".") + 1 if name else 0


def _child(name: str) -> str:
    """Child of the root that the module is, or is in."""
    return name.partition(".")[0]


def _ancestors(name: str) -> Sequence[str]:
    """Qualified names of the modules above ``name``, nearest first, ending with the root."""
    return [*upwards(name)[1:], ""]
