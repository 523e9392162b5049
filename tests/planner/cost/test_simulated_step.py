"""Peaks against a simulation that tracks what is gathered unit by unit, and the closed form, which is no less."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_osdp.core.axes import DP, ZDP
from lightning_osdp.core.profile import OptimizerProfile
from lightning_osdp.core.units import partition
from lightning_osdp.planner.cost import Workload, exact_peak, step_memory
from lightning_osdp.planner.engine import effects_of, leaving_order
from tests.support.engines import ENGINES
from tests.support.steps import step_of
from tests.support.tiers import examples


@st.composite
def steps(draw):
    """A random module tree in forward order, and what it is run by."""
    names = [""]
    for index in range(draw(st.integers(1, 7))):
        names.append(f"{draw(st.sampled_from(names))}.{index}".strip("."))
    num_bytes = st.integers(0, 500)
    operators = [
        {
            **draw(st.sampled_from([{}, {}, {"trainable_bytes": 1, "gradient_bytes": 1, "optimizer_bytes": 2}])),
            "name": name,
            "parameter_bytes": draw(num_bytes),
            "frozen": draw(st.sampled_from([False, False, True])),
            "activation_bytes_per_sample": draw(num_bytes),
            "forward_workspace_bytes_per_sample": draw(num_bytes),
            "backward_workspace_bytes_per_sample": draw(num_bytes),
        }
        for name in names[draw(st.integers(0, 1)) :]
    ]
    saved_bytes = 0
    for made in operators:
        beside = draw(st.sampled_from([None, 0, 500]))
        if beside is not None:
            made["ending_bytes_per_sample"] = saved_bytes + beside
        saved_bytes += made["activation_bytes_per_sample"] if made["name"] else 0
    fields = {
        f"loss_{what}_bytes_per_sample": draw(num_bytes)
        for what in ("activation", "forward_workspace", "backward_workspace")
    }
    fields["optimizer"] = OptimizerProfile(
        is_foreach=draw(st.booleans()), temporaries=((0.0, draw(st.sampled_from([0.0, 3.0]))),), foreach_temporaries=2.0
    )
    arguments = {
        "world_size": draw(st.sampled_from([1, 2, 4])),
        "workload": Workload(micro_batch_size=draw(st.integers(1, 3)), num_micro_batches=draw(st.integers(1, 2))),
        "engine": draw(ENGINES),
    }
    return (
        operators,
        fields,
        draw(st.sampled_from([0, 200])),
        draw(st.lists(st.booleans(), min_size=8, max_size=8)),
        arguments,
    )


@examples(300)
@given(step=steps())
def test_the_peak_is_that_of_a_simulation_which_tracks_what_is_gathered(model, operator, step):
    operators, fields, min_unit_bytes, kept, arguments = step
    profile = model(*(operator(**made) for made in operators), **fields)
    units = partition(profile, min_unit_bytes=min_unit_bytes)
    modes = [DP if dp or unit.is_root else ZDP for unit, dp in zip(units, kept, strict=False)]
    found = exact_peak(judged(profile, units, **arguments), modes, engine=arguments["engine"])
    assert found.peak_bytes == pytest.approx(simulated_peak(profile, units, modes, **arguments), abs=1.0)
    assert sum(found.parts.values()) == pytest.approx(found.peak_bytes, abs=len(found.parts) / 2 + 1)
    assert all(num_bytes > 0 for num_bytes in found.parts.values())


@examples(100)
@given(step=steps())
def test_where_every_unit_is_freed_the_closed_form_is_the_peak(model, operator, step):
    # but for what other modes would leave from one unit to another: no buffers lie about where unsharding is
    # asynchronous, and nothing is left from one micro-batch to the next where there is one
    operators, fields, min_unit_bytes, _, arguments = step
    arguments["engine"] = replace(arguments["engine"], asynchronous_unshard=True)
    arguments |= {"world_size": max(2, arguments["world_size"]), "workload": Workload(micro_batch_size=2)}
    profile = model(*(operator(**made) for made in operators), **fields)
    units = partition(profile, min_unit_bytes=min_unit_bytes)
    modes = [DP if unit.is_root else ZDP for unit in units]
    bound = step_memory(judged(profile, units, **arguments), engine=arguments["engine"]).peak(modes)
    exact = exact_peak(judged(profile, units, **arguments), modes, engine=arguments["engine"])
    assert (bound.peak_bytes, bound.parts) == (exact.peak_bytes, exact.parts)


@examples(200)
@given(step=steps(), waits=st.lists(st.booleans(), min_size=8, max_size=8))
def test_the_closed_form_is_no_less_than_the_peak_of_any_modes(model, operator, step, waits):
    operators, fields, min_unit_bytes, kept, arguments = step
    profile = model(*(operator(**made) for made in operators), **fields)
    units = partition(profile, min_unit_bytes=min_unit_bytes)
    may_wait = arguments["workload"].num_micro_batches > 1 and arguments["world_size"] > 1
    modes = [
        DP if unit.is_root else (DP if dp else ZDP).but(sync="last" if may_wait and last else "every")
        for unit, dp, last in zip(units, kept, waits, strict=False)
    ]
    exact = exact_peak(judged(profile, units, **arguments), modes, engine=arguments["engine"]).peak_bytes
    assert exact <= step_memory(judged(profile, units, **arguments), engine=arguments["engine"]).peak(modes).peak_bytes


@examples(100)
@given(step=steps(), limit_bytes=st.integers(0, 12_000))
def test_modes_fit_where_every_prefix_has_room(model, operator, step, limit_bytes):
    operators, fields, min_unit_bytes, kept, arguments = step
    profile = model(*(operator(**made) for made in operators), **fields)
    units = partition(profile, min_unit_bytes=min_unit_bytes)
    modes = [DP if dp else ZDP for dp in kept[: len(units)]]
    memory = step_memory(judged(profile, units, **arguments), engine=arguments["engine"])
    rooms = memory.room_bytes(limit_bytes)
    fits = all(found <= room for found, room in zip(memory.kept_bytes(modes), rooms, strict=True))
    assert fits == (memory.peak(modes).peak_bytes <= limit_bytes)
    assert rooms == sorted(rooms)


def judged(profile, units, *, world_size, workload, engine):
    del engine
    return replace(step_of(profile, world_size=world_size), units=units, workload=workload)


def simulated_peak(profile, units, modes, *, world_size, workload, engine):
    """Peak of a step in which all units reduce their gradients every time."""
    simulation = Simulation(profile, units, modes, world_size, workload.micro_batch_size, engine)
    for micro_batch in range(workload.num_micro_batches):
        simulation.forward()
        if micro_batch == 0:  # Lightning drops the gradients of the step before
            simulation.reduced, simulation.bytes["reduced"] = set(), 0.0
        simulation.backward()
    simulation.update()
    return max(simulation.seen_bytes)


class Simulation:
    """Gathers, frees and reductions of `fully_shard`, unit by unit."""

    def __init__(self, profile, units, modes, world_size, samples, engine):
        self.profile, self.units, self.engine = profile, units, engine
        self.world_size, self.is_sharded, self.samples = world_size, world_size > 1, samples
        self.order, self.trained_from = leaving_order(units), units[0].trained_from
        self.kept = {u for u, mode in enumerate(modes) if effects_of(mode).is_kept}
        self.shard = [unit.trainable_bytes / world_size for unit in units]
        states = sum(unit.parameter_bytes + unit.optimizer_bytes for unit in units) / world_size
        self.bytes = {
            "fixed": states + profile.buffer_bytes + profile.batch_bytes.at(samples),
            "saved": 0.0,
            "gradients": 0.0,
            "left": 0.0,  # the buffer of the unit that was copied out last
            "sent": 0.0,  # gradients as one tensor, of the unit that reduced last
            "reduced": sum(self.shard),
        }
        self.in_buffer, self.copied, self.reduced = set(), set(), set(range(len(units)))
        self.seen_bytes = []

    def look(self, extra=0.0):
        buffers = self.in_buffer if self.is_sharded else ()
        gathered = sum(self.units[u].gathered_bytes for held in (self.copied, buffers) for u in held)
        self.seen_bytes.append(sum(self.bytes.values()) + gathered + extra)

    def gather(self, u):
        if u not in self.copied:
            self.in_buffer.add(u)

    def need(self, u, *, leaves):
        self.gather(u)
        if u in self.in_buffer:
            self.copied.add(u)
            self.look()
            self.in_buffer.discard(u)
            if leaves and not self.engine.asynchronous_unshard:
                self.bytes["left"] = self.units[u].gathered_bytes * self.is_sharded

    def forward(self):
        self.bytes["sent"] = 0.0
        self.need(0, leaves=True)
        for i, segment in enumerate(self.profile.segments):
            for u in sorted(u for u in self.order if self.units[u].first == i):
                self.need(u, leaves=True)
            following = [u for u in self.order if self.units[u].first > i]
            if self.engine.forward_prefetch and following:
                self.gather(min(following, key=lambda u: (self.units[u].first, u)))
            self.bytes["saved"] += segment.saved_bytes.at(self.samples)
            self.look(segment.forward_workspace_bytes.at(self.samples))
            self.copied -= {u for u in self.order if self.units[u].last == i} - self.kept
        self.bytes["left"] = 0.0

    def backward(self):
        self.prefetch(len(self.order))
        for i, segment in reversed(list(enumerate(self.profile.segments))):
            for u in [u for u in reversed(self.order) if self.units[u].last == i >= self.trained_from]:
                self.need(u, leaves=False)
                self.prefetch(self.order.index(u))
            names = {"", segment.operator} if i == 0 else {segment.operator} - {""}
            self.bytes["gradients"] += sum(each.gradient_bytes for each in self.profile if each.name in names)
            self.look(segment.backward_workspace_bytes.at(self.samples))
            for u in [u for u in self.order if self.units[u].first == i > self.trained_from]:
                self.reduce(u)
            self.bytes["saved"] -= segment.saved_bytes.at(self.samples)
            if segment.ending_bytes is not None:
                self.look(segment.ending_bytes.at(self.samples) - self.bytes["saved"])
        # nothing tells that backward is through with these
        for u in [0, *sorted(u for u in self.order if self.units[u].first <= self.trained_from)]:
            self.reduce(u)

    def prefetch(self, place):
        before = self.order[place - 1] if place else None
        if self.engine.backward_prefetch == "pre" and place and self.units[before].last >= self.trained_from:
            self.gather(before)

    def reduce(self, u):
        self.copied.discard(u)
        self.in_buffer.discard(u)
        sent, operators = self.units[u].gradient_bytes, self.units[u].operators
        if not sent:
            return
        self.bytes["sent"] = 0.0
        self.look(sent)  # as one tensor, beside those that backward has made
        self.bytes["gradients"] -= sent
        # each operator is one parameter, and the last one's gradient lives on; gloo receives as much
        more = operators[-1].gradient_bytes + sent if self.is_sharded else 0
        self.look(sent + sent / self.world_size + more)
        # bytes that gloo receives live as long, and those that are added to a gradient of a micro-batch before
        again = sent / self.world_size if u in self.reduced else 0.0
        self.bytes["reduced"] += 0 if u in self.reduced else self.shard[u]
        self.reduced.add(u)
        self.bytes["sent"] = 2 * sent + again if self.is_sharded else sent

    def update(self):
        self.bytes["sent"] = 0.0
        ((_, ratio),) = self.profile.optimizer.temporaries
        self.look(2.0 * sum(self.shard) if self.profile.optimizer.is_foreach else ratio * max(self.shard))
