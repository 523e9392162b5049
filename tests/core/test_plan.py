"""A plan as a document: what goes out comes in again, and nothing else does."""

import dataclasses
import json
import re
from types import MappingProxyType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_osdp.core.axes import ACTIVATION_CHOICES, MODES, Treatment, named
from lightning_osdp.core.plans.parts import Block, Decision, Unit
from lightning_osdp.core.plans.plan import COST_MODELS, PREFETCH_CHOICES, SCHEMA_VERSION, Plan
from lightning_osdp.core.plans.search_space import SearchSpace
from lightning_osdp.core.slices import slice_names
from lightning_osdp.errors import OSDPError, PlanFormatError, PlanMismatchError
from tests.support.plans import menu
from tests.support.tiers import examples

ROOT = Unit(name="", operators=("norm",), kind="LayerNorm", treatments=named("DP"), parameter_bytes=64)
HEAD = Unit(name="head", operators=("head",), kind="Linear", treatments=named("ZDP", "ZDP", "DP"), time_s=1.5e-3)
PLAN = Plan(
    fingerprint={"norm.weight": "(16,) float32", "head.weight": "(4, 16) float32"},
    world_size=2,
    units=(ROOT, HEAD),
    memory_limit_bytes=2**30,
    peak_bytes=2**29,
    micro_batch_size=4,
    num_micro_batches=1,
    step_time_s=0.25,
    samples_per_s=32.0,
    gap=0.01,
    solver="depth_first",
    all_zdp_step_time_s=0.5,
)


def edited(**entries: object) -> str:
    """JSON of the plan after somebody edited its entries; Ellipsis deletes one."""
    document = {**json.loads(PLAN.to_json()), **entries}
    return json.dumps({key: value for key, value in document.items() if value is not ...})


def edited_unit(**entries: object) -> str:
    root, head = json.loads(PLAN.to_json())["units"]
    head = {key: value for key, value in {**head, **entries}.items() if value is not ...}
    return edited(units=[root, head], decisions=...)


def refused(text: str, message: str) -> None:
    with pytest.raises(PlanFormatError, match=f"^{re.escape(message)}$"):
        Plan.from_json(text)


# ---- what a plan says


def test_decisions_are_one_per_operator_of_every_unit():
    shared = Unit(name="block", operators=("block.a", "block.b"), kind="Linear", treatments=named("DP"))
    assert dataclasses.replace(PLAN, units=(ROOT, shared, HEAD)).decisions == (
        Decision(operator="norm", unit="", modes=("DP",)),
        Decision(operator="block.a", unit="block", modes=("DP",)),
        Decision(operator="block.b", unit="block", modes=("DP",)),
        Decision(operator="head", unit="head", modes=("ZDP", "ZDP", "DP")),
    )


def test_a_unit_has_as_many_slices_as_modes():
    assert (ROOT.num_slices, HEAD.num_slices) == (1, 3)


def test_predicted_gain_is_the_speed_over_plain_fsdp():
    assert PLAN.predicted_gain == 2.0


@pytest.mark.parametrize("times", [{"step_time_s": 0.0}, {"all_zdp_step_time_s": 0.0}])
def test_without_both_predictions_there_is_no_gain(times):
    assert dataclasses.replace(PLAN, **times).predicted_gain == 1.0


# ---- round trip

