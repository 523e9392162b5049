"""Contests at their smallest, results made of their rows, and plans of those that OSDP is compared with."""

import json
from dataclasses import replace

import pytest

from benchmarks import contest as program
from benchmarks.families import build
from benchmarks.measures.accuracy.memory import ANY_RATES
from benchmarks.measures.accuracy.peaks import TOO_HIGH, TOO_LOW
from benchmarks.measures.beside_fsdp.baselines import counted
from benchmarks.measures.beside_fsdp.cases import BASE, CONTESTS, HYBRID, Contest, Goal, quick_sections
from benchmarks.measures.beside_fsdp.contest import named, section, strip, table, targets
from benchmarks.measures.section import Results
from benchmarks.testbed.beside_fsdp.lightning_fsdp import Way
from benchmarks.testbed.namespaces import why_unavailable
from benchmarks.testbed.plans import sent_bytes
from lightning_osdp import Cluster, SearchSpace, make_plan, profile_model, simulate
from lightning_osdp.core.cluster import UNIT_PARTS, Link, UnitOverhead

HEADLINE, NODES = CONTESTS["headline"]["one"], CONTESTS["nodes"]["one"]


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.timeout(900)  # two to four minutes on two cores with nothing else to do
@pytest.mark.parametrize(
    "name", [name for name, each in CONTESTS.items() if any(isinstance(contest, Contest) for contest in each.values())]
)
def test_all_that_fit_take_part(name, tmp_path, capsys):
    output = tmp_path / "results.json"
    contests = {key: each for key, each in quick_sections(CONTESTS[name]).items() if isinstance(each, Contest)}
    program.main(name, [*contests], output=output, num_rounds=1, quick=True)
    results = json.loads(output.read_text())
    for key, contest in contests.items():
        if not contest.rates_mbit:
            continue
        rows = results[key]["rows"]
        assert len(rows) == len(contest.models)
        for row in rows:
            for limit in contest.limits:
                assert named(row, contest.base, limit)
                assert all(named(row, each, limit) for each in contest.spaces)
            for entrant in row["entrants"]:
                assert entrant["measured_s"] > 0
                if entrant["limit"] is not None:
                    assert entrant["counted_bytes"] <= entrant["limit"] * row["base_bytes"] * 1.001
                if entrant["predicted_bytes"] is not None:
                    assert 1 - TOO_LOW < entrant["predicted_bytes"] / entrant["counted_bytes"] < 1 + TOO_HIGH
                if contest.misjudged and entrant["name"] == "OSDP":
                    assert entrant["race_steps"] > 0
                if contest.division == "auto":
                    assert entrant["micro_batch_size"] * entrant["num_micro_batches"] == 2
        assert all(target.is_met for target in targets(rows, contest=contest))  # memory: links are not shaped
    printed = capsys.readouterr().out.splitlines()
    program.main(name, [*contests], output=output, num_rounds=1, quick=True)  # goes on, and has nothing left to measure
    assert capsys.readouterr().out.splitlines() == [line for line in printed if ": Case(" not in line]


@pytest.mark.distributed
@pytest.mark.slow
def test_nodes_send_each_other_what_they_should(tmp_path):
    reason = why_unavailable()
    if reason is not None:
        pytest.skip(reason)
    contest = replace(CONTESTS["nodes"]["bytes"].quick, rates_mbit=(1000.0,))
    results = Results(tmp_path / "results.json")
    asked = section("bytes", contest, counted([contest], results, is_fresh=False), num_rounds=1)
    (row,) = results.rows(asked, print)
    assert len(row["entrants"]) == len(contest.rivals)
    for each in row["entrants"]:  # little is sent: a good part of it is headers
        assert 1 <= each["sent_bytes"] / each["wire_bytes"] < 1.4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("nothing",),
            "Expected one of headline, nodes, race, host, accumulation, lora, stationary, activations, splitting, got",
        ),
        (("headline", ["two"]), "Expected sections of headline among one, global, got two."),
    ],
)
def test_what_there_is_not_is_refused(arguments, message):
    with pytest.raises(SystemExit, match=message):
        program.main(*arguments, quick=True)


def entrant(name, measured_s, *, predicted_s=None, limit=1.5, **fields):
    return {
        "name": name, "limit": limit, "micro_batch_size": 1, "num_micro_batches": 2, "counted_bytes": 150,
        "predicted_s": predicted_s, "measured_s": measured_s, "compute_s": 1.0, "wire_bytes": 100.0,
        "sent_bytes": 104, **fields,
    }  # fmt: skip


