"""Commands that look into a plan."""

from __future__ import annotations

import json
from dataclasses import asdict

from lightning_osdp.cli.answer import Answer, lines, plan_answer, step_seconds
from lightning_osdp.cli.files import checked_output, files_of, has_profile_beside, read_all, write_output
from lightning_osdp.core.plans.plan import Plan
from lightning_osdp.core.text.byte_size import format_bytes, parse_bytes
from lightning_osdp.core.text.duration import format_seconds, three_digits
from lightning_osdp.core.text.names import fold_names
from lightning_osdp.core.text.stored import PLAN_FILENAME
from lightning_osdp.planner.simulation import simulate
from lightning_osdp.report.advice import advise
from lightning_osdp.report.alternatives import Alternative, Alternatives, find_alternatives
from lightning_osdp.report.cases import Price, memory_price
from lightning_osdp.report.difference import compare_plans
from lightning_osdp.report.tables import Justify, table
from lightning_osdp.report.trace import chrome_trace

_LABELS = {
    "samples_per_s": "samples/s",
    "world_size": "ranks",
    "micro_batch_size": "micro-batch",
    "num_micro_batches": "micro-batches",
}


def show(plan: str, *, profile: str | None = None, cluster: str | None = None) -> Answer:
    """Show a plan: its units, why each is as it is, what it is predicted to cost, and what else would be faster.

    Advice needs the model's profile and the cluster.

    Args:
        plan: path of the plan.
        profile: path of the model's profile; by default beside the plan, if it is there.
        cluster: path of the cluster; by default beside the plan, if it is there.
    """
    if profile is None and cluster is None and not has_profile_beside(plan):
        return plan_answer(Plan.load(plan), ())
    found = read_all(*files_of(plan, profile, cluster))
    return plan_answer(found[0], advise(*found))


def explain(
    operator: str,
    *,
    plan: str = PLAN_FILENAME,
    profile: str | None = None,
    cluster: str | None = None,
    more: str | None = None,
    price: bool = True,
) -> Answer:
    """Explain why an operator is treated as it is: every other way, simulated, and what more memory would save.

    Args:
        operator: name of an operator, of a unit, or of a module whose operators are in one unit.
        plan: path of the plan; by default osdp_plan.json.
        profile: path of the model's profile; by default beside the plan.
        cluster: path of the cluster; by default beside the plan.
        more: memory above the limit whose price is asked, as in 1GiB; by default about a tenth of the limit.
        price: whether to plan twice for the price of memory, which takes minutes for very deep models; by default true.
    """
    more_bytes = None if more is None else parse_bytes(more)
    found = read_all(*files_of(plan, profile, cluster))
    ways = find_alternatives(*found, "" if operator == "(root)" else operator)
    of_memory = memory_price(*found, more_bytes=more_bytes) if price else None
    advice = advise(*found)
    headings: dict[str, Justify] = dict.fromkeys(
        ("way", "step", "against", "peak", "against ", "limit leaves"), "right"
    )
    return Answer(
        text=lines(
            _where(ways),
            "",
            table({**headings, "way": "left"}, [_row(ways, each) for each in (ways.planned, *ways.others)]),
            "",
            ways.why(),
            *([] if of_memory is None else [_tell_price(of_memory)]),
            *(f"Advice: {each.sentence}." for each in advice),
            *(f"Note: {note}." for note in found[0].notes),
            "Each row is a simulated step with its exact peak; all else is as planned.",
        ),
        document={
            **asdict(ways),
            "why": ways.why(),
            "price": None if of_memory is None else asdict(of_memory),
            "advice": [asdict(each) for each in advice],
            "notes": [*found[0].notes],
        },
    )