NAMES = st.text('abc.01_ \\"\n\x00é☃\U0001f600', max_size=8)
BYTES = st.integers(0, 2**50)
TIMES = st.floats(0, 1e6, allow_nan=False)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    unit_names = ["", *draw(st.lists(NAMES.filter(bool), unique=True, max_size=4))]
    operators = draw(st.lists(NAMES, unique=True, max_size=8))
    owners = [draw(st.sampled_from(unit_names)) for _ in operators]
    units = tuple(
        Unit(
            name=name,
            operators=tuple(operator for operator, owner in zip(operators, owners, strict=True) if owner == name),
            kind=draw(NAMES),
            treatments=named(
                *tuple(draw(st.lists(st.sampled_from([*MODES]), min_size=1, max_size=4))),
                sync=draw(st.sampled_from(("every", "last"))),
            ),
            parameter_bytes=draw(BYTES),
            time_s=draw(TIMES),
            menu=menu(draw(st.floats(0, 1)), draw(BYTES)),
        )
        for name in unit_names
    )
    return Plan(
        fingerprint=draw(st.dictionaries(NAMES, NAMES, max_size=4)),
        world_size=draw(st.integers(1, 4096)),
        units=units,
        memory_limit_bytes=draw(st.integers(1, 2**50)),
        peak_bytes=draw(BYTES),
        micro_batch_size=draw(st.integers(1, 4096)),
        num_micro_batches=draw(st.integers(1, 64)),
        step_time_s=draw(TIMES),
        samples_per_s=draw(TIMES),
        gap=draw(TIMES),
        blocks=tuple(
            Block(
                name=name,
                treatment=Treatment(saves=draw(st.sampled_from(ACTIVATION_CHOICES[1:]))),
                frees_bytes=draw(BYTES),
            )
            for name in draw(st.lists(st.text("ab", min_size=1, max_size=3), unique=True, max_size=3))
        ),
        search_space=SearchSpace(
            modes=draw(st.sampled_from([("ZDP",), ("DP",), ("ZDP", "DP")])),
            slices=(1, *draw(st.lists(st.integers(2, 64), max_size=3))),
            min_unit_bytes=draw(st.none() | BYTES),
            share_units=draw(st.booleans()),
        ),
        solver=draw(NAMES),
        cost_model=draw(st.sampled_from(COST_MODELS)),
        backward_prefetch=draw(st.sampled_from(PREFETCH_CHOICES)),
        forward_prefetch=draw(st.booleans()),
        asynchronous_unshard=draw(st.booleans()),
        all_zdp_step_time_s=draw(TIMES),
        all_zdp_peak_bytes=draw(BYTES),
        notes=tuple(draw(st.lists(NAMES, max_size=3))),
    )


@examples(60)
@given(plans())
def test_a_plan_round_trips_through_json(plan):
    assert Plan.from_json(plan.to_json()) == plan


def test_a_plan_round_trips_through_a_file_in_a_new_folder(tmp_path):
    path = tmp_path / "runs" / "0" / "osdp_plan.json"
    PLAN.save(path)
    assert Plan.load(path) == Plan.load(str(path)) == PLAN
    assert [entry.name for entry in path.parent.iterdir()] == ["osdp_plan.json"]


def test_a_file_that_was_cut_short_is_refused(tmp_path):
    path = tmp_path / "plan.json"
    for length in range(0, len(PLAN.to_json()) - 2, 97):
        path.write_text(PLAN.to_json()[:length], encoding="utf-8")
        with pytest.raises(PlanFormatError, match="cannot be parsed"):
            Plan.load(path)


def test_saving_again_replaces_the_file(tmp_path):
    path = tmp_path / "plan.json"
    PLAN.save(path)
    other = dataclasses.replace(PLAN, solver="greedy")
    other.save(str(path))
    assert Plan.load(path) == other


def test_the_document_starts_with_its_schema_and_ends_with_the_decisions():
    document = json.loads(PLAN.to_json())
    assert next(iter(document.items())) == ("schema_version", SCHEMA_VERSION)
    assert [*document][-1] == "decisions"
    assert document["decisions"][1] == {"operator": "head", "unit": "head", "modes": ["ZDP", "ZDP", "DP"]}
    assert document.keys() - {"decisions"} == {field.name for field in dataclasses.fields(Plan)}


