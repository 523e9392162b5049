"""Settings, which are fixed while modes are chosen, and their costs in any modes."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from typing import Any

from lightning_osdp.core.axes import (
    ALL_MODES,
    ANYTHING,
    DP,
    KEEP,
    PLACES,
    STATIONARY,
    ZDP,
    Subject,
    Treatment,
    freed_and_kept,
    on_device,
)
from lightning_osdp.core.cluster import Cluster
from lightning_osdp.core.profile import ModelProfile
from lightning_osdp.core.slices import slice_names, split_operators
from lightning_osdp.core.step import Step
from lightning_osdp.core.units import UnitProfile, grouped
from lightning_osdp.planner.assign.additive import Additive, Modes, sum_s
from lightning_osdp.planner.assign.menu import Price, subject_of, unbeaten
from lightning_osdp.planner.cost import (
    PAPER_TERMS,
    TERMS,
    LargestMoments,
    PeakMemory,
    StepMemory,
    Workload,
    apart_s,
    block_copied_bytes,
    exact_moments,
    exact_peak,
    host_bytes,
    key_of_moments,
    more_optimizer_s,
    optimizer_s,
    paper_memory,
    peak_bytes_of,
    resource_s,
    saved_bytes,
    step_memory,
)
from lightning_osdp.planner.cost.peak_memory import PINNED, ROUNDING_BYTES
from lightning_osdp.planner.engine import DEFAULT, FSDP2, effects_of, with_activations
from lightning_osdp.planner.simulation import StepClock

_OF_STEP = (
    "workload",
    "modes",
    "moving",
    "moving_mode",
    "host_room_bytes",
    "host_rent_s_per_byte",
    "engine",
    "least_ahead",
    "counts_least_ahead",
)
"""Fields of a setting that other units have no say in."""


class Variants:
    """Settings that were made of others: in other units, which the workload, modes and prefetch have no say in."""

    def __init__(self) -> None:
        self._made: dict[Hashable, tuple[Setting, ...]] = {}
        self._known: dict[Hashable, tuple[Setting, ...]] = {}  # of one workload, with what their costs have worked out
        self._workload: Workload | None = None
        self.terms_s: dict[Hashable, tuple[float, Cluster]] = {}
        """Seconds of units in which the samples of a micro-batch have no say, by what has one; with the cluster, which
        has to live as long as its id is part of a key."""
        self.moments: dict[Hashable, LargestMoments] = {}
        """Largest moments of settings with other micro-batch sizes, see `cost.step_memory`."""

    def once(self, setting: Setting, what: Hashable, make: Callable[[], Iterable[Setting]]) -> list[Setting]:
        """Settings that ``make`` makes of a setting, once for all workloads, offered modes and prefetch settings."""
        key = (setting.units, setting.activations, what)
        if key not in self._made:
            self._made[key] = tuple(make())
        if setting.workload != self._workload:
            self._workload, self._known = setting.workload, {}
        fields = {name: getattr(setting, name) for name in _OF_STEP}
        known = key, *fields.values()
        if known not in self._known:
            self._known[known] = tuple(replace(each, **fields) for each in self._made[key])
        return [*self._known[known]]


@dataclass(frozen=True, kw_only=True)
class Decided:
    """Choices made of a model before the modes of its units are; a step's profile has them already."""

    profile: ModelProfile | None = None
    """Profile before anything was chosen; None: nothing was."""
    blocks: Mapping[str, str] = field(default_factory=dict)
    """Blocks that do not keep what they save -> what they do."""
    num_slices: Mapping[str, int] = field(default_factory=dict)
    """Operators that are split -> into how many slices, which are units of their own."""


