"""Predictions for a model on one machine: of OSDP's plan, and of strategies that people choose by hand."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from rich.console import RenderableType

from lightning_osdp.cli.answer import step_seconds
from lightning_osdp.core.axes import ACTIVATION_CHOICES, DEFAULT_ACTIVATIONS, NODE_STATIONARY, SELECTIVE, STATIONARY
from lightning_osdp.core.batch_policy import BatchPolicy
from lightning_osdp.core.plans.parts import Unit
from lightning_osdp.core.plans.plan import Plan
from lightning_osdp.core.plans.search_space import SearchSpace
from lightning_osdp.core.profile import ModelProfile
from lightning_osdp.core.text.byte_size import format_bytes
from lightning_osdp.core.text.duration import format_seconds, three_digits
from lightning_osdp.core.text.progress import Progress
from lightning_osdp.errors import ConfigurationError, InfeasibleError
from lightning_osdp.machines import PUBLISHED_RATES, Machine
from lightning_osdp.planner.engine import effects_of
from lightning_osdp.planner.scheduler import BY_HAND, HandMade, PlanMethod, made_by_hand, make_plan
from lightning_osdp.planner.simulation import StepEstimate, simulate
from lightning_osdp.report.sentences import tell_kept, tell_peak
from lightning_osdp.report.tables import table

OSDP = "OSDP"


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Predictions for one model on one machine."""

    spec: str
    """Machine as the user wrote it."""
    machine: Machine
    limit_bytes: int
    """Memory of one rank for tensors."""
    host_limit_bytes: int | None
    """Memory of its host that one rank may take; None where nothing may be there."""
    profile: ModelProfile
    tokens: int
    """Tokens of a sample; 0 where they are not known."""
    plan: Plan | None
    """OSDP's plan; None where OSDP was not asked or no plan fits."""
    on_device: Plan | None
    """OSDP's plan with all of its units on the device, where ``plan`` has some on the host; None where none fits."""
    all_on_host: Plan | None
    """OSDP's plan with all states and shards on the host, likewise."""
    why_not: str
    """Reason why no plan of OSDP's fits, with a remedy; empty where one does."""
    by_hand: Sequence[HandMade]
    """Strategies by hand: the fastest that fits first, and those that do not fit last."""

    @property
    def fits(self) -> bool:
        """True if OSDP's plan or a strategy by hand fits."""
        return self.plan is not None or any(each.fits for each in self.by_hand)

    @property
    def name(self) -> str:
        """Name of the strategy of `chosen`."""
        return OSDP if self.plan is not None else self.by_hand[0].name if self.by_hand else ""

    @cached_property
    def chosen(self) -> Plan | None:
        """OSDP's plan, or the best by hand, which need not fit; None where there is neither."""
        return self.plan or (self.by_hand[0].plan if self.by_hand else None)

    @cached_property
    def step(self) -> StepEstimate | None:
        """Simulated step of the chosen plan."""
        return None if self.chosen is None else simulate(self.chosen, self.profile, self.machine.cluster)

    @property
    def ahead_s(self) -> float:
        """Seconds of the chosen plan's step whose updates on the host begin in backward."""
        assert self.chosen is not None
        return simulate(self.chosen, self.profile.with_updates(ahead=True), self.machine.cluster).time_s

    def compared(self) -> RenderableType:
        """Table of OSDP's plan, and those with nothing and everything on the host, above the strategies by hand."""
        rows = [] if self.plan is None else [_row(OSDP, self.plan, self.plan)]
        if self.plan is not None and _on_host(self.plan):
            rows.append(_row(f"{OSDP} without the host", self.on_device, self.plan))
            rows.append(_row(f"{OSDP} with all on the host", self.all_on_host, self.plan))
        rows += [_row(each.name, each, self.plan) for each in self.by_hand]
        gain = () if self.plan is None else ("OSDP over it",)
        headings = ("micro-batch", "step", "samples/s", *gain, "peak")
        return table({"": "left", **dict.fromkeys(headings, "right")}, rows)

    def sentences(self) -> Iterator[str]:
        """Sentences on the time and the memory of the chosen plan."""
        plan, step = self.chosen, self.step
        if plan is None or step is None:
            return
        shares = {
            "computes": step.compute_s,
            "waits for communication": step.exposed_communication_s,
            "copies and launches": step.overhead_s,
            "is slowed by communication beside it": step.contention_s,
        }
        told = ", ".join(f"{name} {seconds / step.time_s:.0%}" for name, seconds in shares.items())
        yield f"In a step {self.name} {told}."
        if self.tokens:
            rate = plan.samples_per_s * self.tokens
            yield f"It takes {three_digits(rate)} tokens/s, {three_digits(rate / plan.world_size)} on each GPU."
            low, high = PUBLISHED_RATES
            yield (
                f"Eager steps that others published took {low:.2f} to {high:.2f} times the tokens/s predicted of them"
                f" so: that would be {three_digits(rate * low)} to {three_digits(rate * high)}."
            )
        yield f"Its peak is in {tell_peak(plan)}."
        yield f"CUDA's allocator reserves {format_bytes(step.reserved_bytes)} for that, besides what fragments."
        recomputing = f", {len(plan.blocks)} blocks do not keep what they save for backward" if plan.blocks else ""
        yield f"Between forward and backward it keeps {tell_kept(plan)}{recomputing}."
        if self.plan is not None and self.host_limit_bytes is not None:
            updated = sum(bool(unit.gradient_bytes) for unit in plan.units)
            units = [unit for unit in plan.units if unit.parameter_bytes]
            kept = sum(any(effects_of(each).shard_on_host for each in unit.treatments) for unit in units)
            yield (
                f"The host updates {len(_hosted(plan))} of {updated} units and has the shards of {kept} of"
                f" {len(units)}, for which it takes"
                f" {format_bytes(plan.host_bytes)} of its memory for each GPU; each may take"
                f" {format_bytes(self.host_limit_bytes)}."
            )
            if _hosted(plan):
                yield (
                    "Where gradients are not clipped, and the host has room for copies of these states, updates there"
                    f" begin in backward, and a step takes {format_seconds(self.ahead_s)}."
                )
        host = self.saving_bytes
        yield (
            f"Validating {plan.micro_batch_size} {'sample' if plan.micro_batch_size == 1 else 'samples'} at once takes"
            f" {format_bytes(step.evaluation_bytes)}. Saving a checkpoint takes {format_bytes(host['device'])}, and on"
            f" the host {format_bytes(host['full'])} of rank 0 for a full one,"
            f" {format_bytes(host['sharded'])} of each rank for a sharded one."
        )

    @property
    def saving_bytes(self) -> dict[str, int]:
        """Bytes of saving a checkpoint, on the device and on the host, to which a GPU's state dicts go."""
        assert self.step is not None
        whole = sum(operator.parameter_bytes + operator.optimizer_bytes for operator in self.profile)
        device = max(0, self.step.saving_bytes["full"] - whole)
        return {"device": device, "full": whole, "sharded": max(0, self.step.saving_bytes["sharded"] - device)}

    @property
    def document(self) -> dict[str, Any]:
        """Predictions for JSON."""
        document: dict[str, Any] = {
            "machine": str(self.machine),
            "fits": self.fits,
            "memory_limit_bytes": self.limit_bytes,
            "by_hand": [each.numbers for each in self.by_hand],
        }
        if self.why_not:
            document["why"] = self.why_not
        plan, step = self.chosen, self.step
        if plan is not None and step is not None:
            document |= {
                "chosen": self.name,
                "plan": json.loads(plan.to_json()),
                "step": step_seconds(step),
                "peak_bytes": step.peak.peak_bytes,
                "reserved_bytes": step.reserved_bytes,
                "evaluation_bytes": step.evaluation_bytes,
                "saving_bytes": self.saving_bytes,
            }
            if self.host_limit_bytes is not None:
                on_device = self.on_device if _on_host(plan) else plan
                names = ("micro_batch_size", "num_micro_batches", "step_time_s", "samples_per_s", "peak_bytes")
                document |= {"host_bytes": plan.host_bytes, "host_limit_bytes": self.host_limit_bytes}
                document |= {"updated_in_backward_step_time_s": self.ahead_s}
                document |= {
                    key: each and {name: getattr(each, name) for name in names}
                    for key, each in (("on_device", on_device), ("all_on_host", self.all_on_host))
                }
            if self.tokens:
                rate = plan.samples_per_s * self.tokens
                document |= {"tokens_per_s": rate, "tokens_per_s_range": [rate * each for each in PUBLISHED_RATES]}
        return document