def test_a_search_space_of_lists_and_sets_is_stored():
    plan = dataclasses.replace(PLAN, search_space=SearchSpace(modes=["DP"], sync={"every"}, slices=[1, 2]))
    read = Plan.from_json(plan.to_json())
    assert read == plan
    assert (read.search_space.modes, read.search_space.sync, read.search_space.slices) == (("DP",), ("every",), (1, 2))


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([], "the plan at Plan.search_space to be an object, got []"),
        ({"mode": ["DP"]}, "unknown: ['mode']"),
        ({"modes": "DP"}, "Expected the plan at Plan.search_space.modes to be a list, got 'DP'"),
        (
            {"modes": ["DDP"]},
            (
                "SearchSpace(modes=...) must name at least one of ('ZDP', 'hpZ', 'DP', 'resident', 'HSDP', 'HDP',"
                " 'replicated', 'stationary', 'node_stationary')"
            ),
        ),
        ({"slices": [1, 2.5]}, "search_space.slices[1] to be a whole number below 2^63, got 2.5"),
        ({"min_unit_bytes": "1"}, "min_unit_bytes to be a whole number below 2^63, got '1'"),
        ({"share_units": None}, "to be true or false, got None"),
    ],
)
def test_a_search_space_that_is_none_is_refused(entries, message):
    with pytest.raises(PlanFormatError, match=re.escape(message)):
        Plan.from_json(edited(search_space=entries))


def test_a_fingerprint_may_be_any_mapping():
    plan = dataclasses.replace(PLAN, fingerprint=MappingProxyType(dict(PLAN.fingerprint)))
    assert Plan.from_json(plan.to_json()) == PLAN


def test_decisions_may_be_left_out_and_defaults_too():
    left_out = (
        "decisions",
        "search_space",
        "solver",
        "cost_model",
        "backward_prefetch",
        "notes",
        "all_zdp_step_time_s",
    )
    minimal = edited(**dict.fromkeys(left_out, ...))
    plan = Plan.from_json(minimal)
    assert plan == dataclasses.replace(PLAN, solver="", all_zdp_step_time_s=0.0)


def test_whole_numbers_are_fine_where_seconds_are_meant():
    assert Plan.from_json(edited(step_time_s=2, gap=0)).step_time_s == 2


# ---- not a plan


def test_a_missing_file_is_named(tmp_path):
    path = tmp_path / "none.json"
    message = f"Expected a plan file at {str(path)!r}, but it cannot be read: [Errno 2] No such file or directory:"
    with pytest.raises(PlanFormatError, match=f"^{re.escape(message)}"):
        Plan.load(path)


def test_a_folder_and_a_binary_file_cannot_be_read(tmp_path):
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00plan")
    for path, reason in ((tmp_path, "Is a directory"), (tmp_path / "binary", "can't decode byte 0xff")):
        with pytest.raises(PlanFormatError, match=f"^Expected a plan file at '.*', but it cannot be read: .*{reason}"):
            Plan.load(path)


