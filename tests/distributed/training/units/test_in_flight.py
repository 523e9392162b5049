"""Reductions that go on while backward computes: the same numbers, however late they are, and nothing is left."""

import dataclasses
import itertools
import random
import time
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from lightning_osdp.apply.internals import dtensors, in_flight
from lightning_osdp.operations import gloo
from tests.distributed.support import parts
from tests.distributed.support.parts import Run, apart, base_plan, batches_by_step, ddp
from tests.support.tiers import slow

pytestmark = pytest.mark.distributed

MOST = (1, 2, 100)
SYNCS = {"every": ["every"], "last": ["last"], "both": ["every", "last"]}
"""Synchronisation of units, in turn."""


class Counted(in_flight.Reductions):
    """Notes the most that were in flight at a time."""

    most_seen = 0

    def begin(self, begun):
        super().begin(begun)
        self.most_seen = max(self.most_seen, len(self._in_flight))


def made(plan, most):
    """Training under a plan, with so many in flight at most."""
    with (
        patch.object(in_flight, "REDUCTIONS_IN_FLIGHT", most),
        patch.object(in_flight, "Reductions", Counted),
    ):
        return Run(plan)


def by_messages():
    """Has reduce-scatters, and all-gathers between two ranks, send messages, which small ones do not."""
    return patch.object(gloo, "_LEAST_BYTES", 0)


def with_syncs(plan, syncs):
    turns = itertools.cycle(syncs)
    units = tuple(unit.treated(sync=next(turns)) if unit.name else unit for unit in plan.units)
    return dataclasses.replace(plan, units=units)


def replicated(plan):
    """The plan with all of each unit but the root on each rank, whose gradients are all-reduced."""
    return dataclasses.replace(
        plan, units=tuple(unit.treated(home="one", keep="nothing") if unit.name else unit for unit in plan.units)
    )


