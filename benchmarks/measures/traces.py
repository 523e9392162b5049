"""A predicted step and real ones, read from their traces in the same words.

In a real trace Lightning names forward, backward and the optimizer's step, ``fully_shard`` names what it does for which
unit, and gloo its collectives, which run in threads of their own. A unit's reduce-scatter is an all-to-all there, or
messages where it is not small, which begin in ``post_backward_reduce`` and may go on while backward computes; between
two ranks an all-gather may be a message, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from statistics import median
from typing import Any

from rich.table import Table

PARTS = ("forward", "backward", "all-gather", "reduce-scatter", "runtime of units", "optimizer step", "other")
COMMUNICATION = ("all-gather", "reduce-scatter")
_BATCH, _STEP = "[pl][profile]run_training_batch", "Optimizer.step#"
_RUNS = {"forward": "Strategy.training_step", "backward": "Strategy.backward"}
_RUNTIME = "FSDP::"
_GATHERS, _REDUCES = "FSDP::all_gather (", "FSDP::post_backward_reduce ("
_CALLERS = {_GATHERS: "all-gather", _REDUCES: "reduce-scatter"}
_MESSAGE = "gloo:recv"
_BEGUN_BY: dict[str, tuple[str, ...]] = {
    "gloo:all_gather": (_GATHERS,),
    "gloo:all_to_all": (_REDUCES,),
    _MESSAGE: (_GATHERS, _REDUCES),
}
"""Event of gloo -> calls of ``fully_shard`` that begin such a one."""
_S = 1e-6


@dataclass(frozen=True)
class Span:
    """Time from one moment to another, in seconds from the start of the step, of one of `PARTS`."""

    part: str
    start_s: float
    end_s: float
    unit: str = ""
    """First module of a collective's unit; empty for other parts."""

    @property
    def length_s(self) -> float:
        """Length of the span in seconds."""
        return self.end_s - self.start_s


@dataclass(frozen=True)
class TracedStep:
    """One optimizer step of one rank."""

    spans: tuple[Span, ...]
    """Spans of computing, one after the other, and of collectives, which may run meanwhile."""
    total_s: float

    def seconds(self, part: str) -> float:
        """Seconds of one of `PARTS`; those of the runtime are less the collectives that it waits for.

        All parts add up to more than the step where collectives go on beside computing.
        """
        if part == "other":
            return self.total_s - _covered_s(self.spans)
        found = sum(span.length_s for span in self.spans if span.part == part)
        if part != "runtime of units":
            return found
        waits = [span for span in self.spans if span.part == part]
        collectives = [span for span in self.spans if span.part in COMMUNICATION]
        return found - sum(_common_s(one, other) for one in waits for other in collectives)

    @property
    def collectives(self) -> list[tuple[str, str]]:
        """Kinds and units, in the order in which they were issued."""
        return [(span.part, span.unit) for span in self.spans if span.part in COMMUNICATION]


def predicted_step(trace: Mapping[str, Any]) -> TracedStep:
    """The step in a trace that `chrome_trace` has made."""
    spans = []
    for event in _complete(trace):
        _, _, rest = event["name"].partition(" ")
        part = next((each for each in PARTS if event["name"].startswith(each)), "runtime of units")
        unit = rest if part in COMMUNICATION else ""
        spans.append(Span(part, event["ts"] * _S, (event["ts"] + event["dur"]) * _S, unit))
    return TracedStep(tuple(sorted(spans, key=lambda span: span.start_s)), trace["otherData"]["step_time_s"])


def real_steps(trace: Mapping[str, Any], *, num_micro_batches: int) -> list[TracedStep]:
    """The optimizer steps that ``Trainer(profiler=PyTorchProfiler(...))`` has traced of a rank over gloo."""
    events = sorted(_complete(trace), key=lambda event: event["ts"])
    updates = [event["ts"] for event in events if event["name"].startswith(_STEP)]
    found, batches = [], list[Mapping[str, Any]]()
    for batch in (event for event in events if event["name"] == _BATCH):
        batches.append(batch)
        if any(batch["ts"] <= start <= batch["ts"] + batch["dur"] for start in updates):
            # tracing may begin and end within a step
            if len(batches) == num_micro_batches:
                found.append(_real_step(batches, events))
            batches = []
    return [step for step in found if {*_RUNS} <= {span.part for span in step.spans}]