def test_targets_are_goals_and_what_holds_in_every_cell():
    rivals = (BASE, HYBRID)
    goals = (Goal(over=BASE.name, mean=1.5, best=2.0), Goal(over=HYBRID.name, limits=(2.0,), least=1.0))
    contest = Contest(models=("tiny",), node_size=2, rivals=rivals, spaces={"OSDP": {}}, goals=goals)
    case = {"model": "tiny", "rate_mbit": 200.0, "node_size": 2, "limits": [1.5, 2.0]}
    entrants = [
        entrant(BASE.name, 4.0, predicted_s=4.0),
        entrant(HYBRID.name, 1.5, micro_batch_size=2),
        entrant("OSDP", 2.0, predicted_s=1.6),
        entrant(BASE.name, 4.0, limit=2.0),
        entrant("OSDP", 4.0, limit=2.0, counted_bytes=210, sent_bytes=110),
    ]
    found = {
        target.name: target
        for target in targets([{"case": case, "base_bytes": 100, "entrants": entrants}], contest=contest)
    }
    where = "tiny, 200 Mbit/s"
    assert {name: (pytest.approx(target.measured), target.is_met) for name, target in found.items()} == {
        f"OSDP over {BASE.name}: mean": (1.5, True),
        f"OSDP over {BASE.name}: best": (2.0, True),
        f"{where}, 2x, OSDP: bytes of the limit": (1.05, False),
        f"{where}, 1.5x: OSDP over the best other": (1.5 / 2 / 2, False),
        f"{where}, 2x: OSDP over the best other": (1.0, True),
        f"{where}, 1.5x, OSDP: predicted ratio is off by": (0.25, False),
        f"{where}, 2x, OSDP: bytes sent are off by": (0.1, False),
    }


def test_what_is_gained_is_a_fraction_of_what_running_nothing_again_would_save():
    contest = Contest(
        models=("tiny",), rivals=(BASE,), spaces={}, goals=(Goal(over="whole", at_mbit=None, least_gain=0.6),)
    )
    whole = entrant("whole", 4.0, predicted_s=5.0, free_s=4.0)  # a fifth of 4.0 would be saved

    def found(measured_s, free_s=4.0):
        entrants = [{**whole, "free_s": free_s}, entrant("OSDP", measured_s, predicted_s=4.2)]
        entrants = [{**each, "plan": "", "predicted_bytes": None} for each in entrants]
        row = {"case": {"model": "tiny", "rate_mbit": None}, "base_bytes": 100, "entrants": entrants}
        last = [[*column.cells][-1] for column in table([row], contest=contest).columns]
        shares = [cell for cell in last if cell.endswith("%") and "." not in cell]  # measured and predicted
        of_goal = [each for each in targets([row], contest=contest) if "gain" in each.name]
        return shares, [(each.measured, each.is_met) for each in of_goal]

    assert found(3.6) == (["50%", "80%"], [(pytest.approx(0.5), False)])
    assert found(3.4) == (["75%", "80%"], [(pytest.approx(0.75), True)])
    assert found(3.4, free_s=4.99) == ([], [])


@pytest.fixture(scope="module")
def tiny_profile():
    return profile_model(build("tiny"), build("tiny").batch(2))


@pytest.mark.parametrize("num_samples", [1, 6])
@pytest.mark.parametrize("way", [way for way in HEADLINE.rivals if way.is_fully_shard], ids=lambda way: way.name)
def test_no_way_of_fully_shard_is_predicted_to_be_faster_than_a_plan_in_its_memory(tiny_profile, way, num_samples):
    link = Link(latency_s=1e-3, seconds_per_byte=1e-8)
    overhead = dict.fromkeys(UNIT_PARTS, UnitOverhead(fixed_s=2e-3))
    cluster = Cluster(world_size=4, all_gather=link, reduce_scatter=link, unit_overhead=overhead)
    plan = way.plan(build("tiny"), world_size=4, micro_batch_size=num_samples)
    other = simulate(plan, tiny_profile, cluster)
    limit_bytes = other.peak.peak_bytes
    plan = make_plan(tiny_profile, cluster, memory_limit_bytes=limit_bytes, micro_batch_size=num_samples)
    assert plan.step_time_s <= other.time_s * 1.001


def test_plans_by_hand_are_said_in_modes_of_slices():
    way = Way(sharding="ZDP ZDP DP", by_operator=True, inside="attention")
    assert (way.name, way.is_predicted) == ("2 ZDP + 1 DP of attention, a unit for each Linear", True)
    plan = way.plan(build("tiny"), world_size=2, micro_batch_size=1)
    assert {unit.name.partition("0.")[2]: unit.modes for unit in plan.units if "0." in unit.name} == {
        "attention.qkv": ("ZDP", "ZDP", "DP"),
        "attention.proj": ("ZDP", "ZDP", "DP"),
        "mlp.expand": ("ZDP",),
        "mlp.proj": ("ZDP",),
    }
    first, *_ = strip(plan)
    assert first == [2, 0, "ZDP ZDP DP", "every", "keep"]