def test_errors_name_the_file(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text("[]", encoding="utf-8")
    message = f"Expected plan file {str(path)!r} to hold a JSON object, got list."
    with pytest.raises(PlanFormatError, match=f"^{re.escape(message)}$"):
        Plan.load(path)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"schema_version": 1, "units": [', "Expecting value: line 1 column 33 (char 32)"),
        ("", "Expecting value: line 1 column 1 (char 0)"),
        ("{'units': []}", "Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
        ("\ufeff{}", "Unexpected UTF-8 BOM (decode using utf-8-sig): line 1 column 1 (char 0)"),
    ],
)
def test_text_that_is_not_json_is_refused_with_the_remedy(text, reason):
    refused(
        text,
        f"Expected the plan to be a JSON document written by `Plan.save`, but it cannot be parsed: {reason}."
        " Restore the file, or plan anew by leaving out `plan=`.",
    )


@pytest.mark.parametrize("text", ["[" * 200_000, '{"schema_version": ' + "1" * 5000 + "}"])
def test_json_that_python_will_not_parse_is_refused_too(text):
    with pytest.raises(PlanFormatError, match=r"^Expected the plan to be a JSON document .* cannot be parsed: "):
        Plan.from_json(text)


@pytest.mark.parametrize(("text", "kind"), [("[]", "list"), ("null", "NoneType"), ('"plan"', "str"), ("NaN", "float")])
def test_json_that_is_no_object_is_refused(text, kind):
    refused(text, f"Expected the plan to hold a JSON object, got {kind}.")


@pytest.mark.parametrize("version", [SCHEMA_VERSION + 1, SCHEMA_VERSION - 2, 0, "1", None, ...])
def test_another_schema_version_is_refused(version):
    refused(
        edited(schema_version=version),
        f"Expected the plan to have schema_version 4, got {None if version is ... else version!r}."
        " Plan anew with this version of lightning_osdp, or use the version that wrote the plan.",
    )


@pytest.mark.parametrize(("version", "shown"), [(float(SCHEMA_VERSION), f"{SCHEMA_VERSION}.0")])
def test_a_schema_version_must_be_a_whole_number(version, shown):
    refused(
        edited(schema_version=version),
        f"Expected the plan at Plan.schema_version to be a whole number below 2^63, got {shown}.",
    )


# ---- entries


def test_missing_and_unknown_entries_are_listed():
    refused(
        edited(world_size=..., gap=..., step_times=1),
        "Expected the plan at Plan to have the entries of Plan; missing: ['gap', 'world_size'],"
        " unknown: ['step_times'].",
    )
    refused(
        edited_unit(kind=..., mode="DP"),
        "Expected the plan at Plan.units[1] to have the entries of Unit; missing: ['kind'], unknown: ['mode'].",
    )


@pytest.mark.parametrize(
    ("units", "message"),
    [
        ([], "the plan to have a root unit, named '', got none."),
        (..., "the plan at Plan to have the entries of Plan; missing: ['units'], unknown: []."),
        ({}, "the plan at Plan.units to be a list, got {}."),
        ("DP", "the plan at Plan.units to be a list, got 'DP'."),
    ],
)
def test_units_must_be_a_list_with_a_root(units, message):
    refused(edited(units=units, decisions=...), f"Expected {message}")


@pytest.mark.parametrize(("unit", "shown"), [("head", "'head'"), (None, "None"), (["head"], "['head']")])
def test_a_unit_must_be_an_object(unit, shown):
    refused(edited(units=[unit]), f"Expected the plan at Plan.units[0] to be an object, got {shown}.")


HUGE = 10**400


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("world_size", True, "a whole number below 2^63"),
        ("world_size", 2.0, "a whole number below 2^63"),
        ("world_size", "2", "a whole number below 2^63"),
        ("world_size", None, "a whole number below 2^63"),
        ("world_size", {}, "a whole number below 2^63"),
        ("world_size", [], "a whole number below 2^63"),
        ("memory_limit_bytes", float("inf"), "a whole number below 2^63"),
        ("step_time_s", float("nan"), "a finite number"),
        ("step_time_s", float("-inf"), "a finite number"),
        ("gap", True, "a finite number"),
        ("gap", "0.1", "a finite number"),
        ("gap", {}, "a finite number"),
        ("forward_prefetch", 0, "true or false"),
        ("forward_prefetch", "false", "true or false"),
        ("solver", None, "a text"),
        ("solver", {"depth": "first"}, "a text"),
        ("solver", ["greedy"], "a text"),
        ("notes", "one note", "a list"),
        ("notes", {"a": "b"}, "a list"),
        ("fingerprint", [], "an object"),
    ],
)
def test_an_entry_of_another_type_is_refused(name, value, expected):
    refused(edited(**{name: value}), f"Expected the plan at Plan.{name} to be {expected}, got {value!r}.")


