"""Random models under random plans train as one plain process does that sees all ranks' batches.

``OSDP_FUZZ_EXAMPLES`` sets how many are tried.
"""

import os
from itertools import combinations, pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_osdp.core.text.names import is_inside
from lightning_osdp.operations.splitting import splittable
from tests.distributed.support.fuzzed_training import Net, differences, fits_apart

pytestmark = pytest.mark.distributed


EXAMPLES = int(os.environ.get("OSDP_FUZZ_EXAMPLES", "60" if settings().derandomize else "100"))
HANGS_AFTER_S = 20


def fuzzed(share):
    return settings(
        max_examples=max(1, int(EXAMPLES * share)),
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
    )


# ---- models

LEAVES = st.one_of(
    st.tuples(st.just("linear"), st.booleans()),
    st.tuples(st.just("mlp"), st.integers(1, 7)),
    st.tuples(st.just("view")),
)


def around(inner):
    return st.one_of(
        st.tuples(st.just("stack"), inner),
        st.tuples(st.just("stack"), inner, inner),
        st.tuples(st.just("stack"), inner, inner, inner),
        st.tuples(st.just("residual"), inner),
        st.tuples(st.just("twice"), inner),
        st.tuples(st.just("fork"), inner, inner),
    )


NODES = st.recursive(LEAVES, around, max_leaves=4)
SELDOM = st.sampled_from([False] * 5 + [True])


@st.composite
def models(draw):
    """Arguments of `Net`."""
    model = {
        "width": draw(st.integers(1, 6)),
        "vocabulary": draw(st.sampled_from([0, 0, 5])),
        "layers": draw(st.lists(NODES, min_size=1, max_size=4)),
        "gain": draw(st.booleans()),
    }
    module = Net(**model)
    shapes = {n: tuple(m.weight.shape) for n, m in module.named_modules() if isinstance(m, (nn.Linear, nn.Embedding))}
    alike = [pair for pair in combinations(shapes, 2) if shapes[pair[0]] == shapes[pair[1]]]
    tie = draw(st.sampled_from(alike)) if alike and draw(SELDOM) else ()
    module = Net(**model, tie=tie)
    names = [name for name, _ in module.named_parameters() if name != "head.bias"]
    frozen = [name for name in names if draw(SELDOM)] if draw(st.booleans()) else []
    return {**model, "tie": tie, "frozen": frozen}


# ---- plans

IN_NODE, SYNCS = ["HSDP", "HDP"], ["every", "last", "node"]


def modes_over_all(node_size):
    return ["ZDP", "DP"] if node_size is None else ["ZDP", "DP", "hpZ"]


def neighbours(module):
    """Pairs of modules that are called one right after the other."""
    for name, parent in module.named_modules():
        if isinstance(parent, (nn.Sequential, nn.ModuleList)):
            children = [f"{name}.{index}" for index in range(len(parent))]
            yield from pairwise(children)
        elif hasattr(parent, "left"):
            yield f"{name}.left", f"{name}.right"


def holder(name, units):
    """The unit at or above a module."""
    of = {module: unit for unit, modules in units.items() for module in modules}
    while name and name not in of:
        name = name.rpartition(".")[0]
    return of.get(name, "")


def options(described):
    """Draws what a plan with these units gathers ahead, and how."""
    whole = [unit["name"] for unit in described if unit["name"] and len(unit["modes"]) == 1]
    late = st.lists(st.sampled_from(whole), unique=True, max_size=3).map(tuple) if whole else st.just(())
    return st.fixed_dictionaries(
        {
            "backward_prefetch": st.sampled_from(["pre", "none"]),
            "forward_prefetch": st.booleans(),
            "asynchronous_unshard": st.booleans(),
            "late_forward": late,
            "late_backward": late,
        }
    )


def called_in(module):
    """Names of modules that may be units or blocks."""
    return [
        name
        for name, each in module.named_modules()
        if name and not isinstance(each, nn.ModuleList) and any(True for _ in each.parameters())
    ]