def diff(before: str, after: str) -> Answer:
    """Compare two plans: decisions, memory, time.

    Args:
        before: path of a plan.
        after: path of another one.
    """
    plans = Plan.load(before), Plan.load(after)
    found, notes = compare_plans(*plans), dict.fromkeys(note for plan in plans for note in plan.notes)
    rows = [
        (_label(name), *(_as_text(name, value) for value in pair), _change(*pair))
        for name, pair in found.numbers.items()
    ]
    rows += [(_label(name), str(a), str(b), "") for name, (a, b) in found.settings.items()]
    decided = [
        ("\n".join(fold_names(name or "(root)" for name in each.operators)), each.before, each.after)
        for each in found.decisions
    ]
    return Answer(
        text=lines(
            table({"": "left", "before": "right", "after": "right", "change": "right"}, rows),
            "",
            *([] if found.is_same_model else ["The plans are for different models."]),
            table({"operators": "left", "before": "left", "after": "left"}, decided)
            if decided
            else "All operators are treated alike.",
            *(f"Note: {note}." for note in notes),
        ),
        document={**asdict(found), "notes": [*notes]},
    )


def simulate_step(
    *,
    plan: str = PLAN_FILENAME,
    profile: str | None = None,
    cluster: str | None = None,
    trace: str | None = None,
    force: bool = False,
) -> Answer:
    """Simulate one optimizer step under a plan: its time, its memory, and a trace of both.

    Args:
        plan: path of the plan; by default osdp_plan.json.
        profile: path of the model's profile; by default beside the plan.
        cluster: path of the cluster; by default beside the plan.
        trace: file to write the step to, for Perfetto, chrome://tracing and viewers of torch.profiler; by default none.
        force: whether to replace a file that is there already.
    """
    inputs = files_of(plan, profile, cluster)
    path = None if trace is None else checked_output(trace, "trace", force=force, inputs=inputs)
    found = read_all(*inputs)
    estimate = simulate(*found)
    if path is not None:
        write_output(json.dumps(chrome_trace(*found)), path, "trace")
    predicted = {
        **step_seconds(estimate),
        "evaluation_bytes": estimate.evaluation_bytes,
        "peak_bytes": estimate.peak.peak_bytes,
        "memory_limit_bytes": found[0].memory_limit_bytes,
    }
    return Answer(
        text=lines(
            table(
                {"one optimizer step": "left", "predicted": "right"},
                [(_label(name), _as_text(name, value)) for name, value in predicted.items()],
            ),
            *(f"Note: {note}." for note in found[0].notes),
        ),
        document={**predicted, "notes": [*found[0].notes]},
        fits=estimate.peak.peak_bytes <= found[0].memory_limit_bytes,
    )


def _label(name: str) -> str:
    return _LABELS.get(name) or name.removesuffix("_s").removesuffix("_bytes").replace("_", " ")


def _as_text(name: str, value: float) -> str:
    if name == "samples_per_s":
        return three_digits(value)
    if name.endswith("_bytes"):
        return format_bytes(value)
    return format_seconds(value) if name.endswith("_s") else str(value)


def _change(before: float, after: float) -> str:
    return f"{after / before - 1:+.1%}" if before and after != before else ""


def _where(ways: Alternatives) -> str:
    number = f"{len(ways.unit_operators)} operators" if len(ways.unit_operators) > 1 else "one operator"
    block = f", in block {ways.block}" if ways.block else ""
    return f"{ways.operator or '(root)'}: unit {ways.unit or '(root)'} of {number}{block}"


def _row(ways: Alternatives, way: Alternative) -> tuple[str, ...]:
    spare = format_bytes(way.spare_bytes) if way.spare_bytes >= 0 else f"{format_bytes(-way.spare_bytes)} too few"
    step, peak = format_seconds(way.step_time_s), format_bytes(way.peak_bytes)
    if way is ways.planned:
        return f"{way.name} (planned)", step, "", peak, "", spare
    more_s, more_bytes = way.step_time_s - ways.planned.step_time_s, way.peak_bytes - ways.planned.peak_bytes
    return way.name, step, _signed(format_seconds(more_s)), peak, _signed(format_bytes(more_bytes)), spare


def _signed(text: str) -> str:
    return text if text.startswith("-") else f"+{text}"


def _tell_price(price: Price) -> str:
    saves = f"{price.saves:.1%}" if price.saves > 0 else "nothing"
    times = f"{format_seconds(price.step_time_s)} to {format_seconds(price.with_more_s)}"
    return f"{format_bytes(price.more_bytes)} more memory saves {saves} ({times}), planned anew in these micro-batches."
