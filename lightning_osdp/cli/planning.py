"""Commands that make plans of a saved profile and cluster."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from lightning_osdp.cli.answer import Answer, lines, plan_answer
from lightning_osdp.cli.files import checked_output, read_cluster, read_profile, write_output
from lightning_osdp.core.batch_policy import BatchPolicy
from lightning_osdp.core.cluster import Cluster
from lightning_osdp.core.text.byte_size import format_bytes, parse_bytes
from lightning_osdp.core.text.duration import format_seconds, three_digits
from lightning_osdp.core.text.stored import CLUSTER_FILENAME, PROFILE_FILENAME
from lightning_osdp.errors import ConfigurationError
from lightning_osdp.planner.scheduler import make_plan
from lightning_osdp.report.advice import advise
from lightning_osdp.report.cases import Case, what_if
from lightning_osdp.report.tables import table

_Number = TypeVar("_Number", int, float)


def plan(
    *,
    profile: str = PROFILE_FILENAME,
    cluster: str = CLUSTER_FILENAME,
    memory: str | None = None,
    batch: str | None = None,
    accumulate: int = 1,
    out: str | None = None,
    force: bool = False,
) -> Answer:
    """Make a plan from a saved profile and cluster.

    Args:
        profile: path of the model's profile; by default osdp_profile.json.
        cluster: path of the cluster; by default osdp_cluster.json.
        memory: limit of one rank, as in 8GiB; by default what was free there when the cluster was measured.
        batch: samples per rank and micro-batch; by default as profiled.
        accumulate: micro-batches of an optimizer step; by default one.
        out: file to write the plan to; by default none.
        force: whether to replace a file that is there already.
    """
    path = None if out is None else checked_output(out, "out", force=force, inputs=(profile, cluster))
    model, ranks = read_profile(profile), read_cluster(cluster)
    size, *more = _several(batch, "batch", int) or [model.profiled_batch_size]
    if more:
        raise ConfigurationError(f"Expected one number for batch, got {batch!r}. `what-if` compares several.")
    found = make_plan(
        model,
        ranks,
        memory_limit_bytes=_limit_bytes(memory, ranks),
        micro_batch_size=BatchPolicy.fixed(size, accumulate),
    )
    if path is not None:
        write_output(found.to_json(), path, "out")
    return plan_answer(found, advise(found, model, ranks))


def what_if_table(
    *,
    profile: str = PROFILE_FILENAME,
    cluster: str = CLUSTER_FILENAME,
    ranks: str | None = None,
    rate: str = "1",
    memory: str | None = None,
    batch: str | None = None,
    accumulate: int = 1,
) -> Answer:
    """Plan for every combination of ranks, link rates, memory and batches, each given as values between commas.

    Args:
        profile: path of the model's profile; by default osdp_profile.json.
        cluster: path of the cluster; by default osdp_cluster.json.
        ranks: numbers of ranks, as in 4,8; by default the cluster's.
        rate: bytes/s of the links over those that were measured, as in 0.5,1,10; by default as measured.
        memory: limits of one rank, as in 8GiB,16GiB; by default what was free when the cluster was measured.
        batch: samples per rank and micro-batch, as in 4,8; by default as profiled.
        accumulate: micro-batches of an optimizer step; by default one.
    """
    model, measured = read_profile(profile), read_cluster(cluster)
    cases = what_if(
        model,
        measured,
        memory_limits_bytes=_several(memory, "memory", parse_bytes) or [_limit_bytes(None, measured)],
        micro_batch_sizes=_several(batch, "batch", int) or [model.profiled_batch_size],
        world_sizes=_several(ranks, "ranks", int),
        link_rates=_several(rate, "rate", float),
        num_micro_batches=accumulate,
    )
    headings = ("ranks", "links", "memory", "batch", "step", "samples/s", "peak", "over plain FSDP")
    fits = any(case.plan is not None for case in cases)
    return Answer(
        text=lines(
            table(dict.fromkeys(headings, "right"), [_row(case) for case in cases]),
            *([f"Note: {note}." for note in model.notes] if fits else [cases[-1].why_not]),
        ),
        document=[_document(case) for case in cases],
        fits=fits,
    )


def _several(text: str | None, name: str, kind: Callable[[str], _Number]) -> list[_Number]:
    """Values between commas; none where no text is given."""
    try:
        return [] if text is None else [kind(part) for part in text.split(",")]
    except ConfigurationError:
        raise
    except ValueError as error:
        raise ConfigurationError(f"Expected numbers between commas for {name}, got {text!r}.") from error


def _limit_bytes(memory: str | None, cluster: Cluster) -> int:
    if memory is not None:
        return parse_bytes(memory)
    if cluster.memory_bytes is None:
        raise ConfigurationError("Expected memory, for the cluster does not say how much there is: --memory 8GiB.")
    return cluster.memory_bytes


def _row(case: Case) -> tuple[str, ...]:
    given = (
        str(case.world_size),
        f"x{case.link_rate:g}",
        format_bytes(case.memory_limit_bytes),
        f"{case.micro_batch_size}" + (f" x {case.num_micro_batches}" if case.num_micro_batches > 1 else ""),
    )
    plan = case.plan
    if plan is None:
        return (*given, "does not fit", "", "", "")
    gain = f"{plan.predicted_gain - 1:+.1%}" if plan.all_zdp_step_time_s else "does not fit"
    return (
        *given,
        format_seconds(plan.step_time_s),
        three_digits(plan.samples_per_s),
        format_bytes(plan.peak_bytes),
        gain,
    )


def _document(case: Case) -> dict[str, object]:
    plan = case.plan
    predicted = ("step_time_s", "samples_per_s", "peak_bytes", "predicted_gain", "notes")
    return {
        **{name: value for name, value in vars(case).items() if name != "plan"},
        "fits": plan is not None,
        **({name: getattr(plan, name) for name in predicted} if plan is not None else {}),
    }