@st.composite
def blocks(draw, called, described):
    """Draws what blocks do, none of which is inside another, and the results that those at a level keep.

    Where operators inside are in slices, by the units as ``described``, there is no level.
    """
    found, sliced = [], [unit["name"] for unit in described if len(unit["modes"]) > 1]
    for name in called:
        if not any(name.startswith(f"{block}.") for block, *_ in found) and draw(SELDOM):
            levels = [] if any(is_inside(each, [name]) for each in sliced) else ["selective_1"] * 2
            saves = draw(st.sampled_from(["recompute", "recompute_offload", "offload", *levels]))
            kept = draw(st.sets(st.integers(0, 5), min_size=1)) if saves == "selective_1" else ()
            found.append((name, saves, tuple(sorted(kept))))
    return found


@st.composite
def places(draw, modes, are_trained):
    """Draws what is on the host of a unit in these modes, with parameters that are trained or frozen."""
    is_gathered = {"replicated", "resident", *IN_NODE}.isdisjoint(modes)
    may_leave = is_gathered and len({*are_trained}) == 1
    if not draw(SELDOM) or not (may_leave or (is_gathered and any(are_trained))):
        return {}
    states = {"states": "host"} if any(are_trained) else {}
    return states | ({"shard": "host"} if may_leave and (not states or draw(st.booleans())) else {})


@st.composite
def plans(draw, model, node_size=None):
    """Units, blocks and options of a plan for a model, on nodes of so many ranks."""
    module = Net(**model)
    called = called_in(module)
    units = {name: (name,) for name in called if draw(st.booleans())}
    for pair in neighbours(module):
        if draw(SELDOM) and not {*pair} & {n for names in units.values() if len(names) > 1 for n in names}:
            for name in pair:
                units.pop(name, None)
            units[pair[0]] = pair
    while model["tie"] and len(found := {holder(name, units) for name in model["tie"]}) > 1:
        del units[max(found, key=len)]
    features = splittable(module)
    operators = [name for name, each in module.named_modules() if any(True for _ in each.parameters(recurse=False))]
    order = ["", *sorted(units, key=called.index)]
    described = []
    for name in order:
        own = tuple(each for each in operators if holder(each, units) == name)
        most = min(3, features.get(name, 1)) if name and own == units[name] == (name,) else 1
        in_node = node_size is not None and draw(st.booleans())
        modes = IN_NODE if in_node else modes_over_all(node_size)
        chosen = tuple(draw(st.lists(st.sampled_from(modes), min_size=1, max_size=most)))
        are_trained = [each.requires_grad for part in own for each in module.get_submodule(part).parameters(False)]
        if name and are_trained and draw(st.sampled_from([False, False, True])):
            chosen, in_node = ("replicated" if any(are_trained) else "resident",) * len(chosen), False
        syncs = SYNCS[:1] if not name or "resident" in chosen else SYNCS if in_node else SYNCS[:2]
        described.append(
            {
                "name": name,
                "operators": own,
                "modules": units[name] if name and len(units[name]) > 1 else (),
                "modes": chosen,
                "sync": draw(st.sampled_from(syncs)),
                "places": draw(places(chosen, are_trained)),
            }
        )
    return {
        "node_size": node_size,
        "units": described,
        "blocks": draw(blocks(called, described)),
        "options": draw(options(described)),
    }


# ---- what happens


@st.composite
def cases(draw, node_size=None):
    model = draw(models())
    plan = draw(plans(model, node_size))
    called = called_in(Net(**model))
    together = [unit["modules"] for unit in plan["units"] if unit["modules"]]

    def skip(how_often):
        chosen = {index for index in range(len(model["layers"])) if draw(how_often)}
        for names in together:  # as one: neither without the other
            of = {int(name.split(".")[1]) for name in names if name.count(".") == 1 and name.startswith("layers.")}
            chosen = chosen | of if chosen & of else chosen
        return sorted(chosen)

    def event(*, between_steps):
        always = ["evaluate", "evaluate", "forward", "reshard", "change", "load", "save", "save_optimizer"]
        name = draw(st.sampled_from([*always, *(["use", "alone", "freeze"] if between_steps else [])]))
        if name in ("evaluate", "forward"):
            return name, skip(st.booleans())
        if name == "use":
            modes = draw(st.lists(st.sampled_from(modes_over_all(node_size)), min_size=1, max_size=5))
            sync = draw(st.lists(st.sampled_from(SYNCS if node_size else SYNCS[:2]), min_size=1, max_size=5))
            return name, modes, sync, draw(options(plan["units"])), draw(blocks(called, plan["units"]))
        return (name, draw(st.integers(0, 3))) if name == "freeze" else (name,)

    def events(**options):
        return [event(**options) for _ in range(draw(st.sampled_from([0, 1, 2, 3])))]

    steps = [
        {
            "batches": [
                {"skip": skip(SELDOM), "reshards": draw(SELDOM), "events": events(between_steps=False)}
                for _ in range(draw(st.integers(1, 3)))
            ],
            "events": events(between_steps=True),
        }
        for _ in range(draw(st.integers(1, 3)))
    ]
    return {
        "model": model,
        **plan,
        "optimizer": draw(st.sampled_from(["sgd", "adamw", "adamw loop"])),
        "clip": draw(st.sampled_from([0.0, 0.0, 0.1])),
        "steps": steps,
    }


