"""The closed form against a simulation that tracks which units are gathered, and knows nothing of prefixes."""

from dataclasses import replace

import pytest
from engines import ENGINES, FSDP1S
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_osdp.core.modes import DP, ZDP
from lightning_osdp.core.profile import OptimizerProfile
from lightning_osdp.core.units import partition
from lightning_osdp.cost import Workload, exact_peak, step_memory
from lightning_osdp.engine import leaving_order


@st.composite
def steps(draw, engines=ENGINES):
    """A random module tree in forward order, and the rest of what `step_memory` takes."""
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
        "engine": draw(engines),
    }
    return (
        operators,
        fields,
        draw(st.sampled_from([0, 200])),
        draw(st.lists(st.booleans(), min_size=8, max_size=8)),
        arguments,
    )


@settings(deadline=None, max_examples=300)
@given(step=steps(FSDP1S))
def test_the_peak_is_that_of_a_simulation_which_tracks_what_is_gathered(model, operator, step):
    operators, fields, min_unit_bytes, kept, arguments = step
    profile = model(*(operator(**made) for made in operators), **fields)
    units = partition(profile, min_unit_bytes=min_unit_bytes)
    modes = [DP if dp else ZDP for dp in kept[: len(units)]]
    found = step_memory(profile, units, **arguments).peak(modes)
    assert found.peak_bytes == pytest.approx(simulated_peak(profile, units, modes, **arguments), abs=1.0)
    assert sum(found.parts.values()) == pytest.approx(found.peak_bytes, abs=len(found.parts) / 2 + 1)
    assert all(num_bytes > 0 for num_bytes in found.parts.values())


@settings(deadline=None, max_examples=200)
@given(step=steps(), waits=st.lists(st.booleans(), min_size=8, max_size=8))
def test_the_closed_form_is_no_less_than_the_peak_of_any_modes(model, operator, step, waits):
    operators, fields, min_unit_bytes, kept, arguments = step
    profile = model(*(operator(**made) for made in operators), **fields)
    units = partition(profile, min_unit_bytes=min_unit_bytes, rules=arguments["engine"].rules)
    may_wait = arguments["workload"].num_micro_batches > 1 and arguments["world_size"] > 1
    modes = [
        DP if unit.is_root else replace(DP if dp else ZDP, sync="last" if may_wait and last else "every")
        for unit, dp, last in zip(units, kept, waits, strict=False)
    ]
    exact = exact_peak(profile, units, modes, **arguments).peak_bytes
    assert exact <= step_memory(profile, units, **arguments).peak(modes).peak_bytes


@settings(deadline=None, max_examples=100)
@given(step=steps(), limit_bytes=st.integers(0, 12_000))
def test_modes_fit_where_every_prefix_has_room(model, operator, step, limit_bytes):
    operators, fields, min_unit_bytes, kept, arguments = step
    profile = model(*(operator(**made) for made in operators), **fields)
    units = partition(profile, min_unit_bytes=min_unit_bytes)
    modes = [DP if dp else ZDP for dp in kept[: len(units)]]
    memory = step_memory(profile, units, **arguments)
    rooms = memory.room_bytes(limit_bytes)
    fits = all(found <= room for found, room in zip(memory.kept_bytes(modes), rooms, strict=True))
    assert fits == (memory.peak(modes).peak_bytes <= limit_bytes)
    assert rooms == sorted(rooms)


def simulated_peak(profile, units, modes, *, world_size, workload, engine):
    """Peak of a step in which FSDP's hooks gather and free units one by one: an oracle that knows no prefixes."""
    samples, accumulates = workload.micro_batch_size, workload.num_micro_batches > 1
    order = leaving_order(units)
    root = next(u for u, unit in enumerate(units) if unit.is_root)
    gathered, seen_bytes = {root}, []
    state = {"fixed": profile.buffer_bytes + profile.batch_bytes.at(samples), "saved": 0.0, "gradients": 0.0}
    state["fixed"] += sum(unit.parameter_bytes + unit.optimizer_bytes for unit in units) / world_size
    shard = [unit.parameter_bytes / world_size if unit.trainable_bytes else 0.0 for unit in units]
    flat = [unit.gathered_bytes if unit.gradient_bytes else 0 for unit in units]
    state["reduced"] = sum(shard)

    def look(extra=0.0, also=()):
        whole = sum(units[u].gathered_bytes for u in gathered | set(also)) if world_size > 1 else 0
        seen_bytes.append(sum(state.values()) + whole + extra)

    def before(unit):
        return {order[order.index(unit) - 1]} - reduced if unit in order and order.index(unit) else set()

    # frozen parameters have gradients where others of their unit do
    made = {operator.name: operator.gathered_bytes for u in units if u.gradient_bytes for operator in u.operators}
    reduced = set()
    # where forward gathers ahead, autograd is through with a unit when it is through with the one called before it
    called = [u for u in range(len(units)) if u != root or units[u].gathered_bytes]
    before_it = dict(zip(called[1:], called[:-1], strict=True)) if engine.forward_prefetch else {}
    ends = [units[before_it.get(u, u) if flat[u] else u].first for u in range(len(units))]
    for i, segment in enumerate(profile.segments[:-1]):
        gathered |= {u for u in order if units[u].first == i}
        state["saved"] += segment.saved_bytes.at(samples)
        following = [u for u in order if units[u].first > i]
        ahead = [min(following, key=lambda u: (units[u].first, u))] if engine.forward_prefetch and following else []
        look(segment.forward_workspace_bytes.at(samples), ahead)
        gathered -= {u for u in order if units[u].last == i and not modes[u].resident}
    state["saved"] += profile.loss.saved_bytes.at(samples)
    look(profile.loss.forward_workspace_bytes.at(samples))
    state["reduced"] *= accumulates
    if engine.backward_prefetch == "pre" and units[root].gathered_bytes and order:
        gathered.add(order[-1])
    look(profile.loss.backward_workspace_bytes.at(samples))
    state["saved"] -= profile.loss.saved_bytes.at(samples)
    for i, segment in reversed(list(enumerate(profile.segments[:-1]))):
        for u in [u for u in reversed(order) if units[u].last == i]:
            gathered |= {u} | (before(u) if engine.backward_prefetch == "pre" else set())
        made_here = {segment.operator, ""} if i == 0 else {segment.operator}
        state["gradients"] += sum(made.get(name, 0) for name in made_here)
        look(segment.backward_workspace_bytes.at(samples))
        through = [u for u in (reversed(range(len(units))) if engine.forward_prefetch else order) if ends[u] == i]
        for u in [*(u for u in through if u != root), *([root] if i == 0 else [])]:
            state["gradients"] += flat[u] - sum(made.get(operator.name, 0) for operator in units[u].operators)
            look(flat[u])
            gathered.discard(u)
            reduced.add(u)
            gathered |= before(u) if engine.backward_prefetch == "post" else set()
            look(shard[u] + (flat[u] if world_size > 1 else 0))
            state["gradients"] -= flat[u] if world_size > 1 or accumulates else 0
            state["reduced"] += 0 if accumulates or world_size == 1 else shard[u]
        state["saved"] -= segment.saved_bytes.at(samples)
    state |= {"reduced": sum(shard), "gradients": 0.0}
    updated = [unit.trainable_bytes / world_size for unit in units]
    ((_, ratio),) = profile.optimizer.temporaries
    look(2.0 * sum(updated) if profile.optimizer.is_foreach else ratio * max(updated))
    return max(seen_bytes)