def test_an_entry_of_another_type_is_told_inside_of_others():
    refused(edited(notes=[1]), "Expected the plan at Plan.notes[0] to be a text, got 1.")
    for shape in ([16], None):
        text = f"Expected the plan at Plan.fingerprint['norm.weight'] to be a text, got {shape}."
        refused(edited(fingerprint={"norm.weight": shape}), text)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("operators", {"head": "DP"}, "a list"),
        ("name", None, "a text"),
        ("name", {}, "a text"),
        ("parameter_bytes", 1.5, "a whole number below 2^63"),
        ("parameter_bytes", False, "a whole number below 2^63"),
        ("time_s", float("nan"), "a finite number"),
    ],
)
def test_an_entry_of_a_unit_of_another_type_is_refused(name, value, expected):
    refused(edited_unit(**{name: value}), f"Expected the plan at Plan.units[1].{name} to be {expected}, got {value!r}.")


@pytest.mark.parametrize(
    ("name", "expected"), [("peak_bytes", "a whole number below 2^63"), ("step_time_s", "a finite number")]
)
def test_a_number_that_no_float_holds_is_refused_and_cut_in_the_message(name, expected):
    refused(edited(**{name: HUGE}), f"Expected the plan at Plan.{name} to be {expected}, got 1{'0' * 96}....")


@pytest.mark.parametrize("name", ["world_size", "micro_batch_size", "num_micro_batches", "memory_limit_bytes"])
def test_what_there_is_at_least_one_of_is_not_zero(name):
    refused(edited(**{name: 0}), f"Expected {name!r} of the plan to be at least 1, got 0.")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("num_micro_batches", -1),
        ("peak_bytes", -1),
        ("step_time_s", -0.5),
        ("samples_per_s", -1.0),
        ("gap", -0.01),
        ("all_zdp_step_time_s", -1.0),
        ("all_zdp_peak_bytes", -1),
    ],
)
def test_a_negative_number_is_refused(name, value):
    refused(edited(**{name: value}), f"Expected the plan at Plan.{name} to be at least 0, got {value!r}.")


@pytest.mark.parametrize(("name", "value"), [("parameter_bytes", -1), ("time_s", -1.0)])
def test_a_number_of_a_unit_below_zero_is_refused(name, value):
    refused(edited_unit(**{name: value}), f"Expected the plan at Plan.units[1].{name} to be at least 0, got {value!r}.")


def test_a_plan_that_names_an_engine_is_refused():
    # plans for either of two engines had one; there is no FSDP1 to run the one by, and none need say the other
    refused(
        edited(engine="fsdp1"),
        "Expected the plan at Plan to have the entries of Plan; missing: [], unknown: ['engine'].",
    )


@pytest.mark.parametrize("field", ["late_forward", "late_backward", "reached"])
def test_units_that_prefetching_names_are_those_of_the_plan(field):
    name = slice_names(HEAD.name, HEAD.num_slices)[0]
    assert getattr(Plan.from_json(edited(**{field: [name]})), field) == (name,)
    text = f"Expected '{field}' of the plan to name units or slices but the root, got"
    for unknown in ("", "nowhere", HEAD.name):
        refused(edited(**{field: [unknown]}), f"{text} {unknown!r}.")
    refused(edited(**{field: [3]}), f"Expected the plan at Plan.{field}[0] to be a text, got 3.")


def test_modules_are_grouped_in_one_unit_each():
    whole = {"treatments": [{}], "modules": ["embedding", "head"]}
    assert Plan.from_json(edited_unit(**whole)).units[1].modules == ("embedding", "head")
    refused(
        edited_unit(**whole | {"modules": ["head", "head"]}),
        "Expected modules of the plan in one unit each, got those of unit 'head' of the plan again.",
    )
    refused(
        edited_unit(modules=["embedding", "head"]),
        "Expected no 'modules' in unit 'head' of the plan: neither slices nor the root are grouped.",
    )