@st.composite
def fits(draw):
    """Draws fits of a Trainer: equal micro-batches in each step, what a callback changes, and when validation runs."""
    case = draw(cases())
    number, num_layers = draw(st.integers(1, 3)), len(case["model"]["layers"])
    batches = [batch["skip"] for step in case.pop("steps") for batch in step["batches"]]
    skips = [batches[index % len(batches)] for index in range(number * draw(st.integers(1, 3)))]
    is_apart = any(unit["modules"] for unit in case["units"])  # a layer alone may be half a unit
    return {
        **case,
        "num_micro_batches": number,
        "skips": skips,
        "val_skip": [] if is_apart or not draw(st.booleans()) else [num_layers - 1],
        "validates_every": draw(st.sampled_from([0, 1, len(skips)])),
        "clears": draw(st.booleans()),
        "changes": draw(st.sampled_from(["", "on_before_optimizer_step", "on_train_batch_end", "on_validation_end"])),
    }


def check(ranks, world_size, case, played=differences):
    """A pool of which a rank has raised is not used again: others may be somewhere else."""
    pool = ranks(world_size)
    pool.timeout_s = HANGS_AFTER_S
    try:
        found = pool.run(played, drawn=case)
    except BaseException:
        pool.close()
        raise
    assert found == [{}] * world_size


@pytest.mark.slow
@fuzzed(0.6)
@given(case=cases())
def test_two_ranks_train_as_one_process_does(ranks, case):
    check(ranks, 2, case)


@pytest.mark.slow
@fuzzed(0.08)
@given(case=cases())
def test_four_ranks_train_as_one_process_does(ranks, case):
    check(ranks, 4, case)


@fuzzed(0.03)
@given(case=cases(node_size=2))
def test_two_nodes_of_two_ranks_train_as_one_process_does(ranks, case):
    check(ranks, 4, case)


@fuzzed(0.06)
@given(case=fits())
def test_two_ranks_fit_as_one_process_does(ranks, case):
    check(ranks, 2, case, fits_apart)


@pytest.mark.slow
@fuzzed(0.08)
@given(case=cases())
def test_one_rank_trains_as_one_process_does(ranks, case):
    check(ranks, 1, case)


def test_a_layer_that_a_step_leaves_out_is_not_updated_on_one_rank(ranks):
    layers = [("linear", True), ("linear", True)]
    batch = {"skip": [], "reshards": False, "events": []}
    case = {
        "model": {"width": 2, "vocabulary": 0, "layers": layers, "gain": False},
        "units": [
            {"name": "", "operators": ("layers.0", "head"), "modes": ("DP",)},
            {"name": "layers.1", "operators": ("layers.1",), "modes": ("ZDP",)},
        ],
        "blocks": [],
        "options": {},
        "optimizer": "adamw",
        "clip": 0.0,
        "steps": [{"batches": [{**batch, "skip": skip}], "events": []} for skip in ([], [1])],
    }
    check(ranks, 1, case)


def test_a_split_operator_that_recomputes_returns_what_may_be_changed_in_place(ranks):
    batch = {"skip": [], "reshards": False, "events": []}
    name = "layers.1.cut.wide"
    case = {
        "model": {"width": 3, "vocabulary": 0, "layers": [("linear", True), ("view",)], "gain": False},
        "units": [
            {"name": "", "operators": ("layers.0", "head"), "modes": ("DP",)},
            {"name": name, "operators": (name,), "modes": ("DP", "DP")},
        ],
        "blocks": [(name, "recompute_offload", ())],
        "options": {},
        "optimizer": "sgd",
        "clip": 0.0,
        "steps": [{"batches": [batch], "events": []} for _ in range(3)],
    }
    check(ranks, 2, case)