# shares of the S bytes of all units, on two nodes of two ranks, with gradients reduced in the last of K micro-batches
@pytest.mark.parametrize("num_micro_batches", [1, 4])
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("FULL_SHARD", lambda number: 1.5 * number + 1),
        ("SHARD_GRAD_OP", lambda number: 1.75),  # no_sync keeps it gathered
        ("fully_shard FULL_SHARD", lambda number: 2.5 * number),
        ("hpZ", lambda number: 0.75 * number + 1),
        ("HYBRID_SHARD", lambda number: 1),
        ("HYBRID_SHARD_ZERO2", lambda number: 1),
        ("DDP", lambda number: 1.5),
    ],
)
def test_bytes_that_a_node_sends_have_closed_forms(name, expected, num_micro_batches):
    (way,) = (way for way in NODES.rivals if way.name == name)
    plan = way.plan(build("tiny"), world_size=4, node_size=2, micro_batch_size=1, num_micro_batches=num_micro_batches)
    units = [replace(unit, parameter_bytes=100 * bool(unit.name)) for unit in plan.units]
    whole = sum(unit.parameter_bytes for unit in units)
    sent = sent_bytes(replace(plan, units=tuple(units)), scatters_round=name == "DDP")
    assert sent == pytest.approx(expected(num_micro_batches) * whole)


# shares of the bytes of frozen and of trained units, on four ranks
@pytest.mark.parametrize("num_micro_batches", [1, 4])
@pytest.mark.parametrize(
    ("way", "frozen", "trained"),
    [
        (Way(sharding="ZDP", by_operator=True), lambda number: 1.5 * number, lambda number: 1.5 * number + 0.75),
        (Way(sharding="DP", by_operator=True), lambda number: 0.75, lambda number: 1.5),
        (Way(sharding="resident", by_operator=True), lambda number: 0, lambda number: 1.5),
    ],
)
def test_what_is_frozen_sends_no_gradients(way, frozen, trained, num_micro_batches):
    plan = way.plan(build("tiny, LoRA"), world_size=4, micro_batch_size=1, num_micro_batches=num_micro_batches)
    adapters = [unit.name for unit in plan.units if unit.name.endswith((".down", ".up"))]
    units = [
        replace(unit, parameter_bytes=100 * bool(unit.name), gradient_bytes=100 * (unit.name in adapters))
        for unit in plan.units
    ]
    num_frozen = len(units) - 1 - len(adapters)
    expected = 100 * (num_frozen * frozen(num_micro_batches) + len(adapters) * trained(num_micro_batches))
    assert num_frozen > 0
    assert sent_bytes(replace(plan, units=tuple(units))) == pytest.approx(expected)


def test_units_that_accumulate_in_the_node_are_all_reduced_once():
    plan = HYBRID.plan(build("tiny"), world_size=4, node_size=2, micro_batch_size=1, num_micro_batches=4)
    units = [replace(unit.treated(sync="node"), parameter_bytes=100) for unit in plan.units]
    assert sent_bytes(replace(plan, units=tuple(units))) == pytest.approx(100 * len(units))
    every = [unit.treated(sync="every") for unit in units]
    assert sent_bytes(replace(plan, units=tuple(every))) == pytest.approx(400 * len(units))


def test_small_operators_of_a_profiled_model_stay_whole():
    module = build("odd_mlp")
    profile = profile_model(module, module.batch(4), rates=ANY_RATES)
    link = Link(latency_s=1e-4, seconds_per_byte=1e-9)
    cluster = Cluster(world_size=8, all_gather=link, reduce_scatter=link)

    def plan(limit_bytes, **options):
        return make_plan(profile, cluster, memory_limit_bytes=limit_bytes, micro_batch_size=4, **options)

    whole = plan(2**40, search_space=SearchSpace(modes=("ZDP",), slices=(1,)))
    found = plan(whole.peak_bytes // 2)
    split = {unit.name: unit.num_slices for unit in found.units if unit.num_slices > 1}
    assert found.peak_bytes <= whole.peak_bytes // 2
    assert split.keys() == {"layers.1", "layers.2"}  # 5.8 and 4.5 MiB; the others have 1.3 MiB and less
    assert max(split.values()) < max(SearchSpace().slices)


def test_pictures_of_stored_results_are_drawn(tmp_path):
    from benchmarks.pictures.contest import draw

    rows = Results(program.PICTURES.parents[1] / "benchmarks/results/nodes.json").stored("global")
    draw(rows[:1], NODES, tmp_path, "nodes")
    assert all("<path" in (tmp_path / f"nodes{each}.svg").read_text() for each in ("", "_plans"))