@dataclass(frozen=True, kw_only=True)
class Setting(Step):
    """A step with what may be chosen of it: what is given. `costs` has what follows."""

    modes: Modes = ALL_MODES
    """Modes that units may take; which micro-batches reduce gradients matters where there are several."""
    moving: frozenset[str] = frozenset()
    """Units, by name, that move activations whatever the modes; no other unit's bytes count on their being gathered."""
    moving_mode: Treatment = STATIONARY
    """Treatment of these units."""
    host_room_bytes: int | None = None
    """Memory of the host within which units may have states or shards there and copy what they save: then only as many
    units may as have room together. None: all may, however much that is."""
    host_rent_s_per_byte: float = 0.0
    """Seconds that count for each byte of the host's memory, in the search for a bound under a limit of that memory."""
    activations: tuple[str, ...] = (KEEP,)
    """Values of ``saves`` that units may take that are blocks."""
    decided: Decided = Decided()
    engine: FSDP2 = DEFAULT
    """Engine that runs the step, with nothing left to choose of its settings."""
    least_ahead: FSDP2 | None = None
    """The engine with as little gathered ahead as may be, see `FSDP2.without_prefetch`; None: it is `engine`."""
    counts_least_ahead: bool = False
    """True where bytes are those under `least_ahead`, and only seconds those under `engine`: nothing between the two is
    both faster and smaller."""
    cost_model: str = "simulate"
    """``simulate``: the step as the engine runs it. ``paper``: the sums of equation 1."""
    variants: Variants = field(default_factory=Variants, compare=False, repr=False)
    """Settings in other units that were made so far; shared by all settings that come of one another."""

    def at(self, micro_batch_size: int, num_micro_batches: int | None = None) -> Setting:
        """Setting with another micro-batch size, and another number of micro-batches."""
        num_micro_batches = self.workload.num_micro_batches if num_micro_batches is None else num_micro_batches
        return replace(self, workload=Workload(micro_batch_size=micro_batch_size, num_micro_batches=num_micro_batches))

    def with_blocks(self, blocks: Mapping[str, str]) -> Setting:
        """Setting of the same units with choices of blocks made, where all keep what they save and nothing is split.

        Args:
            blocks: block -> what it does; those that are not named keep what they save.

        Raises:
            ConfigurationError: there is no such block, or this choice was not profiled for it.
        """

        def make() -> Iterator[Setting]:
            yield self._with(with_activations(self.profile, blocks), blocks=dict(blocks))

        return self.variants.once(self, tuple(blocks.items()), make)[0]

    def with_slices(self, num_slices: Mapping[str, int]) -> Setting:
        """Setting with operators split, where none is so far: each slice is a unit."""

        def make() -> Iterator[Setting]:
            profile = split_operators(self.profile, num_slices, slice_s=self.cluster.slice_s)
            yield self._with(profile, num_slices=dict(num_slices))

        return self.variants.once(self, tuple(num_slices.items()), make)[0]

    def _with(self, profile: ModelProfile, **decided: Any) -> Setting:
        """Setting with this profile and what it has decided, which leaves nothing to choose of what blocks do."""
        found = replace(self.decided, profile=self.unchanged, **decided)
        members: dict[str, list[str]] = {}
        for unit in self.units:
            if found.num_slices.get(unit.name, 1) == 1:
                members[unit.name] = [operator.name for operator in unit.operators]
            else:
                members |= {name: [name] for name in slice_names(unit.name, found.num_slices[unit.name])}
        units = grouped(profile, members)
        return replace(self, profile=profile, units=units, decided=found, activations=(KEEP,))

    @property
    def key(self) -> Hashable:
        """Key that is equal for settings that come of one another and differ in the micro-batch size alone."""
        of_model = id(self.profile), self.units, self.activations, self.moving, self.moving_mode
        return *of_model, self.engine, self.counts_least_ahead, self.workload.num_micro_batches

    @property
    def unchanged(self) -> ModelProfile:
        """The profile before blocks and slices were chosen."""
        return self.decided.profile or self.profile

    @property
    def bytes_engine(self) -> FSDP2:
        """The engine whose bytes count."""
        return self.least_ahead if self.counts_least_ahead and self.least_ahead is not None else self.engine

    @property
    def all_ahead(self) -> Setting:
        """Setting with every unit gathered ahead that may be; itself where that is so already."""
        engine = self.engine.all_ahead
        if engine == self.engine and not self.counts_least_ahead:
            return self
        return replace(self, engine=engine, counts_least_ahead=False)

    @cached_property
    def ahead_for_free(self) -> Setting:
        """Setting with every unit gathered ahead that may be, and no memory for that: it bounds all in between."""
        if self.least_ahead in {None, self.engine}:
            return self
        return replace(self, engine=self.engine.all_ahead, counts_least_ahead=True)

    @property
    def is_paper(self) -> bool:
        """True where the paper's sums are the cost."""
        return self.cost_model == "paper"

    @property
    def overlaps(self) -> bool:
        """True where computing may hide communication, or copies of shards: else the simulated time is a sum, too."""
        if self.cluster.world_size > 1:
            return self.cluster.overlaps and not self.is_paper
        copies = self.cluster.host_copies_overlap and any(effects_of(mode).shard_on_host for mode in self.modes)
        return copies and not self.is_paper

    @property
    def all_zdp_modes(self) -> Modes:
        """Plain FSDP, offered or not: every unit ZDP, the root gathered as ever."""
        return tuple(DP if unit.is_root else ZDP for unit in self.units)

    @cached_property
    def costs(self) -> Costs:
        """Seconds and bytes in any modes."""
        return Costs(self)