def in_nodes(plan):
    """The plan with all units but the root sharded in each of two nodes, between which gradients are all-reduced."""
    units = tuple(unit.treated(home="node") if unit.name else unit for unit in plan.units)
    return dataclasses.replace(plan, units=units, node_size=plan.world_size // 2)


PLANS = {"sharded": lambda plan: plan, "replicated": replicated, "in nodes": in_nodes}


def steps_of(run, number=None):
    """Takes so many steps, none of which leaves anything in flight; None: one for each pair of batches."""
    losses, batches = [], batches_by_step()
    torch.manual_seed(7 + dist.get_rank())
    for step in range(number or len(batches)):
        losses += run.step(batches[step % len(batches)])
        assert not run.model._reductions._in_flight
    return run.found(losses)


def equivalence(units, cases, kind="sharded"):
    """Differences from DDP, and most that were in flight, by how many may be and what units synchronise."""
    found = {}
    with by_messages(), patch.object(parts, "STEPS", 14 // dist.get_world_size()):  # as many as there are batches for
        expected = ddp()
        for most, name in cases:
            run = made(PLANS[kind](with_syncs(base_plan(units), SYNCS[name])), most)
            found[most, name] = apart(steps_of(run), expected), run.model._reductions.most_seen
    return found


EVERY = [*itertools.product(MOST, SYNCS)]


@pytest.mark.parametrize(
    ("world_size", "units", "kind", "cases"),
    [
        *((2, "operators", kind, [*zip(MOST, SYNCS, strict=True)]) for kind in PLANS),
        *(slow(*case, EVERY) for case in itertools.product((2, 4), ("operators", "both"), PLANS)),
    ],
)
def test_steps_equal_ddp_however_many_are_in_flight(ranks, world_size, units, kind, cases):
    found = ranks(world_size).run(equivalence, units=units, cases=cases, kind=kind)[0]
    assert [*found] == cases
    assert {case: difference for case, (difference, _) in found.items() if difference > 1e-9} == {}
    for (most, _), (_, seen) in found.items():
        assert seen == most or (most > 8 and seen >= 8)


def late(num_steps, seed):
    """Tells if all numbers are those of a run in which no rank is ever late, and returns the most in flight."""
    plan, draw = with_syncs(base_plan("block"), SYNCS["both"]), random.Random(repr((seed, dist.get_rank())))

    def wait(*_):
        if draw.random() < 0.3:
            time.sleep(draw.random() * 2e-3)

    with by_messages(), patch.object(parts, "STEPS", 14 // dist.get_world_size()):  # as many as there are batches for
        expected = steps_of(made(plan, 2), num_steps)
        run = made(dataclasses.replace(plan, forward_prefetch=True), 2)
        for unit in run.model.units:
            unit.handle.register_forward_pre_hook(wait)
            unit.handle.register_full_backward_hook(wait)
        found, seen = steps_of(run, num_steps), run.model._reductions.most_seen
    return all(torch.equal(value, expected[name]) for name, value in found.items()), seen


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("world_size", "num_steps"), [(2, 8), slow(2, 20), slow(4, 200)])
def test_ranks_that_are_late_change_no_number(ranks, world_size, num_steps):
    pool = ranks(world_size)
    pool.timeout_s = 900
    assert pool.run(late, num_steps=num_steps, seed=1) == [(True, 2)] * world_size


def seen_behind_frozen_units():
    """Numbers of reduce-scatters in flight where backward has passed frozen units."""

    def frozen_between():
        module = parts.Net().double()
        module.pair.requires_grad_(False)
        return module

    seen = []
    with patch.object(parts, "module_of", frozen_between):
        run = made(base_plan("both"), 1)

        def look(_):
            seen.append(len(run.model._reductions._in_flight))

        def look_in_backward(_, __, output):
            output.register_hook(look)

        run.module.first.register_forward_hook(look_in_backward)
        steps_of(run, 2)
    return seen


def test_frozen_units_wait_for_no_reduce_scatter(ranks):
    assert ranks(2).run(seen_behind_frozen_units) == [[1, 1, 1, 1]] * 2


def looked_at(most, kind):
    """Gradients of one unit as hooks find them: complete where torch tells of it, those of before where it does not."""
    run, (batches, *_) = made(PLANS[kind](base_plan("both")), most), batches_by_step()
    first, last = run.module.first, run.module.last
    in_hooks, in_backward = [], []

    def look_at(weight):
        assert not torch.is_grad_enabled()
        in_hooks.append(weight.grad.to_local().clone())

    last.weight.register_post_accumulate_grad_hook(look_at)
    looked = run.module.alone.up.weight
    shards = (last.weight, looked)
    first.register_forward_hook(lambda _, __, output: hold(output))

    def hold(output):
        output.register_hook(look)

    def look(_):
        gradient = looked.grad
        in_backward.append(None if gradient is None else dtensors.local(gradient).clone())

    torch.manual_seed(7)
    found = []
    for batch in batches:
        run.module(batch).backward()
        found.append([dtensors.local(weight.grad).clone() for weight in shards])
    (whole, before), (both, after) = found
    return (
        torch.equal(in_hooks[0], whole) and torch.equal(in_hooks[1], both) and not torch.equal(whole, both),
        in_backward[0] is None and torch.equal(in_backward[1], before) and not torch.equal(before, after),
    )


@pytest.mark.parametrize("kind", ["sharded", "replicated"])
def test_who_looks_at_gradients_in_backward_finds_whole_ones(ranks, kind):
    assert ranks(2).run(looked_at, most=100, kind=kind) == [(True, True)] * 2


class _Broken:
    def wait(self):
        raise RuntimeError("Connection closed by peer")


def broken():
    """The error of a reduce-scatter that breaks, and whether training goes on as if that step had not been."""
    plan, (first, second, *_) = base_plan("both"), batches_by_step()
    runs, results = (made(plan, 2), made(plan, 2)), []
    begin, begun = in_flight.begin_all_to_all, []

    def scatter(*args):
        begun.append(begin(*args))
        return _Broken() if len(begun) == 2 else begun[-1]

    with patch.object(in_flight, "begin_all_to_all", scatter), pytest.raises(RuntimeError) as raised:
        runs[0].step(first)
    for run in runs:
        run.model.begin_fit()
        run.optimizer.zero_grad()
        torch.manual_seed(5)
        found = run.found(run.step(second))
        results.append({name: found[name] for name, _ in run.module.named_parameters()})
        assert not run.model._reductions._in_flight
    return str(raised.value), apart(*results)


def test_an_error_names_its_unit_and_leaves_nothing_in_flight(ranks):
    for told, difference in ranks(2).run(broken):
        assert told == (
            "The reduction of gradients of 'alone.up' failed: Connection closed by peer. Expected all ranks to take"
            " part: look for the error of the one that ended first."
        )
        assert difference == 0.0
