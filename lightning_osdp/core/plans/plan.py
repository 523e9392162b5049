"""The plan: how each unit is sharded, and the predicted cost. A document of names and numbers."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from lightning_osdp.core.axes import ANYTHING, AXES, LEVELS, NAMED_MODES, Treatment, named
from lightning_osdp.core.correction import Correction
from lightning_osdp.core.exchange import KINDS, numbers_of_operators
from lightning_osdp.core.plans.document import as_json, read_value, shown, write_whole
from lightning_osdp.core.plans.search_space import SearchSpace
from lightning_osdp.core.profile import ModelProfile
from lightning_osdp.core.slices import slice_names
from lightning_osdp.core.step import Workload
from lightning_osdp.core.text.byte_size import format_bytes
from lightning_osdp.core.text.duration import format_seconds, three_digits
from lightning_osdp.errors import PlanFormatError, PlanMismatchError

SCHEMA_VERSION = 4
PREFETCH_CHOICES = ("pre", "none")
"""Settings of backward prefetch."""
COST_MODELS = ("simulate", "paper")


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
        return self.treatments[0]["reduce"]

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
        return replace(self, treatments=named(*names, reduce=self.sync if sync is None else sync))

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


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Sharding of one model for one number of ranks; applying it decides nothing.

    Bytes are per rank. A plan made without a profile (see `Plan.all_zdp_step_time_s`) has no predicted times.
    """

    fingerprint: Mapping[str, str]
    """Parameter name -> shape, dtype and marks of the model that the plan is for."""
    world_size: int
    units: tuple[Unit, ...]
    """Units, root first, then in forward order: parameters of a unit are gathered together."""
    memory_limit_bytes: int
    peak_bytes: int
    """Predicted peak of live bytes in one optimizer step, on the rank that holds most."""
    micro_batch_size: int
    """Samples per rank and micro-batch."""
    num_micro_batches: int
    """Micro-batches per optimizer step."""
    step_time_s: float
    """Predicted seconds of one optimizer step."""
    samples_per_s: float
    """Predicted samples per second, all ranks together."""
    gap: float
    """Fraction by which a plan in the search space is predicted to be faster at most."""
    blocks: tuple[Block, ...] = ()
    """Modules that recompute or offload what they save for backward, in forward order; all others keep it."""
    recomputable: tuple[Block, ...] = ()
    """Modules that keep all or some of what they save and might recompute it, with bytes and seconds beyond those of
    what they do, in forward order."""
    search_space: SearchSpace = field(default_factory=SearchSpace)
    """Limits within which the plan was chosen; no limits where a plan file leaves them out."""
    solver: str = ""
    cost_model: str = "simulate"
    """Source of the predictions: ``simulate``, a step as ``fully_shard`` runs it, or ``paper``, sums of equation 1."""
    backward_prefetch: str = "pre"
    forward_prefetch: bool = False
    asynchronous_unshard: bool = True
    """Asynchronous unshard: computing goes on during all-gathers, and their buffers are freed sooner."""
    late_forward: tuple[str, ...] = ()
    """Units, or slices of them, that are gathered when forward comes to them though others are gathered ahead."""
    late_backward: tuple[str, ...] = ()
    """Units, or slices of them, that are gathered when backward comes to them though others are gathered ahead."""
    reached: tuple[str, ...] = ()
    """Units, or slices of them, in the order in which backward comes to them. Empty where modules' names tell it: inner
    units are left before outer ones, and backward comes to all from the first trained unit on."""
    all_zdp_step_time_s: float = 0.0
    """Predicted seconds that plain FSDP takes for as many samples; 0 where it does not fit. Plain FSDP has every unit
    ZDP, with the micro-batches and the activations, kept or recomputed, that are fastest under the limit."""
    all_zdp_peak_bytes: int = 0
    """Predicted peak of plain FSDP; the least that any of its settings reaches where none fits."""
    all_zdp_how: str = ""
    """Differences of plain FSDP from this plan's micro-batches and from keeping all activations; empty for none."""
    peak_phase: str = ""
    """Phase of the peak: ``forward``, ``backward``, ``reduce-scatter`` or ``optimizer step``."""
    peak_operator: str = ""
    """Operator that runs at the peak; the empty string in the loss and in the optimizer step."""
    peak_parts: Mapping[str, int] = field(default_factory=dict)
    """Parts of the peak by name, in bytes."""
    loss_bytes: int = 0
    """Bytes by which the peak would be lower with logits and loss in `core.profile.CHUNKS` chunks."""
    evaluation_peak_bytes: int = 0
    """Predicted peak while the model is evaluated in batches of ``micro_batch_size`` samples per rank."""
    host_bytes: int = 0
    """Predicted memory of the host that a rank takes for states that are there, with copies of shards and gradients,
    and for what blocks offload."""
    host_limit_bytes: int | None = None
    """Most of that under which the plan was chosen; None where there was no limit, or the plan takes nothing."""
    notes: tuple[str, ...] = ()
    correction: Correction = field(default_factory=Correction)
    """Factors that races have found for seconds measured before planning; a later fit's are corrected by them."""
    corrected_step_time_s: float = 0.0
    """Predicted seconds of one optimizer step by what a race has taught since it was planned; 0 where nothing has."""
    node_size: int | None = None
    """Ranks of one node, which follow each other; None: all are in one."""
    schema_version: int = field(default=SCHEMA_VERSION)

    def __str__(self) -> str:
        return _summary(self)

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """One entry per operator, derived from the units."""
        return tuple(
            Decision(operator=operator, unit=unit.name, modes=unit.modes)
            for unit in self.units
            for operator in unit.operators
        )

    @property
    def needs_nodes(self) -> bool:
        """True if a unit is treated otherwise inside of nodes than between them."""
        return any(treatment.needs_nodes for unit in self.units for treatment in unit.treatments)

    @property
    def given_blocks(self) -> dict[str, str]:
        """Activations of `blocks` that the user prescribed: the search space offered no choice but ``keep``."""
        return {block.name: block.activations for block in self.blocks if len(self.search_space.activations) == 1}

    def as_profiled(self, profile: ModelProfile) -> Plan:
        """The plan without blocks that a profile has not, and nothing is predicted of.

        ``activation_checkpointing_policy`` may name modules that do not run once.
        """
        known = {block.name for block in profile.blocks}
        return replace(self, blocks=tuple(block for block in self.blocks if block.name in known))

    @property
    def predicted_gain(self) -> float:
        """Predicted samples/s over plain FSDP's at its best under the same limit; 1.0 where that is not known."""
        predicted = self.all_zdp_step_time_s > 0 and self.step_time_s > 0
        return self.all_zdp_step_time_s / self.step_time_s if predicted else 1.0

    def to_json(self) -> str:
        """JSON text: the fields of this class, with `decisions` beside them for readers."""
        document = as_json(self)
        document["decisions"] = as_json(self.decisions)
        ordered = {"schema_version": document.pop("schema_version"), **document}
        return json.dumps(ordered, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str, *, source: str = "the plan") -> Plan:
        """Plan from the text of `to_json`.

        Args:
            text: JSON text.
            source: what to call the text in errors, such as its path.

        Raises:
            PlanFormatError: not JSON, of another schema version, or an entry is missing, unknown or nonsensical.
        """
        if not isinstance(text, str):
            raise PlanFormatError(f"Expected {source} to be JSON text, got {type(text).__name__}.")
        try:
            document = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise PlanFormatError(
                f"Expected {source} to be a JSON document written by `Plan.save`, but it cannot be parsed: {error}."
                " Restore the file, or plan anew by leaving out `plan=`."
            ) from error
        return _read(document, source)

    def save(self, path: str | Path) -> None:
        """Writes the plan as JSON; the file appears only when it is complete."""
        write_whole(self.to_json(), path)

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Plan from a file written by `save`.

        Raises:
            PlanFormatError: there is no such file, or it is not a plan.
        """
        path = Path(path)
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:  # not text in UTF-8, or a path that no file can have
            raise PlanFormatError(f"Expected a plan file at {str(path)!r}, but it cannot be read: {error}.") from error
        return cls.from_json(text, source=f"plan file {str(path)!r}")

    def check_matches(self, fingerprint: Mapping[str, str], *, world_size: int, node_size: int | None = None) -> None:
        """Returns if the plan is for this model on this many ranks, and on nodes of this size where that matters.

        Raises:
            PlanMismatchError: with the first differences.
        """
        listed = self.differences(fingerprint, world_size=world_size, node_size=node_size)
        if listed:
            raise PlanMismatchError(
                f"Expected a plan for this model and this number of ranks, but: {listed}."
                " Plan anew by leaving out `plan=`, or use the model and the number of ranks that it was made for."
            )

    def differences(self, fingerprint: Mapping[str, str], *, world_size: int, node_size: int | None = None) -> str:
        """First differences from the plan's model and ranks, as in `check_matches`; empty where the plan matches."""
        differences = []
        if world_size != self.world_size:
            differences.append(f"the plan is for {self.world_size} ranks, this run has {world_size}")
        if self.needs_nodes and node_size != self.node_size:
            own = world_size if node_size is None else node_size
            differences.append(f"the plan is for nodes of {self.node_size} ranks, this run has nodes of {own}")
        names = list(dict.fromkeys([*self.fingerprint, *fingerprint]))
        for name in names:
            planned, found = self.fingerprint.get(name), fingerprint.get(name)
            if planned != found:
                planned, found = (text if text is not None else "not there" for text in (planned, found))
                differences.append(f"parameter {name!r}: planned {planned}, found {found}")
        first, rest = differences[:3], len(differences) - 3
        return "; ".join(first) + (f"; and {rest} more" if rest > 0 else "")