class _Once(dict[Treatment, float]):
    """Seconds by treatment, each worked out when it is first asked for."""

    def __init__(self, find: Callable[[Treatment], float]) -> None:
        super().__init__()
        self._find = find

    def __missing__(self, mode: Treatment) -> float:
        found = self[mode] = self._find(mode)
        return found


class Costs:
    """Seconds and bytes of a setting in any modes, each worked out when it is first asked for, and kept."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting

    @cached_property
    def options(self) -> tuple[Modes, ...]:
        """Modes that each unit may take, the one with the least memory first; the root stays gathered in any mode."""
        setting, known = self._setting, cache(self._within)
        root = DP.but(**setting.modes[0].only(*PLACES))
        return tuple(
            (root.within(self._subject(unit)),)
            if unit.is_root
            else (setting.moving_mode,)
            if unit.name in setting.moving
            else known(self._subject(unit), self._choices(unit))
            for unit in setting.units
        )

    def _subject(self, unit: UnitProfile) -> Subject:
        """Properties of a unit that rules of axes ask for; the paper has fewer choices."""
        subject = subject_of(unit, self._setting, self._setting.engine)
        if self._setting.is_paper:
            return replace(
                subject,
                has_host=False,
                has_nodes=False,
                may_exchange=False,
                may_leave=False,
                may_replicate=False,
                may_stay=False,
            )
        if self._room_on_host is not None:
            has_room = {axis for axis, name in self._room_on_host if name == unit.name}
            return replace(
                subject,
                has_host=subject.has_host and "states" in has_room,
                may_leave=subject.may_leave and not has_room.isdisjoint({"shard", "shard of states"}),
            )
        return subject

    def _choices(self, unit: UnitProfile) -> tuple[str, ...]:
        """Values of ``saves`` that a unit may take, the one that saves least first."""
        offered = (Treatment(saves=choice) for choice in self._setting.activations)
        subject = Subject(profiled=() if unit.block is None else unit.block.segments)
        choices = dict.fromkeys(each.within(subject)["saves"] for each in offered)
        samples = self._setting.workload.micro_batch_size
        if self._room_on_host is not None and ("saves", unit.name) not in self._room_on_host:
            choices = dict.fromkeys(choice for choice in choices if not block_copied_bytes(unit, choice, samples))
        return tuple(sorted(choices, key=lambda choice: saved_bytes(unit, choice, samples)))

    def _within(self, subject: Subject, choices: tuple[str, ...]) -> Modes:
        """Treatments that are offered and apply; where the host is short of room, states there are over all ranks."""
        modes = dict.fromkeys(mode.within(subject) for mode in self._setting.modes)
        if subject.may_leave and self._all_leave:
            modes = dict.fromkeys(mode for mode in modes if self._leaves(subject, mode))
        if self._room_on_host is not None:
            modes = dict.fromkeys(mode for mode in modes if not {"states", "home"} <= mode.keys())
        return tuple(mode.but(saves=choice) for choice in choices for mode in modes)

    @staticmethod
    def _leaves(subject: Subject, mode: Treatment) -> bool:
        """Tells if a unit's shard is on the host, or has to be where the states are that stay on the device."""
        effects = effects_of(mode)
        return effects.shard_on_host or not (subject.may_leave_alone or effects.updates_on_host)

    @cached_property
    def _all_leave(self) -> bool:
        """True where shards are offered no other place than the host, wherever they may be there."""
        on_device = [mode for mode in self._setting.modes if not effects_of(mode).shard_on_host]
        must_stay = all(mode.but(shard="host").within(ANYTHING) == mode for mode in on_device)
        return must_stay and len(on_device) < len(self._setting.modes)

    @cached_property
    def _room_on_host(self) -> frozenset[tuple[str, str]] | None:
        """Axes and units with room on the host for all of them together; None where the host has room for everything.

        Copies of what blocks save have it first, for they free as much of the device as they take there, and so do
        frozen shards, and states half of that; then the largest, for many small units cannot free what a large one
        does. Room for the copies that updates of a unit need is room for its shard, too.
        """
        setting = self._setting
        if setting.host_room_bytes is None:
            return None
        samples = setting.workload.micro_batch_size
        optimizer, pins = setting.profile.optimizer, setting.cluster.host_copies_overlap
        ranks, layout = setting.cluster.world_size, setting.bytes_engine.layout
        may_leave = any(effects_of(mode).shard_on_host for mode in setting.modes)
        sizes = dict[tuple[str, str], float]()
        for unit in setting.units:
            copied = max(block_copied_bytes(unit, choice, samples) for choice in setting.activations)
            sizes["saves", unit.name] = copied * (PINNED if pins else 1)
            if unit.name in setting.moving:
                continue
            if unit.gradient_bytes:
                states, both = (
                    layout([unit], optimizer, ranks, on_host=[True], shards_on_host=[has_shard], pins=pins).host
                    for has_shard in (False, True)
                )
                sizes["states", unit.name] = states
                if may_leave:
                    sizes["shard of states", unit.name] = max(0.0, both - states)
            elif may_leave:
                sizes["shard", unit.name] = layout([unit], optimizer, ranks, shards_on_host=[True], pins=pins).host
        left, found = setting.host_room_bytes + ROUNDING_BYTES - host_bytes(setting), []
        order = ("saves", "shard", "states", "shard of states")
        for key in sorted(sizes, key=lambda key: (order.index(key[0]), -sizes[key])):
            if sizes[key] <= left and (key[0] != "shard of states" or ("states", key[1]) in found):
                left -= sizes[key]
                found.append(key)
        return frozenset(found)

    @cached_property
    def menus(self) -> tuple[Modes, ...]:
        """The options of each unit that no other one of its options beats, the one with the least memory first."""
        known: dict[tuple[Modes, tuple[Price, ...]], Modes] = {}
        menus = []
        for unit, options in enumerate(self.options):
            prices = tuple(self._price(unit, mode) for mode in options)
            if (options, prices) not in known:
                left = unbeaten(prices)
                smallest = min(left, key=lambda place: sum(prices[place][-2:]))
                known[options, prices] = tuple(options[place] for place in dict.fromkeys((smallest, *left)))
            menus.append(known[options, prices])
        return tuple(menus)

    def _price(self, unit: int, mode: Treatment) -> Price:
        """Seconds, by resource where something overlaps, and the bytes that are held within and between micro-batches.

        Prices that differ by rounding alone are equal: in the ninth digit of a time, in a thousandth of a byte.
        """
        setting, place = self._setting, self.memory.places.get(unit)
        held = (0.0, 0.0) if place is None else self.memory.held(place, mode)
        own: tuple[float, ...] = (self.times_s[unit][mode],)
        if setting.overlaps:
            of_unit = setting.units[unit]
            computing_s, *sent_s = resource_s(
                of_unit, mode, cluster=setting.cluster, workload=setting.workload, engine=setting.engine
            )
            own = (computing_s + self.unit_s(of_unit, mode), *sent_s)
        return (*(float(f"{seconds:.9g}") for seconds in own), *(round(num_bytes, 3) for num_bytes in held))

    def uniform_modes(self) -> Iterator[Modes]:
        """Yields each mode that is offered, for all units alike as far as may be; so people choose by hand."""

        def of(unit: UnitProfile, options: Modes, mode: Treatment) -> Treatment:
            if unit.is_root:
                subject = self._subject(unit)
                offered = {each.within(subject).only(*PLACES) for each in self._setting.modes}
                places = mode.only(*PLACES).within(subject)  # a frozen unit's says nothing of states
                places = places if places in offered else options[0].only(*PLACES)
                return freed_and_kept(mode)[1].only("home", "keep").but(**places).within(subject)
            own = mode.within(self._subject(unit))
            simpler = (own.only("moves", "home", "keep", *more) for more in (PLACES, ()))
            return next((each for each in (own, *simpler) if each in options), options[0])

        offered = dict.fromkeys(
            mode for options in self.options[1:] or self.options for mode in options if "saves" not in mode
        )
        units = self._setting.units
        made = (tuple(of(*each, mode) for each in zip(units, self.options, strict=True)) for mode in offered)
        yield from dict.fromkeys(made)

    @property
    def least_memory_modes(self) -> Modes:
        """The first option of every unit."""
        return tuple(options[0] for options in self.options)

    @cached_property
    def times_s(self) -> tuple[Mapping[Treatment, float], ...]:
        """Seconds of each unit in every treatment that there is, offered or not, if nothing overlaps."""
        terms = tuple(PAPER_TERMS if self._setting.is_paper else TERMS)
        return tuple(_Once(partial(self._unit_s, unit, terms)) for unit in self._setting.units)

    def _unit_s(self, unit: UnitProfile, terms: tuple[str, ...], mode: Treatment) -> float:
        return self.unit_s(unit, mode, *terms)

    def unit_s(self, unit: UnitProfile, mode: Treatment, *terms: str) -> float:
        """Seconds of a step that a unit takes by these `cost.TERMS`, and for its update beyond that of ZDP."""
        step = self._setting
        terms_s = sum(self._term_s(name, unit, mode) for name in terms)
        if step.is_paper:
            return terms_s
        rent = step.host_rent_s_per_byte
        return terms_s + more_optimizer_s(step, unit, mode, host_rent_s_per_byte=rent)

    def _term_s(self, name: str, unit: UnitProfile, mode: Treatment) -> float:
        """Seconds of one term, which is found once for all micro-batch sizes where samples have no say in it."""
        step, known = self._setting, self._setting.variants.terms_s
        key = name, unit, mode, id(step.cluster), step.engine, step.workload.num_micro_batches
        found = known.get(key)
        if found is not None:
            return found[0]
        seconds = TERMS[name](unit, mode, cluster=step.cluster, workload=step.workload, engine=step.engine)
        if name not in {"compute", "activations"} and not effects_of(mode).exchanges:
            known[key] = seconds, step.cluster
        return seconds

    @cached_property
    def memory(self) -> StepMemory:
        """Peak of one optimizer step for every choice of modes."""
        setting = self._setting
        if setting.is_paper:
            return paper_memory(setting)
        moving = {place: setting.moving_mode for place, unit in enumerate(setting.units) if unit.name in setting.moving}
        return step_memory(
            setting,
            activations=setting.activations,
            moving=moving,
            hosted=self.hosted,
            engine=setting.bytes_engine,
            known=setting.variants.moments,
        )

    @cached_property
    def hosted(self) -> Mapping[int, Treatment]:
        """Units, as positions among all, of which states or shards may be on the host -> how with all that may be."""
        found = {}
        for unit, options in enumerate(self.options):
            there = [mode.only(*PLACES) for mode in options if effects_of(mode).is_on_host]
            if there:
                found[unit] = there[0]  # which takes least of the device
        return found

    @cached_property
    def root_more_s(self) -> float:
        """Seconds that the root's option takes for what is on the host, where bounds are of the device alone, too."""
        return sum(
            times_s[mode] - times_s[on_device(mode)]
            for unit, times_s, (mode, *_) in zip(self._setting.units, self.times_s, self.options, strict=True)
            if unit.is_root
        )

    @cached_property
    def least_s(self) -> float:
        """Seconds that no modes go below, as if memory were no concern: of computing alone where something overlaps."""
        if self._setting.overlaps:
            return self.compute_s
        fastest = (min(map(of.__getitem__, options)) for of, options in zip(self.times_s, self.options, strict=True))
        return self._constant_s + sum(fastest) - self.root_more_s

    @property
    def apart_s(self) -> float:
        """Seconds by which a step may be faster, at most, where units are shared."""
        return apart_s(len(self._setting.units), cluster=self._setting.cluster, workload=self._setting.workload)

    @cached_property
    def compute_s(self) -> float:
        """Seconds of a step that its operators, the loss and the optimizer compute, whatever the units."""
        workload = self._setting.workload
        segments = self._setting.profile.segments
        segments_s = sum((part.forward_s + part.backward_s).at(workload.micro_batch_size) for part in segments)
        return workload.num_micro_batches * segments_s + self.optimizer_s

    @property
    def optimizer_s(self) -> float:
        """Seconds of the optimizer step; 0 in the paper's sums, which have no such term."""
        return 0.0 if self._setting.is_paper else optimizer_s(self._setting.profile, self._setting.cluster)

    @cached_property
    def _constant_s(self) -> float:
        """Seconds that no unit owns: the loss, the optimizer step, and copies that the profile has."""
        profile, workload = self._setting.profile, self._setting.workload
        loss_s = (profile.loss.forward_s + profile.loss.backward_s).at(workload.micro_batch_size)
        copied = sum(num_bytes.at(workload.micro_batch_size) for _, num_bytes in profile.copied)
        copies_s = 2 * copied * self._setting.cluster.host_copy_s_per_byte
        return workload.num_micro_batches * (loss_s + copies_s) + self.optimizer_s

    @cached_property
    def additive(self) -> Additive:
        """The step if nothing overlaps."""
        return Additive(options=self.menus, times_s=self.times_s, constant_s=self._constant_s, memory=self.memory)

    @cached_property
    def clock(self) -> StepClock:
        """The simulator of its time."""
        setting = self._setting
        return StepClock(setting, setting.engine, host_rent_s_per_byte=setting.host_rent_s_per_byte)

    def step_time_s(self, modes: Sequence[Treatment]) -> float:
        """Predicted seconds of one optimizer step: simulated, which is the sum where nothing overlaps."""
        if self._setting.overlaps:
            return self.clock.step(modes).time_s
        return sum_s(self._constant_s, self.times_s, modes)  # as `additive`, without its memory

    def peak(self, modes: Sequence[Treatment]) -> PeakMemory:
        """Predicted peak of one optimizer step, or a bound on it: see `StepMemory`."""
        return self.memory.peak(modes)

    def exact_peak_bytes(self, modes: Modes) -> int:
        """Bytes of `exact_peak`; at a third micro-batch size they are known from the others."""
        setting = self._setting
        if setting.is_paper:
            return self.peak(modes).peak_bytes
        key = *key_of_moments(setting, setting.bytes_engine), modes
        known = setting.variants.moments
        if key not in known:
            known[key] = exact_moments(setting, modes, engine=setting.bytes_engine)
        return peak_bytes_of(known[key].num_bytes(setting.workload.micro_batch_size)[0])

    def exact_peak(self, modes: Sequence[Treatment]) -> PeakMemory:
        """Predicted peak of one optimizer step."""
        if self._setting.is_paper:
            return self.peak(modes)
        return exact_peak(self._setting, modes, engine=self._setting.bytes_engine)

    def host_bytes(self, modes: Modes) -> int:
        """Host memory that a rank takes in these modes; without any, for what was decided of blocks."""
        return peak_bytes_of(host_bytes(self._setting, modes))

    def fits(self, modes: Modes, memory_limit_bytes: float) -> bool:
        """True if these modes fit: on the device as simulated, and in the room on the host."""
        return self._fits_on_host(modes) and self.exact_peak_bytes(modes) <= memory_limit_bytes

    @cached_property
    def has_room_on_host(self) -> bool:
        """True if the host has room for what was decided of blocks."""
        return self._fits_on_host(())

    def _fits_on_host(self, modes: Modes) -> bool:
        room_bytes = self._setting.host_room_bytes
        return room_bytes is None or self.host_bytes(modes) <= room_bytes

    @property
    def least_bytes(self) -> int:
        """Bytes that the step needs in the modes with the least memory, and with as little gathered ahead as may be."""
        return self._setting.ahead_for_free.costs.memory.peak_bytes(self.least_memory_modes)