def test_what_moves_activations_names_an_exchange_of_its_operators():
    moving = {"treatments": [{"moves": "activations"}], "operators": ["head"], "exchange": "column"}
    unit = Plan.from_json(edited_unit(**moving)).units[1]
    assert (unit.modes, unit.exchange) == (("stationary",), "column")
    kinds = "('column', 'row', 'pair', 'attention', 'heads', 'gated', 'embedding')"
    refused(
        edited_unit(**moving | {"exchange": ""}),
        f"Expected an 'exchange' of unit 'head' of the plan, one of {kinds}, for it moves activations.",
    )
    refused(
        edited_unit(**moving | {"exchange": "diagonal"}),
        f"Expected 'exchange' of unit 'head' of the plan to be one of {kinds}, got 'diagonal'.",
    )
    refused(
        edited_unit(**moving | {"exchange": "pair"}),
        "Expected unit 'head' of the plan to be 2 or 3 operators, the modules of the unit, for its exchange is 'pair',"
        " got ('head',) in 1 slices.",
    )
    refused(
        edited_unit(**moving | {"treatments": [{}, {}]}),
        "Expected unit 'head' of the plan to be 1 or 2 or 3 operators, the modules of the unit, for its exchange is"
        " 'column', got ('head',) in 2 slices.",
    )


def test_an_unknown_prefetch_is_refused():
    refused(
        edited(backward_prefetch="before"),
        "Expected 'backward_prefetch' of the plan to be one of ('pre', 'none'), got 'before'.",
    )


def test_an_unknown_cost_model_is_refused():
    refused(
        edited(cost_model="guess"),
        "Expected 'cost_model' of the plan to be one of ('simulate', 'paper'), got 'guess'.",
    )


# ---- units


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"treatments": "DP"}, "the plan at Plan.units[1].treatments to be a list, got 'DP'."),
        ({"treatments": []}, "at least one treatment of unit 'head' of the plan, got none."),
        (
            {"treatments": ["DP"]},
            "the plan at Plan.units[1].treatments[0] to be an object of values by axis, got 'DP'.",
        ),
        (
            {"treatments": [{"compute": "later"}]},
            (
                "axes of the plan at Plan.units[1].treatments[0] to be among ('moves', 'home', 'keep', 'sync',"
                " 'states', 'shard', 'saves'), got 'compute'."
            ),
        ),
        (
            {"treatments": [{"keep": "all"}]},
            (
                "the plan at Plan.units[1].treatments[0].keep to be one of"
                " ('nothing', 'node', 'whole', 'always'), got 'all'."
            ),
        ),
        (
            {"treatments": [{"keep": 1}]},
            "the plan at Plan.units[1].treatments[0].keep to be one of ('nothing', 'node', 'whole', 'always'), got 1.",
        ),
        (
            {"treatments": [{"saves": "recompute"}]},
            "the treatment of unit 'head' of the plan to be that of a unit, got Treatment(saves='recompute').",
        ),
        ({"menu": 3}, "the plan at Plan.units[1].menu to be a list, got 3."),
        ({"menu": [3]}, "the plan at Plan.units[1].menu[0] to be an object, got 3."),
        (
            {"menu": [{"treatment": {}, "more_s": -1.0}]},
            "the plan at Plan.units[1].menu[0].more_s to be at least 0, got -1.0.",
        ),
        (
            {"menu": [{"treatment": {}}, {"treatment": {"keep": 1}}]},
            (
                "the plan at Plan.units[1].menu[1].treatment.keep to be one of"
                " ('nothing', 'node', 'whole', 'always'), got 1."
            ),
        ),
        ({"name": ""}, "units and operators of the plan once each, got unit '' of the plan again."),
        ({"operators": ["norm"]}, "units and operators of the plan once each, got unit 'head' of the plan again."),
        ({"operators": ["a", "a"]}, "units and operators of the plan once each, got unit 'head' of the plan again."),
    ],
)
def test_a_unit_that_cannot_be_applied_is_refused(entries, message):
    refused(edited_unit(**entries), f"Expected {message}")


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        (3, "the plan at Plan.blocks to be a list, got 3."),
        (
            [{"name": "a", "treatment": {"saves": "keep"}}],
            "block 'a' of the plan to do something else than to keep what it saves. Leave it out.",
        ),
        (
            [{"name": "a", "treatment": {"keep": "whole"}}],
            "the treatment of block 'a' of the plan to be that of a block, got Treatment(keep='whole').",
        ),
        ([{"name": "a", "treatment": {"saves": "offload"}}] * 2, "blocks of the plan once each, got ['a', 'a']."),
        (
            [{"name": "a", "treatment": {"saves": "offload"}}, {"name": "a.b.c", "treatment": {"saves": "recompute"}}],
            "no block of the plan inside another, and not the root, got block 'a.b.c' of the plan.",
        ),
        (
            [{"name": "", "treatment": {"saves": "offload"}}],
            "no block of the plan inside another, and not the root, got block '' of the plan.",
        ),
        (
            [{"name": "a", "treatment": {"saves": "offload"}, "frees_bytes": -1}],
            "the plan at Plan.blocks[0].frees_bytes to be at least 0, got -1.",
        ),
    ],
)
def test_blocks_that_make_no_sense_are_refused(blocks, message):
    refused(edited(blocks=blocks), f"Expected {message}")