def _real_step(batches: Sequence[Mapping[str, Any]], events: Sequence[Mapping[str, Any]]) -> TracedStep:
    """The step of these micro-batches."""
    begin, end = batches[0]["ts"], batches[-1]["ts"] + batches[-1]["dur"]
    inside = [event for event in events if begin <= event["ts"] and event["ts"] + event["dur"] <= end]

    def spans(part: str, chosen: Iterable[Mapping[str, Any]]) -> list[Span]:
        return [Span(part, (each["ts"] - begin) * _S, (each["ts"] + each["dur"] - begin) * _S) for each in chosen]

    runtime = _outermost(spans("runtime of units", (each for each in inside if each["name"].startswith(_RUNTIME))))
    found = [*runtime]
    for part, name in _RUNS.items():
        for span in spans(part, (each for each in inside if each["name"].endswith(name))):
            found += _without(span, runtime)
    last_s = max((span.end_s for span in found), default=0.0)
    for step in spans("optimizer step", (each for each in inside if each["name"].startswith(_STEP))):
        found.append(Span("optimizer step", last_s, step.end_s))
    for call, events_of in _events_by_call(inside):
        caller = next(each for each in _CALLERS if call["name"].startswith(each))
        unit = call["name"][len(caller) :].rstrip(")").partition(",")[0]
        found_of = spans(_CALLERS[caller], events_of)
        start_s, end_s = min(each.start_s for each in found_of), max(each.end_s for each in found_of)
        found.append(Span(_CALLERS[caller], start_s, end_s, unit))
    return TracedStep(tuple(found), (end - begin) * _S)


def _events_by_call(
    events: Sequence[Mapping[str, Any]],
) -> Iterator[tuple[Mapping[str, Any], list[Mapping[str, Any]]]]:
    """Calls that begin collectives, in order, each with its collective, or with the messages that it receives."""
    collectives: list[tuple[int, list[Mapping[str, Any]]]] = []
    messages: dict[int, list[Mapping[str, Any]]] = {}
    calls = [each for each in events if each["name"].startswith((*_CALLERS,))]
    for event in events:
        callers = _BEGUN_BY.get(event["name"])
        if callers is None:
            continue
        before = [
            index for index, call in enumerate(calls) if call["name"].startswith(callers) and call["ts"] <= event["ts"]
        ]
        if before and event["name"] == _MESSAGE:
            messages.setdefault(before[-1], []).append(event)
        elif before:
            collectives.append((before[-1], [event]))
    for index, found in sorted([*collectives, *messages.items()], key=itemgetter(0)):
        yield calls[index], found


def _complete(trace: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] == "X"]


def _outermost(spans: Sequence[Span]) -> list[Span]:
    """Spans that are not inside others."""
    found: list[Span] = []
    for span in sorted(spans, key=lambda span: (span.start_s, -span.end_s)):
        if not found or span.end_s > found[-1].end_s:
            found.append(span)
    return found


def _without(span: Span, others: Sequence[Span]) -> list[Span]:
    """Rest of a span between others, which follow each other."""
    found, start_s = [], span.start_s
    for other in others:
        if span.start_s <= other.start_s and other.end_s <= span.end_s:
            found.append(Span(span.part, start_s, other.start_s))
            start_s = other.end_s
    return [*found, Span(span.part, start_s, span.end_s)]


def _covered_s(spans: Sequence[Span]) -> float:
    """Seconds in which any of the spans goes on."""
    found = end_s = 0.0
    for span in sorted(spans, key=lambda span: span.start_s):
        found += max(0.0, span.end_s - max(span.start_s, end_s))
        end_s = max(end_s, span.end_s)
    return found


def _common_s(one: Span, other: Span) -> float:
    return max(0.0, min(one.end_s, other.end_s) - max(one.start_s, other.start_s))


def typical(steps: Sequence[TracedStep]) -> TracedStep:
    """Step whose length is the median."""
    return sorted(steps, key=lambda step: step.total_s)[(len(steps) - 1) // 2]


def table(predicted: TracedStep, real: Sequence[TracedStep]) -> Table:
    """Milliseconds of each part, of real steps the median, the least and the most."""
    found = Table("one optimizer step, ms", "predicted", "real", "least", "most")
    rows = [(part, predicted.seconds(part), [step.seconds(part) for step in real]) for part in PARTS]
    rows.append(("all", predicted.total_s, [step.total_s for step in real]))
    for name, expected_s, measured_s in rows:
        numbers = (expected_s, median(measured_s), min(measured_s), max(measured_s))
        found.add_row(name, *(f"{1e3 * seconds:.1f}" for seconds in numbers))
    return found
