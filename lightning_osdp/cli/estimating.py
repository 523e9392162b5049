"""The command that answers before a machine is there: will it fit, how fast, and which knob."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from rich.console import Console

from lightning_osdp.cli.answer import Answer, lines, step_seconds
from lightning_osdp.core.batch_policy import BatchPolicy, samples_of_rank
from lightning_osdp.core.plans.plan import Plan
from lightning_osdp.core.text.byte_size import format_bytes, parse_bytes
from lightning_osdp.core.text.duration import format_seconds, three_digits
from lightning_osdp.core.text.progress import Progress
from lightning_osdp.errors import ConfigurationError, InfeasibleError
from lightning_osdp.machines import Machine
from lightning_osdp.report.sentences import tell_kept, tell_peak
from lightning_osdp.report.tables import table
from lightning_osdp.scheduler import HandMade, made_by_hand, make_plan
from lightning_osdp.simulation import StepEstimate, simulate

_ASSUMED = (
    "Not measured: rates are the data sheet's times what programs are assumed to reach, operations are"
    " those that torch runs on CPU, and computing and communication slow each other down by a published factor. A short"
    " run on the machine tells more."
)


def estimate(
    model: str,
    *,
    machine: str,
    settings: str = "{}",
    sequence: int = 2048,
    data: str | None = None,
    precision: str = "bf16-mixed",
    memory: str | None = None,
    batch: int | None = None,
    global_batch: int | None = None,
    accumulate: int = 1,
) -> Answer:
    """Estimate how a model would train on a machine that you need not have, beside what people choose by hand.

    Args:
        model: import path of a LightningModule, package.module:Name; or a configuration of transformers, as the path of
            its JSON file or the name of its class, such as LlamaConfig.
        machine: nodes, GPUs of a node, their name and the network of a node, as in "8 h100-sxm" or
            "4x8 h100-sxm, 400gbit"; in place of the name may be a TOML file with a device of yours.
        settings: arguments of the LightningModule or entries of the configuration, as JSON.
        sequence: tokens of a sample, for a configuration of transformers.
        data: import path of a function that takes a number of samples and returns a batch, for a LightningModule
            without train_dataloader.
        precision: 32-true, bf16-mixed, bf16-true or 16-mixed.
        memory: limit of one rank, as in 70GiB; by default what the device has, less what is not for tensors.
        batch: samples per rank and micro-batch; by default those with the most samples/s.
        global_batch: samples of all ranks in an optimizer step, divided into the fastest micro-batches.
        accumulate: micro-batches of an optimizer step, where no global batch is given.
    """
    ranks = Machine.parse(machine)
    policy = _policy(batch, global_batch, accumulate, ranks.world_size)
    limit_bytes = ranks.memory_bytes if memory is None else parse_bytes(memory)
    from lightning_osdp.profiler.without_weights import described  # torch

    with _shown() as progress:
        progress("building the model", "")
        found = described(model, settings=_entries(settings), sequence_length=sequence, data=data)
        profile = found.profile(ranks.rates, precision=precision, progress=progress)
        progress("comparing what people choose by hand", "")
        others = made_by_hand(profile, ranks.cluster, memory_limit_bytes=limit_bytes, policy=policy)
        what = (
            f"{model}: {three_digits(found.num_parameters / 1e9)} billion parameters, {precision}",
            f"on {ranks}, {format_bytes(limit_bytes)} of each for tensors",
            "",
        )
        try:
            plan = make_plan(
                profile,
                ranks.cluster,
                memory_limit_bytes=limit_bytes,
                micro_batch_size=policy,
                progress=progress,
            )
        except InfeasibleError as error:
            return Answer(
                text=lines(*what, _compared(others, None), "", str(error), "", _ASSUMED),
                document={"fits": False, "why": str(error), "by_hand": [asdict(each) for each in others]},
                fits=False,
            )
    step = simulate(plan, profile, ranks.cluster)
    return Answer(
        text=lines(*what, _compared(others, plan), "", *_limits(plan, step), "", _ASSUMED),
        document=_document(plan, step, others),
    )


def _policy(batch: int | None, global_batch: int | None, accumulate: int, world_size: int) -> BatchPolicy:
    if global_batch is None:
        scaled = BatchPolicy.scale(num_micro_batches=accumulate)
        return scaled if batch is None else BatchPolicy.fixed(batch, accumulate)
    if accumulate != 1:
        raise ConfigurationError(
            f"Expected accumulate or global_batch, got both: {accumulate} and {global_batch}. Leave one out."
        )
    num_samples = samples_of_rank(global_batch, world_size, name="global_batch")
    return BatchPolicy.divide(num_samples, None if batch is None else [batch])


def _entries(settings: str) -> Mapping[str, Any]:
    expected = "Expected settings as a JSON object, as in --settings '{\"num_hidden_layers\": 16}'"
    try:
        found = json.loads(settings)
    except ValueError as error:
        raise ConfigurationError(f"{expected}, got {settings!r}: {error}.") from error
    if not isinstance(found, dict):
        raise ConfigurationError(f"{expected}, got {settings!r}.")
    return found


@contextmanager
def _shown() -> Iterator[Progress]:
    """Stages in the last line of a terminal, on standard error."""
    with Console(stderr=True).status("") as status:
        yield lambda stage, detail: status.update(f"{stage} {detail}".strip())


def _compared(others: Sequence[HandMade], plan: Plan | None) -> Any:
    """What OSDP would choose above what people do."""
    rows = [] if plan is None else [_row(plan, None)]
    rows += [_row(each, plan) for each in others]
    headings = ("", "micro-batch", "step", "samples/s", "OSDP over it", "peak")
    return table({**dict.fromkeys(headings, "right"), "": "left"}, rows)


def _row(each: HandMade | Plan, plan: Plan | None) -> tuple[str, ...]:
    times = f" x {each.num_micro_batches}" if each.num_micro_batches > 1 else ""
    fits = not isinstance(each, HandMade) or each.fits
    return (
        each.name if isinstance(each, HandMade) else "OSDP",
        f"{each.micro_batch_size}{times}",
        format_seconds(each.step_time_s) if fits else "does not fit",
        three_digits(each.samples_per_s) if fits else "",
        f"{plan.samples_per_s / each.samples_per_s:.2f}" if plan is not None and fits else "",
        format_bytes(each.peak_bytes),
    )


def _limits(plan: Plan, step: StepEstimate) -> Iterator[str]:
    """What takes the time, and what takes the memory."""
    shares = {
        "computes": step.compute_s,
        "waits for communication": step.exposed_communication_s,
        "copies and launches": step.overhead_s,
        "is slowed by communication beside it": step.contention_s,
    }
    told = ", ".join(f"{name} {seconds / step.time_s:.0%}" for name, seconds in shares.items())
    yield f"Of its step OSDP {told}."
    yield f"Its peak is in {tell_peak(plan)}."
    yield f"CUDA's allocator reserves {format_bytes(step.reserved_bytes)} for that, besides what fragments."
    recomputing = f", {len(plan.blocks)} blocks do not keep what they save for backward" if plan.blocks else ""
    yield f"Between forward and backward it keeps {tell_kept(plan)}{recomputing}."


def _document(plan: Plan, step: StepEstimate, others: Sequence[HandMade]) -> dict[str, Any]:
    return {
        "fits": True,
        "plan": json.loads(plan.to_json()),
        "step": step_seconds(step),
        "reserved_bytes": step.reserved_bytes,
        "by_hand": [asdict(each) for each in others],
    }