def test_a_plan_needs_a_root():
    units = json.loads(PLAN.to_json())["units"][1:]
    refused(edited(units=units, decisions=...), "Expected the plan to have a root unit, named '', got none.")


def test_decisions_that_differ_from_the_units_are_refused():
    decisions = json.loads(PLAN.to_json())["decisions"]
    decisions[1]["modes"] = ["DP", "DP", "DP"]
    message = (
        "Expected 'decisions' of the plan to be what its 'units' say, but they differ."
        " Edit 'units' (they say what is sharded how) and delete 'decisions' (they are derived)."
    )
    for nonsense in (decisions, decisions[:1], [], None, "DP", {}):
        refused(edited(decisions=nonsense), message)


# ---- for this model?


def test_a_plan_matches_its_own_model_and_ranks():
    PLAN.check_matches(dict(PLAN.fingerprint), world_size=2)


@pytest.mark.parametrize(
    ("fingerprint", "world_size", "differences"),
    [
        (PLAN.fingerprint, 4, "the plan is for 2 ranks, this run has 4"),
        (
            {**PLAN.fingerprint, "head.weight": "(8, 16) float32"},
            2,
            "parameter 'head.weight': planned (4, 16) float32, found (8, 16) float32",
        ),
        (
            {"norm.weight": "(16,) float32", "head.bias": ""},
            2,
            (
                "parameter 'head.weight': planned (4, 16) float32, found not there;"
                " parameter 'head.bias': planned not there, found "
            ),
        ),
        (
            {"a": "1", "b": "2"},
            3,
            (
                "the plan is for 2 ranks, this run has 3;"
                " parameter 'norm.weight': planned (16,) float32, found not there;"
                " parameter 'head.weight': planned (4, 16) float32, found not there; and 2 more"
            ),
        ),
    ],
)
def test_the_first_differences_are_named(fingerprint, world_size, differences):
    message = (
        f"Expected a plan for this model and this number of ranks, but: {differences}."
        " Plan anew by leaving out `plan=`, or use the model and the number of ranks that it was made for."
    )
    with pytest.raises(PlanMismatchError, match=f"^{re.escape(message)}$"):
        PLAN.check_matches(fingerprint, world_size=world_size)


def in_nodes(**fields):
    units = tuple(unit.in_modes("hpZ") if unit.name else unit for unit in PLAN.units)
    return dataclasses.replace(PLAN, units=units, **{"world_size": 8, "node_size": 4, **fields})


def test_a_plan_in_which_sync_has_its_earlier_name_is_read():
    plan = dataclasses.replace(PLAN, units=tuple(unit.treated(sync="last") for unit in PLAN.units))
    text = plan.to_json()
    assert text.count('"sync": "last"') == sum(unit.num_slices for unit in PLAN.units)
    assert Plan.from_json(text.replace('"sync": "last"', '"reduce": "last"')) == plan