def workload_of(plan: Plan) -> Workload:
    """Samples and micro-batches of a rank in one optimizer step."""
    return Workload(micro_batch_size=plan.micro_batch_size, num_micro_batches=plan.num_micro_batches)


def _summary(plan: Plan) -> str:
    """Ten lines: ranks, decisions and predictions; `lightning-osdp show` prints the units, too."""
    limit = format_bytes(plan.memory_limit_bytes)
    samples = plan.micro_batch_size * plan.num_micro_batches * plan.world_size
    if plan.step_time_s > 0:
        share = plan.peak_bytes / plan.memory_limit_bytes
        memory = f"{format_bytes(plan.peak_bytes)} of {limit} ({share:.1%}) predicted per rank"
        memory += f", {format_bytes(plan.host_bytes)} on the host" if plan.host_bytes else ""
        step = f"{format_seconds(plan.step_time_s)} predicted, {three_digits(plan.samples_per_s)} samples/s"
        gap = f"{plan.gap:.2%} at most to the fastest plan in the search space" if plan.solver else "not predicted"
    else:
        memory, step, gap = f"not predicted; the limit is {limit}", "not predicted", "not predicted"
    gain = (
        f"{plan.predicted_gain:.3f} times the samples/s of plain FSDP" if plan.all_zdp_step_time_s else "not predicted"
    )
    lines = {
        "units": _counted(" + ".join(dict.fromkeys(unit.modes)) for unit in plan.units if unit.name),
        "blocks": _counted(block.activations for block in plan.blocks) if plan.blocks else "all keep what they save",
        "prefetch": f"backward {plan.backward_prefetch}, forward {'next' if plan.forward_prefetch else 'none'}",
        "batch": f"{plan.micro_batch_size} x {plan.num_micro_batches} x {plan.world_size} = {samples} samples a step",
        "memory": memory,
        "peak": f"{plan.peak_phase} {plan.peak_operator}".strip() or "not known",
        "step": step,
        "gain": gain,
        "gap": gap,
    }
    ranks = "one rank" if plan.world_size == 1 else f"{plan.world_size} ranks"
    if plan.node_size is not None:
        ranks += f" in nodes of {plan.node_size}"
    return "\n".join([f"OSDP plan for {ranks}", *(f"{name:9}{text}" for name, text in lines.items())])