@dataclass(frozen=True, kw_only=True)
class Strategies:
    """Strategies to judge, and the choices of their blocks.

    Raises:
        ConfigurationError: there is no such strategy or choice; or OSDP has several choices and ``keep`` is not among
            them.
    """

    strategies: Collection[str] | None = None
    """`OSDP` and names of `BY_HAND`; None: all that differ on a machine."""
    activations: Sequence[str] = DEFAULT_ACTIVATIONS
    """Choices of blocks for the tensors that they save for backward; levels are for OSDP, and for others only where
    nothing else is asked for."""
    stationary: bool | None = None
    """True if OSDP's plan may have activations move in place of weights, False if not; None: as where a fit names no
    modes."""

    def __post_init__(self) -> None:
        for name, given, known in (
            ("strategy", self.strategies or (), (OSDP, *BY_HAND)),
            ("activations", self.activations, (*ACTIVATION_CHOICES, SELECTIVE)),
        ):
            wrong = [each for each in given if each not in known]
            if wrong or (name == "activations" and not given):
                raise ConfigurationError(f"Expected {name} among {', '.join(known)}, got {', '.join(wrong) or 'none'}.")
        is_one = len(self.activations) == 1 and SELECTIVE not in self.activations
        if self.with_osdp and "keep" not in self.activations and not is_one:
            raise ConfigurationError(
                f"Expected keep among activations, or one of them that is not selective, got"
                f" {', '.join(self.activations)}. Ask strategies without OSDP, or once for each."
            )

    @property
    def profiled(self) -> tuple[str, ...]:
        """Choices to profile; blocks are found only where they might recompute."""
        return tuple(dict.fromkeys(("keep", "recompute", *self.activations)))

    @property
    def with_osdp(self) -> bool:
        """True if OSDP's plan is asked for."""
        return self.strategies is None or OSDP in self.strategies

    def estimate(
        self,
        spec: str,
        machine: Machine,
        profile: ModelProfile,
        *,
        limit_bytes: int,
        host_limit_bytes: int | None,
        policy: BatchPolicy,
        tokens: int,
        progress: Progress,
    ) -> Estimate:
        """Judges all strategies on one machine; OSDP's plan may have units on the host where a limit is given."""
        progress("comparing what people choose by hand", "")
        by_hand = made_by_hand(
            profile,
            machine.cluster,
            memory_limit_bytes=limit_bytes,
            policy=policy,
            names=None if self.strategies is None else [name for name in self.strategies if name != OSDP],
            activations=[each for each in self.activations if each != SELECTIVE] or self.activations,
        )
        plan, on_device, all_on_host, why_not = None, None, None, ""
        is_free = "keep" in self.activations
        moving = (STATIONARY.name, NODE_STATIONARY.name) if self.stationary else ()
        modes = None if self.stationary is None else SearchSpace().unasked(profile).offering(*moving).modes
        prescribed = {b.name: each for each in self.activations for b in profile.blocks if each in b.segments}

        def planned(*places: str) -> Plan:
            return make_plan(
                profile,
                machine.cluster,
                memory_limit_bytes=limit_bytes,
                host_limit_bytes=host_limit_bytes,
                micro_batch_size=policy,
                search_space=SearchSpace(
                    modes=modes,
                    states=places,
                    shards=places,
                    activations=tuple(self.activations) if is_free else ("keep",),
                ),
                method=PlanMethod(blocks=None if is_free else prescribed),
                progress=progress,
            )

        if self.with_osdp:
            try:
                plan = planned("device") if host_limit_bytes is None else planned("device", "host")
            except InfeasibleError as error:
                why_not = str(error)
        if plan is not None and _on_host(plan):
            with suppress(InfeasibleError):  # then the table says so
                on_device = planned("device")
            with suppress(InfeasibleError):
                all_on_host = planned("host")
        return Estimate(
            spec=spec,
            machine=machine,
            limit_bytes=limit_bytes,
            host_limit_bytes=host_limit_bytes,
            profile=profile,
            tokens=tokens,
            plan=plan,
            on_device=on_device,
            all_on_host=all_on_host,
            why_not=why_not,
            by_hand=by_hand,
        )