def test_a_plan_of_schema_3_is_read():
    document = json.loads(
        dataclasses.replace(PLAN, blocks=(Block(name="a", treatment=Treatment(saves="offload")),)).to_json()
    )
    del document["decisions"]
    document |= {"schema_version": 3, "blocks": [{"name": "a", "activations": "offload"}]}
    for unit, modes, sync in zip(document["units"], (["DP"], ["ZDP", "DP", "DP"]), ("every", "last"), strict=True):
        del unit["treatments"]
        del unit["menu"]
        unit |= {"modes": modes, "sync": sync, "keep_saves_s": -1.0, "accumulate_costs_bytes": 3}
    read = Plan.from_json(json.dumps(document))
    assert [unit.treatments for unit in read.units] == [named("DP"), named("ZDP", "DP", "DP", sync="last")]
    assert (read.schema_version, read.blocks[0].activations) == (SCHEMA_VERSION, "offload")
    assert Plan.from_json(read.to_json()) == read
    document["units"][1]["modes"] = ["TP"]
    refused(
        json.dumps(document),
        "Expected the plan at Plan.units[1].treatments[0] to be an object of values by axis, got 'TP'.",
    )
    document["units"][1] |= {"modes": ["ZDP"], "sync": "never"}
    refused(
        json.dumps(document),
        "Expected the plan at Plan.units[1].treatments[0].sync to be one of ('every', 'node', 'last'), got 'never'.",
    )


def test_slices_of_an_operator_are_sharded_over_the_same_ranks():
    units = (ROOT, HEAD.in_modes("HSDP", "ZDP"))
    message = "all slices of unit 'head' of the plan to have the same values of .*'home', 'sync', 'saves'.*, got"
    with pytest.raises(PlanFormatError, match=message):
        Plan.from_json(dataclasses.replace(in_nodes(), units=units).to_json())


@pytest.mark.parametrize("mode", ["ZDP", "hpZ", "DP"])
def test_what_is_reduced_in_the_node_first_is_sharded_there(mode):
    def plan(mode):
        units = (unit.in_modes(mode, sync="node") if unit.name else unit for unit in PLAN.units)
        return dataclasses.replace(in_nodes(), units=tuple(units))

    assert Plan.from_json(plan("HSDP").to_json()) == plan("HSDP")
    with pytest.raises(PlanFormatError, match="'sync' of 'node' does not go with the others"):
        Plan.from_json(plan(mode).to_json())


def test_a_plan_with_a_shard_in_each_node_is_for_nodes_of_this_size():
    plan = in_nodes()
    assert Plan.from_json(plan.to_json()) == plan
    plan.check_matches(PLAN.fingerprint, world_size=8, node_size=4)
    for node_size, told in ((2, 2), (None, 8)):
        with pytest.raises(PlanMismatchError, match=f"nodes of 4 ranks, this run has nodes of {told}"):
            plan.check_matches(PLAN.fingerprint, world_size=8, node_size=node_size)
    dataclasses.replace(plan, units=PLAN.units).check_matches(PLAN.fingerprint, world_size=8, node_size=2)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"node_size": 3}, "'node_size' of the plan to divide its 8 ranks, got 3"),
        ({"node_size": 0}, "'node_size' of the plan to divide its 8 ranks, got 0"),
        ({"node_size": None}, r"modes \('hpZ', 'HSDP', 'HDP', 'node_stationary'\), got node_size None for 8 ranks"),
        ({"node_size": 1}, r"modes \('hpZ', 'HSDP', 'HDP', 'node_stationary'\), got node_size 1 for 8 ranks"),
        ({"node_size": 8}, r"modes \('hpZ', 'HSDP', 'HDP', 'node_stationary'\), got node_size 8 for 8 ranks"),
    ],
)
def test_nodes_that_ranks_cannot_have_are_refused(fields, message):
    with pytest.raises(PlanFormatError, match=message):
        Plan.from_json(in_nodes(**fields).to_json())


def test_errors_of_a_plan_can_be_caught_together():
    assert issubclass(PlanFormatError, OSDPError)
    assert issubclass(PlanFormatError, ValueError)
    assert issubclass(PlanMismatchError, OSDPError)