def _counted(names: Iterable[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(Counter(names).items())) or "the root alone"


def _read(document: object, source: str) -> Plan:
    if not isinstance(document, dict):
        raise PlanFormatError(f"Expected {source} to hold a JSON object, got {type(document).__name__}.")
    version = document.get("schema_version")
    if version == 3:
        document = _from_schema_3(document)
    elif version != SCHEMA_VERSION:
        raise PlanFormatError(
            f"Expected {source} to have schema_version {SCHEMA_VERSION}, got {shown(version)}."
            " Plan anew with this version of lightning_osdp, or use the version that wrote the plan."
        )
    entries = {key: value for key, value in document.items() if key != "decisions"}
    plan: Plan = read_value(Plan, entries, f"{source} at Plan")
    _check_units(plan.units, source)
    _check_blocks(plan.blocks, source)
    _check_blocks((*(block for block in plan.blocks if not block.kept), *plan.recomputable), source)
    for name in ("world_size", "micro_batch_size", "num_micro_batches", "memory_limit_bytes"):
        if getattr(plan, name) < 1:
            raise PlanFormatError(f"Expected {name!r} of {source} to be at least 1, got {getattr(plan, name)!r}.")
    _check_choice("'backward_prefetch'", plan.backward_prefetch, PREFETCH_CHOICES, source)
    _check_choice("'cost_model'", plan.cost_model, COST_MODELS, source)
    _check_prefetch(plan, source)
    _check_nodes(plan, source)
    if "decisions" in document and document["decisions"] != json.loads(plan.to_json())["decisions"]:
        raise PlanFormatError(
            f"Expected 'decisions' of {source} to be what its 'units' say, but they differ."
            " Edit 'units' (they say what is sharded how) and delete 'decisions' (they are derived)."
        )
    return plan


def _from_schema_3(document: dict[str, Any]) -> dict[str, Any]:
    """A plan as schema 4 has it: units had names of modes and one ``sync``, blocks had ``activations``.

    Units had prices of two other options in place of a menu; these are left out.
    """
    found = {**document, "schema_version": SCHEMA_VERSION}
    if isinstance(found.get("units"), list):
        found["units"] = [_unit_from_schema_3(unit) if isinstance(unit, dict) else unit for unit in found["units"]]
    for name in ("blocks", "recomputable"):
        if isinstance(found.get(name), list):
            found[name] = [
                {**{k: v for k, v in block.items() if k != "activations"}, "treatment": {"saves": block["activations"]}}
                if isinstance(block, dict) and "activations" in block
                else block
                for block in found[name]
            ]
    return found


def _unit_from_schema_3(unit: dict[str, Any]) -> dict[str, Any]:
    modes, sync = unit.get("modes"), unit.get("sync", "every")
    if not isinstance(modes, list):
        return unit
    prices = {"keep_saves_s", "keep_costs_bytes", "accumulate_saves_s", "accumulate_costs_bytes"}
    left = {name: value for name, value in unit.items() if name not in {"modes", "sync", *prices}}
    treatments = [{**NAMED_MODES[mode], "reduce": sync} if mode in [*NAMED_MODES] else mode for mode in modes]
    return {**left, "treatments": treatments}


def _check_choice(what: str, value: str, choices: tuple[str, ...], where: str) -> None:
    if value not in choices:
        raise PlanFormatError(f"Expected {what} of {where} to be one of {choices}, got {value!r}.")


def _check_treatment(treatment: Treatment, on: str, where: str) -> None:
    if any(AXES[name].on != on for name in treatment):
        raise PlanFormatError(f"Expected the treatment of {where} to be that of a {on}, got {treatment!r}.")
    wrong = next((name for name, value in treatment.items() if treatment.within(ANYTHING)[name] != value), None)
    if wrong is not None:
        raise PlanFormatError(
            f"Expected the treatment of {where} to be one that there is, got {treatment!r}: {wrong!r} of"
            f" {treatment[wrong]!r} does not go with the others. Leave one of them out."
        )


def _check_units(units: tuple[Unit, ...], source: str) -> None:
    seen_units: set[str] = set()
    seen_operators: set[str] = set()
    seen_modules: set[str] = set()
    for unit in units:
        where = f"unit {unit.name!r} of {source}"
        if not unit.treatments:
            raise PlanFormatError(f"Expected at least one treatment of {where}, got none.")
        for treatment in unit.treatments:
            _check_treatment(treatment, "unit", where)
        if len({treatment.of_all_slices for treatment in unit.treatments}) > 1:
            shared = tuple(name for name, axis in AXES.items() if not axis.by_slice)
            raise PlanFormatError(
                f"Expected all slices of {where} to have the same values of {shared}, got {shown(unit.treatments)}."
            )
        repeated = seen_operators.intersection(unit.operators) | ({unit.name} & seen_units)
        if repeated or len(set(unit.operators)) < len(unit.operators):
            raise PlanFormatError(f"Expected units and operators of {source} once each, got {where} again.")
        if seen_modules.intersection(unit.modules) or len(set(unit.modules)) < len(unit.modules):
            raise PlanFormatError(f"Expected modules of {source} in one unit each, got those of {where} again.")
        if unit.modules and (unit.num_slices > 1 or not unit.name):
            raise PlanFormatError(f"Expected no 'modules' in {where}: neither slices nor the root are grouped.")
        _check_exchange(unit, where)
        seen_modules.update(unit.modules)
        seen_units.add(unit.name)
        seen_operators.update(unit.operators)
    if "" not in seen_units:
        raise PlanFormatError(f"Expected {source} to have a root unit, named '', got none.")


def _check_exchange(unit: Unit, where: str) -> None:
    if not unit.exchange:
        if any("moves" in treatment for treatment in unit.treatments):
            raise PlanFormatError(f"Expected an 'exchange' of {where}, one of {KINDS}, for it moves activations.")
        return
    _check_choice("'exchange'", unit.exchange, KINDS, where)
    numbers = numbers_of_operators(unit.exchange)
    if len(unit.operators) not in numbers or unit.operators != unit.wrapped_modules or unit.num_slices > 1:
        raise PlanFormatError(
            f"Expected {where} to be {' or '.join(map(str, numbers))} operators, the modules of the unit, for its"
            f" exchange is {unit.exchange!r}, got {shown(unit.operators)} in {unit.num_slices} slices."
        )


def _check_blocks(blocks: tuple[Block, ...], source: str) -> None:
    names = {block.name for block in blocks}
    if len(names) < len(blocks):
        raise PlanFormatError(f"Expected blocks of {source} once each, got {[block.name for block in blocks]}.")
    for block in blocks:
        where = f"block {block.name!r} of {source}"
        _check_treatment(block.treatment, "block", where)
        if not block.treatment:
            raise PlanFormatError(f"Expected {where} to do something else than to keep what it saves. Leave it out.")
        if bool(block.kept) != (block.activations in LEVELS) or [*block.kept] != sorted({*block.kept}):
            raise PlanFormatError(
                f"Expected {where} to name results in ascending order in 'kept' if it is at one of {LEVELS}, and none"
                f" else, got {block.activations!r} with {[*block.kept]}."
            )
        parts = block.name.split(".")
        around = {".".join(parts[:length]) for length in range(1, len(parts))}
        if not block.name or around & names:
            raise PlanFormatError(f"Expected no block of {source} inside another, and not the root, got {where}.")


def _check_nodes(plan: Plan, source: str) -> None:
    size, ranks = plan.node_size, plan.world_size
    if size is not None and (size < 1 or ranks % size):
        raise PlanFormatError(f"Expected 'node_size' of {source} to divide its {ranks} ranks, got {size}.")
    if plan.needs_nodes and (size is None or not 1 < size < ranks):
        names = tuple(name for name, mode in NAMED_MODES.items() if mode.needs_nodes)
        raise PlanFormatError(
            f"Expected {source} to have several nodes of several ranks for modes {names}, got node_size {size} for"
            f" {ranks} ranks."
        )


def _check_prefetch(plan: Plan, source: str) -> None:
    known = {part for unit in plan.units if unit.name for part in slice_names(unit.name, unit.num_slices)}
    for name in ("late_forward", "late_backward", "reached"):
        unknown = [part for part in getattr(plan, name) if part not in known]
        if unknown:
            raise PlanFormatError(
                f"Expected {name!r} of {source} to name units or slices but the root, got {shown(unknown[0])}."
            )
