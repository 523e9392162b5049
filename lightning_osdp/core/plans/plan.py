"""The plan: how each unit is sharded, and the predicted cost. A document of names and numbers."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from lightning_osdp.core.axes import NAMED_MODES, STATIONARY
from lightning_osdp.core.correction import Correction
from lightning_osdp.core.plans.checks import check_blocks, check_choice, check_levels, check_units, from_schema_3
from lightning_osdp.core.plans.document import as_json, read_value, shown, write_whole
from lightning_osdp.core.plans.parts import Block, Decision, Unit
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
    for shards that are there, and for what blocks offload."""
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

    def offered(self, profile: ModelProfile) -> SearchSpace:
        """Search space with what nobody has to name: units may be replicated, or move activations where some do."""
        space = self.search_space.unasked(profile)
        moves = any("moves" in treatment for unit in self.units for treatment in unit.treatments)
        return space if space.may_move or not moves else space.offering(STATIONARY.name)

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

    def check(self, *, source: str = "the plan") -> None:
        """Returns if a file of the plan would be read.

        Raises:
            PlanFormatError: a value is of another type than it must be, or no plan can have it.
        """
        self.from_json(self.to_json(), source=source)

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
    """Ten lines of ranks, decisions and predictions, and its notes; `lightning-osdp show` prints the units, too."""
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
    told = [*lines.items(), *(("note", note) for note in plan.notes)]
    return "\n".join([f"OSDP plan for {ranks}", *(f"{name:9}{text}" for name, text in told)])


def _counted(names: Iterable[str]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(Counter(names).items())) or "the root alone"


def _read(document: object, source: str) -> Plan:
    if not isinstance(document, dict):
        raise PlanFormatError(f"Expected {source} to hold a JSON object, got {type(document).__name__}.")
    version = document.get("schema_version")
    if version == 3:
        document = from_schema_3(document)
    elif version != SCHEMA_VERSION:
        raise PlanFormatError(
            f"Expected {source} to have schema_version {SCHEMA_VERSION}, got {shown(version)}."
            " Plan anew with this version of lightning_osdp, or use the version that wrote the plan."
        )
    entries = {key: value for key, value in document.items() if key != "decisions"}
    plan: Plan = read_value(Plan, entries, f"{source} at Plan")
    check_units(plan.units, source)
    check_blocks(plan.blocks, source)
    check_blocks((*(block for block in plan.blocks if not block.kept), *plan.recomputable), source)
    check_levels(plan.units, plan.blocks, source)
    for name in ("world_size", "micro_batch_size", "num_micro_batches", "memory_limit_bytes"):
        if getattr(plan, name) < 1:
            raise PlanFormatError(f"Expected {name!r} of {source} to be at least 1, got {getattr(plan, name)!r}.")
    check_choice("'backward_prefetch'", plan.backward_prefetch, PREFETCH_CHOICES, source)
    check_choice("'cost_model'", plan.cost_model, COST_MODELS, source)
    _check_prefetch(plan, source)
    _check_nodes(plan, source)
    if "decisions" in document and document["decisions"] != json.loads(plan.to_json())["decisions"]:
        raise PlanFormatError(
            f"Expected 'decisions' of {source} to be what its 'units' say, but they differ."
            " Edit 'units' (they say what is sharded how) and delete 'decisions' (they are derived)."
        )
    return plan


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
