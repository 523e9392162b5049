"""Breakdown of a step's time under OSDP: what moves bytes, what waits, the optimizer, and what OSDP adds."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import wraps
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from benchmarks.families import build
from benchmarks.testbed.beside_fsdp.engines import BY_HAND, BY_HAND_ON_ROWS, OSDP, ByHand, plan_for
from benchmarks.testbed.groups import fake_group
from benchmarks.testbed.step import Step
from lightning_osdp.apply import local
from lightning_osdp.apply.internals import gathering, in_flight

COPY_IN, COPY_OUT, GATHER, REDUCE, WAIT = "copy-in", "copy-out", "all-gather", "reduce-scatter", "waits"
OPTIMIZER, WHOLE = "optimizer", "whole step"
_NUM_CHECKED = 3
"""First steps, in which ranks tell each other what they are about to do."""
_PLACES: tuple[tuple[Any, str, str], ...] = (
    (torch.ops.fsdp, "all_gather_copy_in", COPY_IN),
    (torch.ops.fsdp, "chunk_cat", COPY_IN),
    (torch.ops.fsdp, "split_with_sizes_copy", COPY_OUT),
    (gathering, "all_gather", GATHER),
    (in_flight, "begin_all_to_all", REDUCE),
    (in_flight, "add_up", REDUCE),
    (dist.Work, "wait", WAIT),
)
"""Functions that ``fully_shard`` calls, and the name under which the time of each counts."""


def wall_times(*, model: str, mode: str, num_rounds: int) -> dict[str, float]:
    """Median seconds per step of each part, and of the whole, on this rank. Call it on all ranks."""
    module = build(model)
    step = Step(module, plan_for(module, mode=mode, world_size=dist.get_world_size()))
    for _ in range(_NUM_CHECKED):
        step()
    found: list[Mapping[str, float]] = []
    for _ in range(num_rounds):
        dist.barrier()
        with _timed() as seconds, _stepping_timed(step.optimizer, seconds):
            start_s = time.perf_counter()
            step()
            seconds[WHOLE] += time.perf_counter() - start_s
        found.append(seconds)
    return {name: median(each.get(name, 0.0) for each in found) for name in found[0]}


def host_times(*, model: str, mode: str, world_size: int, num_rounds: int) -> dict[str, float]:
    """Median seconds of processor time, in this process, where collectives take none: of steps, and of the optimizer's.

    Args:
        model: name of a family of blocks.
        mode: of all blocks.
        world_size: N; this process is rank 0 of it.
        num_rounds: timed ones, in turns.
    """
    with fake_group(world_size), _one_thread():
        steps: dict[str, Any] = {}
        for name in (BY_HAND, BY_HAND_ON_ROWS, OSDP):
            module = build(model)
            plan = plan_for(module, mode=mode, world_size=world_size)
            steps[name] = Step(module, plan) if name == OSDP else ByHand(module, plan, on_rows=name == BY_HAND_ON_ROWS)
        ours = steps[OSDP]
        for step in steps.values():
            step()
        found = _in_turns(steps, num_rounds)
        for parameter in ours.sharded.module.parameters():
            parameter.grad = torch.full_like(parameter, 1e-3)
        plain = _plain_optimizer(ours.optimizer)

        def stepping() -> None:
            with ours.sharded.stepping(ours.optimizer):
                ours.optimizer.step()

        ways = {
            "optimizer on rows": stepping,
            "optimizer on DTensors": ours.optimizer.step,
            "plain optimizer": plain.step,
        }
        return {**found, **_in_turns(ways, num_rounds)}


@contextmanager
def _one_thread() -> Iterator[None]:
    """Keeps torch to one thread, as ranks have it: the time of a thread that waits for others is not its own."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def _in_turns(steps: Mapping[str, Callable[[], Any]], num_rounds: int) -> dict[str, float]:
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(1 + num_rounds):
        for name, step in steps.items():
            start_s = time.thread_time()
            step()
            seconds[name].append(time.thread_time() - start_s)
    return {name: median(found[1:]) for name, found in seconds.items()}


def _plain_optimizer(optimizer: Optimizer) -> Optimizer:
    """Optimizer of the same kind over copies of this rank's rows, as plain parameters with gradients and states."""
    groups, states = [], []
    for group in optimizer.param_groups:
        copies = [nn.Parameter(local(parameter.detach()).clone()) for parameter in group["params"]]
        for parameter, copied in zip(group["params"], copies, strict=True):
            copied.grad = local(parameter.grad).clone()
            fields = optimizer.state[parameter].items()
            states.append((copied, {k: local(v).clone() if isinstance(v, Tensor) else v for k, v in fields}))
        groups.append({**group, "params": copies})
    made: Optimizer = type(optimizer)(groups)  # type: ignore[call-arg]  # each group has all options
    made.state.update(states)
    return made


@contextmanager
def _timed() -> Iterator[defaultdict[str, float]]:
    """Adds up seconds of what ``fully_shard`` calls; what is called inside another counts there alone."""
    seconds: defaultdict[str, float] = defaultdict(float)
    is_inside = False

    def timed(function: Callable[..., Any], name: str) -> Callable[..., Any]:
        @wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            nonlocal is_inside
            if is_inside:
                return function(*args, **kwargs)
            is_inside, start_s = True, time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                is_inside = False
                seconds[name] += time.perf_counter() - start_s

        return run

    with ExitStack() as patches:
        for owner, attribute, name in _PLACES:
            patches.enter_context(patch.object(owner, attribute, timed(getattr(owner, attribute), name)))
        yield seconds


@contextmanager
def _stepping_timed(optimizer: Optimizer, seconds: defaultdict[str, float]) -> Iterator[None]:
    """Adds the optimizer's steps to the seconds."""
    own = optimizer.step

    def run(*args: Any, **kwargs: Any) -> Any:
        start_s = time.perf_counter()
        try:
            return own(*args, **kwargs)
        finally:
            seconds[OPTIMIZER] += time.perf_counter() - start_s

    with patch.object(optimizer, "step", run):
        yield