def _on_host(plan: Plan) -> bool:
    """True if states or shards are on the host; a plan whose blocks offload takes its memory without any."""
    return any(effects_of(each).is_on_host for unit in plan.units for each in unit.treatments)


def _hosted(plan: Plan) -> list[Unit]:
    """Units that the host updates."""
    return [
        unit
        for unit in plan.units
        if unit.gradient_bytes and any(effects_of(each).updates_on_host for each in unit.treatments)
    ]


def _row(name: str, each: HandMade | Plan | None, plan: Plan | None) -> tuple[str, ...]:
    """Cells of one plan or strategy, if there is one, with the gain of ``plan`` over it where that is given."""
    if each is None:
        return (name, "", "does not fit", "", "", "")
    fits = not isinstance(each, HandMade) or each.fits
    is_rival = fits and plan is not None and each is not plan
    gain = () if plan is None else (f"{plan.samples_per_s / each.samples_per_s:.2f}" if is_rival else "",)
    return (
        name,
        format_micro_batch(each),
        format_seconds(each.step_time_s) if fits else "does not fit",
        three_digits(each.samples_per_s) if fits else "",
        *gain,
        format_bytes(each.peak_bytes),
    )


def format_micro_batch(each: HandMade | Plan) -> str:
    """Samples of a micro-batch, times the number of micro-batches where there are several."""
    times = f" x {each.num_micro_batches}" if each.num_micro_batches > 1 else ""
    return f"{each.micro_batch_size}{times}"


def machines_table(estimates: Sequence[Estimate]) -> RenderableType:
    """Table of machines, each with the plan chosen there."""
    numbers = ("batch", "step", "samples/s", "a GPU", "peak", "limit")
    return table(
        {"machine": "left", "": "left", **dict.fromkeys(numbers, "right")}, [_machine_row(each) for each in estimates]
    )


def _machine_row(each: Estimate) -> tuple[str, ...]:
    plan, limit = each.chosen, format_bytes(each.limit_bytes)
    if plan is None or not each.fits:
        peak = "" if plan is None else format_bytes(plan.peak_bytes)
        return each.spec, each.name, "", "does not fit", "", "", peak, limit
    return (
        each.spec,
        each.name,
        format_micro_batch(plan),
        format_seconds(plan.step_time_s),
        three_digits(plan.samples_per_s),
        three_digits(plan.samples_per_s / plan.world_size),
        format_bytes(plan.peak_bytes),
        limit,
    )
