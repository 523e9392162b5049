"""Modes on several nodes: what is left in each node is chosen where that is worth its bytes, and never beyond them."""

import dataclasses

import pytest

from lightning_osdp.core.axes import NAMED_MODES, modes_of
from lightning_osdp.core.cluster import Cluster
from lightning_osdp.planner.assign import assign_modes, fill_spare
from lightning_osdp.planner.cost import Workload
from lightning_osdp.planner.engine import FSDP2, effects_of
from lightning_osdp.planner.search import SOLVERS
from tests.support.steps import FAST, SLOW, TWO_NODES, filled_beside_all, numbers_of_all

OPERATORS = [
    {"name": f"{index}", "parameter_bytes": num_bytes, "activation_bytes_per_sample": 100, "forward_s_per_sample": 0.1}
    for index, num_bytes in enumerate((800, 800, 1600, 400))
]

OFFERED = [name for name, mode in NAMED_MODES.items() if name != "replicated"]
TRAINED = [name for name in OFFERED if name != "resident" and "moves" not in NAMED_MODES[name]]
"""Modes of units in which something is trained, and that are gathered."""


def given(setting, operators=OPERATORS, num_micro_batches=1, **cluster):
    return setting(
        operators=operators,
        cluster=dataclasses.replace(TWO_NODES, **cluster),
        workload=Workload(micro_batch_size=1, num_micro_batches=num_micro_batches),
        modes=modes_of(OFFERED),
        engine=FSDP2(backward_prefetch="none"),
    )


def names(modes):
    return [mode.name for mode in modes]


def test_all_gathers_inside_of_nodes_take_the_time_of_their_links(setting):
    found = given(setting)
    zdp, hpz, dp, hsdp, hdp = (
        found.costs.step_time_s([NAMED_MODES["DP" if unit.is_root else name] for unit in found.units])
        for name in TRAINED
    )
    gathered = sum(operator["parameter_bytes"] for operator in OPERATORS)
    assert zdp - dp == pytest.approx(SLOW.ring_s(gathered, 8))
    assert hpz - dp == pytest.approx(FAST.ring_s(gathered, 4))
    assert hsdp - hdp == pytest.approx(FAST.ring_s(gathered, 4))
    # in place of an all-gather and a reduce-scatter over all ranks
    between = 2 * SLOW.ring_s(gathered / 4, 2)
    assert hdp - dp == pytest.approx(2 * FAST.ring_s(gathered, 4) + between - 2 * SLOW.ring_s(gathered, 8))


def test_without_nodes_nothing_is_in_them_whatever_is_offered(setting):
    found = setting(
        operators=[*OPERATORS, {"name": "", "parameter_bytes": 100}],
        cluster=Cluster(world_size=8, all_gather=SLOW, reduce_scatter=SLOW, overlaps=True),
        workload=Workload(micro_batch_size=1),
        modes=modes_of([*NAMED_MODES]),
        engine=FSDP2(backward_prefetch="none"),
    )
    assigned = fill_spare(assign_modes(found, memory_limit_bytes=10**6), memory_limit_bytes=10**6)
    assert "node" not in {mode[axis] for mode in assigned.modes for axis in mode}


@pytest.mark.parametrize("search", SOLVERS)
@pytest.mark.parametrize("num_micro_batches", [1, 3])
@pytest.mark.parametrize("overlaps", [False, True])
def test_modes_fit_and_are_about_as_fast_as_any_that_do(setting, search, num_micro_batches, overlaps):
    operators = OPERATORS[: 4 if num_micro_batches == 1 else 3]
    found = given(setting, operators, num_micro_batches=num_micro_batches, overlaps=overlaps)
    assignments = numbers_of_all(found.costs, found.costs.options)
    least, most = (of(peak for _, peak in assignments) for of in (min, max))
    chosen = set()
    for share in (-0.01, 0.0, 0.05, 0.1, 0.2, 0.4, 0.7, 1.0):
        limit_bytes = int(least + share * (most - least))
        filled = filled_beside_all(found, assignments, limit_bytes, search=search)
        assert share >= 0 or filled is None
        if filled is not None:
            chosen.update(names(filled.modes))
    assert chosen == {*TRAINED}


@pytest.mark.parametrize("reduced", ["HSDP", "HDP"])
def test_what_is_reduced_in_the_node_holds_no_whole_gradients_between_micro_batches(setting, reduced):
    found = given(setting, num_micro_batches=3)
    memory = found.costs.memory
    for place, unit in enumerate(memory.order):
        mode = NAMED_MODES[reduced].but(sync="node")
        assert mode in found.costs.options[unit]
        kept = memory.gathered_bytes[place] if effects_of(mode).is_kept else 0.0
        assert memory.held(place, mode) == (kept, memory.more_states_bytes(unit, mode))
        assert memory.more_states_bytes(unit, mode) > 0
    only = dataclasses.replace(found, modes=modes_of(["HSDP", "HDP"]))
    assert [options[0]["sync"] for options in only.costs.menus[1:]] == ["node"] * len(OPERATORS)


def test_without_nodes_what_would_be_left_in_one_is_sharded(setting):
    for cluster in ({"node_size": None}, {"node_size": 8}, {"node_size": 1}):
        found = given(setting, **cluster)
        assert {mode.name for options in found.costs.options for mode in options} == {"ZDP", "DP"}
    only = dataclasses.replace(given(setting, node_size=None), modes=modes_of(["hpZ"]))
    assert {mode.name for options in only.costs.options[1:] for mode in options} == {"ZDP"}


def test_a_unit_that_backward_does_not_come_to_leaves_nothing_in_nodes(setting):
    found = given(setting, [{**OPERATORS[0], "frozen": True}, *OPERATORS[1:]])
    offered = {unit.name: set(names(options)) for unit, options in zip(found.units, found.costs.options, strict=True)}
    assert offered["0"] == {"ZDP", "DP", "resident", "HSDP", "HDP"}
    assert offered["1"] == {*TRAINED}
