"""Agreement of ranks in a step: the order of units, buffers, and which parameters have a gradient at all."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from itertools import chain, islice
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from lightning_osdp.apply.internals import access, backward, dtensors, gathering, resident, unsharded
from lightning_osdp.apply.ranks.buffers import Buffers, apart
from lightning_osdp.apply.ranks.hosts import new_host_group
from lightning_osdp.apply.units import OVER_ALL
from lightning_osdp.core.plans.plan import Plan
from lightning_osdp.errors import CalledOffError, OSDPError, PlanMismatchError, RanksApartError
from lightning_osdp.operations.stationary import MOVE_WEIGHTS, Reach

_PRIME = 2**31 - 1
_STEP = -1
"""Number that a rank reports at the end of a step."""
_EVALUATED = -2
"""Number that a rank reports at the end of a step of an evaluation."""
_NUM_CHECKED = 2
"""Number of optimizer steps, with the evaluation before them, in which ranks report each collective beforehand."""
_STEPS_BETWEEN = 100
"""Steps between two comparisons of nodes, after the first steps: each comparison reads all shards once."""
_CALLING_S = 20.0
"""Longest that a rank which cannot go on waits for the others to meet it. They are a part of a step away, unless
they wait for it in a collective of the user."""
_SAME_UNITS = (
    "Expected every rank to run the same modules in the same order, but they ran different units in this step,"
    " so that one's weights and gradients would be taken for another's. Call all modules on every rank, with"
    " inputs that do not count if need be, or make one unit of all that is chosen by rank. To generate for as"
    " long as each rank likes, do so within `with trainer.strategy.gathered(): ...`."
)
_SAME_LOSSES = (
    "Expected backward to come to the same modules on every rank, for those that move activations exchange gradients"
    " of all ranks' samples there, but the losses of ranks depend on different ones, within a block that recomputes or"
    " offloads what it saves. Add what a rank leaves out to its loss, times 0, or have the block keep what it saves."
    f" {MOVE_WEIGHTS}"
)
_SAME_FUNCTIONS = (
    "Expected every rank to apply the same functions, with the same numbers and other tensors, to what is between"
    " operators that move activations and feed each other, for each has some features of all ranks' samples there, but"
    " they applied others in this step. Take numbers, masks and choices from what is the same on all ranks."
    f" {MOVE_WEIGHTS}"
)


class Agreement:
    """Compares ranks once in an optimizer step, by one small all-reduce between hosts, beside backward where it can.

    Where training uses NCCL, this all-reduce is gloo's: a step must not wait for its device, and after an error of a
    device no collective of NCCL runs.

    - A parameter that no rank used has no gradient, as under DDP with ``find_unused_parameters``. ``fully_shard``
      reduces zeros for it, so that a rank that used it finds the others in the same reduce-scatter. Where users may
      look at gradients before the step, or assign some, ranks compare that at the end of backward, too.
    - Nodes that each have all of a unit have the same values of it. Hashes of the values are compared in the first
      steps, and in every `_STEPS_BETWEEN`-th step after them.
    - Ranks that gather or reduce different units at a time compute with one another's weights, add up one another's
      gradients, or wait for each other for ever. In the first steps each rank reports a collective before it runs it,
      because it cannot report while it waits. In an evaluation each rank reports before it gathers a unit for the
      second time in one step: generated text may be longer on one rank than on another.
    - Units that move activations tell each other the numbers of rows that ranks have before each exchange in forward,
      and that all ranks have come to this unit, or to the end of this pair. Before backward ranks agree on what it
      comes to: a rank whose loss leaves out what those of others depend on takes part with gradients of zero. Exchanges
      of a backward of which nobody has told, such as ``torch.autograd.grad``, are each reported. Functions between
      operators that feed each other, each with its numbers and other tensors, are compared at the end of a step: each
      rank applies them to features of all ranks' samples.
    - Buffers are those of rank 0 when training begins. Buffers that have changed are taken from rank 0 before each step
      of an optimizer.
    - Resident units are gathered anew where a step has written to their shards after it had run them.
    - All ranks refuse a step if one rank finds writes to unsharded parameters that its shards cannot take over.
    - In a step that may be given up ranks meet before each collective, where one that cannot go on tells the others:
      none of them waits in a collective that it will not come to.
    """

    def __init__(
        self,
        root: nn.Module,
        groups: Sequence[Any],
        writes: unsharded.GatheredWrites,
        residence: resident.Residence,
        *,
        num_exchanging: int,
        in_nodes: Sequence[tuple[str, Any]],
    ) -> None:
        world = dist.group.WORLD
        self._group = _own_group(world) if world is not None and world.size() > 1 else None
        self._num_steps = 0
        self._order = 0  # hash of the order in which units were gathered and reduced
        self._functions = 0  # hash of the functions between operators that feed each other
        self._num_begun = 0  # calls of such operators whose last one has not been called
        self._is_paused = False
        self._meets = self._is_entering = False
        self._gathered: set[int] | None = None  # units in this step of an evaluation
        self._groups = tuple(groups)
        self._num_exchanging = num_exchanging  # units that move activations, which are numbered after all others
        parameters: list[nn.Parameter] = []
        self._starts: list[int] = []
        for index, group in enumerate(groups):
            self._starts.append(len(parameters))
            parameters += [parameter for parameter, _ in access.parameters_of(group)]
            gathering.on_collectives(group, partial(self._note_collective, index), self._has_entered)
        self._watch = backward.BackwardWatch(root, groups, self._note_gradients)
        self._buffers, self._writes, self._residence = Buffers(root), writes, residence
        # Keys are identities: the hash of a tensor is slow.
        self._places = {id(parameter): place for place, parameter in enumerate(parameters)}
        self._has_gradient = [False] * len(self._places)
        self._has_dropped = False  # since the last backward
        self._begun: Callable[[], list[list[int]]] | None = None  # what `begin_settling` has begun, until it is used
        pairs = (pair for group in groups for pair in access.parameters_of(group))
        # each with a function that gives this rank's part
        self._in_nodes: list[tuple[str, Any, Callable[[], torch.Tensor]]] = [
            *(
                (access.name_of(owner), shard.device_mesh, partial(access.rows_of, owner))
                for shard, owner in pairs
                if shard.device_mesh.ndim > 1
            ),
            *((name, part.device_mesh, partial(dtensors.local, part)) for name, part in in_nodes),
        ]

    def begin_fit(self) -> None:
        """Begins training, with no memory of a fit that ended with an error. Call it on all ranks.

        Raises:
            RanksApartError: ranks have other buffers.
        """
        self._order = self._functions = self._num_begun = self._num_steps = 0
        self._watch.is_announced = False
        self._begun = None
        if self._group is None:
            return
        self._buffers.begin()
        most, negated_least = self._largest([len(self._buffers), -len(self._buffers)])
        if most + negated_least > 0:
            raise apart("their number")
        self._buffers.take(self._largest(self._buffers.reports()), self._group)

    def end_fit(self) -> None:
        """Ends training. Call it on all ranks.

        Raises:
            ConfigurationError: the last step wrote to parameters, see `GatheredWrites`.
        """
        for _ in range(2):  # a device reports a step at the second call
            self._writes.check(self._largest(self._writes.reports()))

    def begin_backward(self) -> None:
        """Forgets gradients that were dropped since the last backward."""
        self._watch.is_announced, self._begun = True, None
        for start, group in zip(self._starts, self._groups, strict=True):
            if backward.has_partial_gradients(group) or resident.reduces_nothing(group):
                continue
            have = backward.have_unreduced_gradients(group)
            for place, ((parameter, _), has) in enumerate(zip(access.parameters_of(group), have, strict=True), start):
                is_reduced = parameter.grad is not None
                if not (has or is_reduced):
                    self._has_gradient[place] = False
                elif self._has_dropped and is_reduced:
                    self._has_gradient[place] = True  # assigned, if no backward gave it
        self._has_dropped = False

    def end_backward(self) -> None:
        """Drops gradients of parameters that no rank has used. Call it on all ranks after backward.

        Gradients that users assign later stay.
        """
        used = self._largest(self._has_gradient)
        for start, group in zip(self._starts, self._groups, strict=True):
            for place, (parameter, _) in enumerate(access.parameters_of(group), start):
                if not used[place]:
                    parameter.grad = None
        self._has_dropped = True

    def begin_settling(self) -> None:
        """Begins the all-reduce of `settle`, which follows, at the end of backward, on all ranks that have one.

        Where ranks have more to compare than that, `settle` begins it.
        """
        has_more = self._num_steps < _NUM_CHECKED or self._num_exchanging or self._meets or self._is_paused
        if self._group is not None and not has_more:
            self._begun = self._begin()

    def _begin(self) -> Callable[[], list[list[int]]]:
        """Begins to compare ranks; returns a function that waits for all, and gives the largest of each number."""
        hashes = [[self._order, -self._order], [self._functions, -self._functions]]
        used = [*map(int, self._has_gradient)]
        parts = [*hashes, self._buffers.reports(), self._residence.reports(), self._writes.reports(), used]
        self._order = self._functions = self._num_begun = 0
        end = self._begin_largest([*chain(*parts)])

        def told() -> list[list[int]]:
            largest = iter(end())
            return [[*islice(largest, len(part))] for part in parts]

        return told

    def settle(self, optimizer: Optimizer) -> None:
        """Drops gradients of parameters that no rank has used, unless `end_backward` has. Call it on all ranks.

        It comes before a step of an optimizer, and takes changed buffers from rank 0.

        Raises:
            RanksApartError: ranks have run different units since the last step, or nodes have different values.
            ConfigurationError: the step before has written to parameters that cannot be taken over.
        """
        is_early, begun, self._begun = self._num_steps < _NUM_CHECKED, self._begun, None
        if self._group is not None and (is_early or self._num_exchanging):
            self._check(_STEP)
        order, functions, buffers, outdated, written, used = (begun or self._begin())()
        if self._group is not None:
            _check_same(order, self._same_units)
            _check_same(functions, _SAME_FUNCTIONS)
            if is_early or self._num_steps % _STEPS_BETWEEN == 0:
                self._check_nodes()
            self._num_steps += 1
            self._buffers.take(buffers, self._group)
        self._residence.take(outdated)
        self._writes.check(written)
        for group in () if self._has_dropped else optimizer.param_groups:
            for parameter in group["params"]:
                place = self._places.get(id(parameter))
                if place is not None and not used[place]:
                    parameter.grad = None

    def check_plan(self, plan: Plan | None, check: Callable[[], None]) -> None:
        """Checks that this can be the plan of all ranks from now on. Call it on all ranks.

        Args:
            plan: the new plan; None where ranks are known to have the same one.
            check: raises the objections of this rank, one of which is then raised on all ranks.

        Raises:
            OSDPError: the objection of the first rank that has one.
            PlanMismatchError: ranks have different plans.
        """
        error = None
        try:
            check()
        except OSDPError as raised:
            error = raised
        report = (b"" if plan is None else hashlib.sha256(plan.to_json().encode()).digest(), error)
        reports = [report] * (1 if self._group is None else self._group.size())
        if self._group is not None:
            dist.all_gather_object(reports, report, group=self._group)
        for _, objection in reports:
            if objection is not None:
                raise objection
        differing = [rank for rank, (digest, _) in enumerate(reports) if digest != reports[0][0]]
        if differing:
            raise PlanMismatchError(
                f"Expected all ranks to change to the same plan, but that of rank {differing[0]} is not rank 0's."
                " Make or read it on one rank, and broadcast it."
            )

    def largest(self, values: Sequence[int]) -> Sequence[int]:
        """Returns the largest of each value over all ranks, who all call it; this rank's own while it runs alone."""
        return values if self._is_paused else self._largest(values)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Raises `RanksApartError` at the end if some ranks have gathered units more often than others."""
        self._gathered = set()
        try:
            yield
            if self._gathered and not self._is_paused:
                self._check(_EVALUATED)
                if self._num_exchanging:
                    _check_same(self._largest([self._functions, -self._functions]), _SAME_FUNCTIONS)
        finally:
            self._gathered, self._num_begun = None, 0

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Notes nothing within the context: this rank runs alone."""
        kept = list(self._has_gradient)
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused, self._has_gradient[:] = False, kept
            self._watch.is_announced = False

    @contextmanager
    def meeting(self) -> Iterator[None]:
        """Has ranks meet before each collective of units within the context, and at its end.

        Raises:
            CalledOffError: a rank has called the others off, see `call_off`.
        """
        self._meets, self._is_entering = True, False
        try:
            yield
            self._meet()
        finally:
            self._meets = False

    def call_off(self) -> bool:
        """Calls off all ranks where they meet next, after an error of this one within `meeting`.

        Returns whether all have come: not so if they may wait in a collective that this rank has failed to enter.
        """
        if self._is_entering or self._group is None:
            return not self._is_entering
        work = dist.all_reduce(_is_off(True), dist.ReduceOp.MAX, group=self._group, async_op=True)
        assert work is not None
        deadline = time.monotonic() + _CALLING_S
        while not work.is_completed():
            if time.monotonic() > deadline:
                return False
            time.sleep(1e-3)
        try:
            work.wait()
        except RuntimeError:  # another rank has failed, too, and says why
            return False
        return True

    def forget_step(self) -> None:
        """Forgets what this rank has run of a step that all ranks give up."""
        self._order = self._functions = self._num_begun = 0
        self._watch.is_announced = False

    def _meet(self) -> None:
        if self._group is None:
            return
        found = _is_off(False)
        dist.all_reduce(found, dist.ReduceOp.MAX, group=self._group)
        if found.item():
            raise CalledOffError("Another rank has run out of memory in this step, so that all ranks give it up.")

    def _note_collective(self, unit: int, is_reduction: bool) -> None:
        if not self._is_paused:
            self._note(2 * unit + is_reduction)
        self._is_entering = True

    def _has_entered(self) -> None:
        self._is_entering = False

    def numbers_of_ranks(self, unit: int, number: int, begun: int = 0) -> Sequence[int]:
        """Numbers that ranks give when they come to a unit that moves activations, by rank. Call it on all ranks.

        Args:
            unit: number of the unit among those that move activations; their number for the begin of backward; larger
                ones for the last of operators that feed each other.
            number: that of this rank.
            begun: 1 at the first of such operators, and -1 at the last. In between each collective is reported
                beforehand, for ranks that come to the end wait there for this one.

        Raises:
            RanksApartError: another rank runs another unit at this time.
        """
        if self._group is None:
            return [number]
        if self._is_paused:
            return [number] * self._group.size()
        numbers = self._note(2 * (len(self._groups) + unit), number)
        self._num_begun += begun
        return numbers

    def agree_on_backward(self, reach: Reach) -> Reach:
        """Has backward come to the same outputs on all ranks, with gradients of zero where a loss leaves some out.

        Call it on all ranks before backward.

        Raises:
            RanksApartError: backward cannot come to an output on some rank, or ranks run different units.
        """
        while self._num_exchanging and len({*self.numbers_of_ranks(self._num_exchanging, reach.digest)}) > 1:
            assert self._group is not None
            reports: list[Any] = [None] * self._group.size()
            dist.all_gather_object(reports, (reach.numbers, reach.is_cut_off, reach.has_slopes), group=self._group)
            if any(is_cut_off for _, is_cut_off, _ in reports):
                raise RanksApartError(_SAME_LOSSES)
            reach.come_to(set[int]().union(*(numbers for numbers, *_ in reports)))
            reach.has_slopes = any(has_slopes for *_, has_slopes in reports)
        return reach

    def note_exchange(self, unit: int, is_agreed: bool, output: int) -> None:
        """Notes an exchange in backward of a unit that moves activations, from an output of this number.

        Raises:
            RanksApartError: it was not agreed that all ranks come to it, and another rank runs another unit, or comes
                from another output of this one.
        """
        if self._group is not None and not self._is_paused:
            numbers = self._note(2 * (len(self._groups) + unit) + 1, None if is_agreed else output)
            if not is_agreed and len({*numbers}) > 1:
                raise RanksApartError(self._same_units)

    def note_function(self, digest: int) -> None:
        """Notes a function between operators that feed each other, by a number of it and its arguments."""
        if self._group is not None and not self._is_paused:
            self._functions = (self._functions * 31 + digest) % _PRIME

    def _note(self, event: int, number: int | None = None) -> Sequence[int]:
        """Notes an event that all ranks come to; returns the numbers of all ranks where there is one."""
        self._order = (self._order * 31 + event + 1) % _PRIME
        is_again = self._gathered is not None and event in self._gathered
        if self._gathered is not None:
            self._gathered.add(event)
        if number is not None or is_again or self._meets or self._num_begun or self._num_steps < _NUM_CHECKED:
            return self._check(event, number or 0)
        return ()

    def _check(self, event: int, number: int = 0) -> Sequence[int]:
        """Raises `RanksApartError` unless all ranks report the same event; returns the numbers of all ranks.

        Where units move activations, all reports are all-to-alls of one length: those that do not go together are told
        apart. A report goes to each other rank at once, where in an all-reduce it would go round a ring twice.
        """
        if not self._num_exchanging or self._group is None:
            _check_same(self._largest([event, -event]), self._same_units)
            return ()
        if self._meets:
            self._meet()
        told = torch.tensor([event, number] * self._group.size(), dtype=torch.int64, device="cpu")
        reports = told.clone()
        dist.all_to_all_single(reports, told, group=self._group)
        events, numbers = reports.view(-1, 2).T.tolist()
        if {*events} != {event}:
            raise RanksApartError(self._same_units)
        return numbers  # type: ignore[no-any-return]

    @property
    def _same_units(self) -> str:
        return f"{_SAME_UNITS} {MOVE_WEIGHTS}" if self._num_exchanging else _SAME_UNITS

    def _check_nodes(self) -> None:
        """Raises `RanksApartError` unless all nodes have the same values of units that each of them has all of."""
        for mesh in dict.fromkeys(mesh for _, mesh, _ in self._in_nodes):
            self._check_replicas(mesh)

    def _check_replicas(self, mesh: Any) -> None:
        held = [(name, part) for name, on, part in self._in_nodes if on == mesh]
        hashes = [dtensors.hash_of(part()) % _PRIME for _, part in held]
        values = [value for each in hashes for value in (each, -each)]
        by_local_rank = [-_PRIME] * (mesh.size(1) * len(values))  # ranks of a node have different rows
        # not by its process group, which is an earlier one's where torch remembers an equal mesh of that
        start = mesh.get_coordinate()[1] * len(values)
        by_local_rank[start : start + len(values)] = values
        largest = self._largest(by_local_rank)
        for place, (most, negated_least) in enumerate(zip(largest[::2], largest[1::2], strict=True)):
            if most + negated_least > 0:
                name = held[place % len(hashes)][0]
                raise RanksApartError(
                    f"Expected every node to have the same values of each parameter, but those of {name!r} differ. Each"
                    " node has all of it (HSDP, HDP, node_stationary), or each rank (replicated), so what changes"
                    " weights or gradients of shards must do the same in all nodes: draw their random numbers from a"
                    " generator of their own, seeded by the rank in the node,"
                    " parameter.device_mesh.get_coordinate()[1], or leave these modes out:"
                    f" OSDPStrategy(search_space={OVER_ALL})."
                )

    def _largest(self, values: Sequence[int]) -> list[int]:
        """Largest number over all ranks, for each place."""
        return self._begin_largest(values)()

    def _begin_largest(self, values: Sequence[int]) -> Callable[[], list[int]]:
        """Begins to find these; returns a function that waits for them."""
        if self._group is None:
            return lambda: [*values]
        if self._meets:
            self._meet()
        largest = torch.tensor(values, dtype=torch.int32, device="cpu")
        work = dist.all_reduce(largest, dist.ReduceOp.MAX, group=self._group, async_op=True)
        assert work is not None

        def end() -> list[int]:
            work.wait()
            return largest.tolist()

        return end

    def _note_gradients(self, unit: int, have: Sequence[bool]) -> None:
        self._has_dropped = False
        for place, has in enumerate(have, self._starts[unit]):
            self._has_gradient[place] |= has


@lru_cache(maxsize=1)
def _own_group(world: dist.ProcessGroup) -> dist.ProcessGroup:
    """Process group for this file alone, which orders its collectives; one for all models, for each has its threads."""
    return new_host_group(world)


def _is_off(value: bool) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.int32, device="cpu")


def _check_same(hashes: Sequence[int], expected: str) -> None:
    """Raises `RanksApartError` with a text unless a number is the same on all ranks; its largest and negated least."""
    most, negated_least = hashes
    if most != -negated_least:
        raise RanksApartError(expected)
