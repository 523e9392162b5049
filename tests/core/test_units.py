"""Units that operators share."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_osdp.core.units import apart, default_min_unit_bytes, joined, merged, outermost, partition


def contents(units):
    """Name of each unit -> names of its operators."""
    return {unit.name: tuple(operator.name for operator in unit.operators) for unit in units}


def test_every_operator_is_a_unit_if_it_is_large_enough(model):
    units = partition(model(100, 200, 300), min_unit_bytes=100)
    assert contents(units) == {"": (), "m0": ("m0",), "m1": ("m1",), "m2": ("m2",)}
    assert [(unit.first, unit.last) for unit in units] == [(0, 3), (0, 0), (1, 1), (2, 2)]


def test_small_operators_join_the_nearest_unit_above(model, operator):
    profile = model(operator("h.0", 500), operator("h.0.ln", 10), operator("h.0.fc", 400), operator("ln", 10))
    assert contents(partition(profile, min_unit_bytes=11)) == {
        "": ("ln",),
        "h.0": ("h.0", "h.0.ln"),
        "h.0.fc": ("h.0.fc",),
    }


def test_where_no_child_of_the_root_runs_around_them_small_operators_join_the_root(model, operator):
    # h is a list of modules, and is not called itself
    sizes = {"h.0.ln": 10, "h.0.fc": 400}
    profile = model(*(operator(name, size, enclosing=(name, "h.0", "")) for name, size in sizes.items()))
    assert contents(partition(profile, min_unit_bytes=11)) == {"": ("h.0.ln",), "h.0.fc": ("h.0.fc",)}


def test_a_unit_that_becomes_too_large_to_join_by_what_joined_it_stays(model, operator):
    # 10 + 10 bytes are enough for a unit of their own; 10 alone would have joined m
    profile = model(operator("m.block", 10), operator("m.block.ln", 10))
    assert contents(partition(profile, min_unit_bytes=20)) == {"": (), "m.block": ("m.block", "m.block.ln")}
    assert contents(partition(profile, min_unit_bytes=21)) == {"": (), "m": ("m.block", "m.block.ln")}


def test_an_operator_used_outside_the_unit_above_stays_its_own(model, operator):
    used_elsewhere = operator("h.scale", 10, enclosing=("h.scale", ""))
    profile = model(operator("h", 500), used_elsewhere)
    assert contents(partition(profile, min_unit_bytes=11)) == {"": (), "h": ("h",), "h.scale": ("h.scale",)}


def test_tied_operators_share_the_unit_that_encloses_both(model, operator):
    tied = {"enclosing": ("lm", "")}
    profile = model(operator("lm.wte", 400, **tied), operator("lm.fc", 300), operator("lm.head", 0, **tied))
    units = partition(profile, min_unit_bytes=1)
    assert contents(units) == {"": (), "lm": ("lm.wte", "lm.head"), "lm.fc": ("lm.fc",)}
    assert [(unit.name, unit.first, unit.last) for unit in units] == [("", 0, 3), ("lm", 0, 2), ("lm.fc", 1, 1)]


def test_tied_operators_that_only_the_root_encloses_are_the_roots(model, operator):
    profile = model(operator("wte", 400, enclosing=("",)), operator("head", 0, enclosing=("",)))
    assert contents(partition(profile, min_unit_bytes=0)) == {"": ("wte", "head")}


def test_parameters_of_the_root_module_are_the_roots(model, operator):
    profile = model(operator("", 400), operator("fc", 400))
    assert contents(partition(profile, min_unit_bytes=0)) == {"": ("",), "fc": ("fc",)}


def test_a_container_with_parameters_spans_what_runs_inside_it(model, operator):
    profile = model(operator("a", 100), operator("block", 100), operator("block.fc", 100), operator("z", 100))
    units = partition(profile, min_unit_bytes=0)
    assert [(unit.name, unit.first, unit.last) for unit in units] == [
        ("", 0, 4),
        ("a", 0, 0),
        ("block", 1, 2),
        ("block.fc", 2, 2),
        ("z", 3, 3),
    ]


def test_of_units_that_span_the_same_operators_the_outer_one_comes_first(model, operator):
    # block.a and block.c are tied in block.x; block.b runs between them, and block has parameters used there alone
    inner = {"enclosing": ("block.x", "block", "")}
    profile = model(
        operator("block.x.a", 100, **inner),
        operator("block.b", 100, enclosing=("block", "")),
        operator("block.x.c", 0, **inner),
    )
    assert [unit.name for unit in partition(profile, min_unit_bytes=0)] == ["", "block", "block.x"]


def test_a_model_without_operators_is_a_root_without_parameters(model):
    (root,) = partition(model())
    assert (root.name, root.operators, root.calls, root.parameter_bytes) == ("", (), ((0, 0),), 0)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([100_000_000], 65536),  # 1% would be a megabyte
        ([6_553_600], 65536),
        ([6_553_500], 65535),
        ([400, 199], 5),
        ([], 0),
    ],
)
def test_small_is_64_kib_or_one_percent_of_a_small_model(model, sizes, expected):
    assert default_min_unit_bytes(model(*sizes)) == expected


def test_the_default_is_used_where_nothing_is_said(model, operator):
    profile = model(operator("a", 990), operator("b", 9), operator("c", 10))  # 1% of 1009 is 10
    assert contents(partition(profile)) == {"": ("b",), "a": ("a",), "c": ("c",)}


def test_a_unit_adds_its_operators_up(model, operator):
    half = {"gathered_bytes": 50, "gradient_bytes": 50}  # computing in half precision
    profile = model(
        operator(
            "b", 100, forward_s_per_sample=1.0, backward_s_per_sample=2.0, activation_bytes_per_sample=7.0, **half
        ),
        operator("b.ln", 20, forward_s_per_sample=0.5, kind="LayerNorm", frozen=True),
    )
    _, unit = partition(profile, min_unit_bytes=21)
    assert (unit.parameter_bytes, unit.gathered_bytes, unit.gradient_bytes) == (120, 70, 50)
    assert (unit.trainable_bytes, unit.optimizer_bytes) == (100, 200)
    assert (unit.compute_s.at(1), unit.saved_bytes.at(1)) == (3.5, 7.0)
    assert unit.kind == "Linear, LayerNorm"
    assert not unit.is_root


def test_a_unit_is_called_as_often_as_the_module_that_it_wraps(model, operator):
    profile = model(operator("block", 100, num_calls=2), operator("block.ln", 1))
    assert partition(profile, min_unit_bytes=2)[1].calls == ((0, 1), (0, 1))


def test_a_unit_trains_in_one_dtype(model, operator):
    profile = model(operator("a", 100), operator("a.ln", 4, dtype="bfloat16"), operator("a.b", 4))
    assert contents(partition(profile, min_unit_bytes=5)) == {"": (), "a": ("a", "a.b"), "a.ln": ("a.ln",)}
    assert merged(profile, partition(profile, min_unit_bytes=0), ["a"]) is None


@st.composite
def module_trees(draw):
    """Operators of a random module tree in forward order, some of them tied, as the profiler describes them."""
    names = [""]
    for index in range(draw(st.integers(0, 12))):
        names.append(f"{draw(st.sampled_from(names))}.{index}".strip("."))
    owners = draw(st.lists(st.sampled_from(names), min_size=1, unique=True))
    above = {name: [n for n in names if n and f"{name}.".startswith(f"{n}.")] for name in owners}
    above = {name: sorted(found, key=len, reverse=True) for name, found in above.items()}
    if len(owners) > 1:
        one, other = draw(st.lists(st.sampled_from(owners), min_size=2, max_size=2, unique=True))
        common = [name for name in above[one] if name in above[other]]
        # modules between a tied operator and the module around both can be no unit of any operator
        between = {*above[one], *above[other]} - {*common}
        above = {name: [n for n in found if n not in between] for name, found in above.items()}
    return [(name, (*above[name], ""), draw(st.integers(0, 100))) for name in owners]


@settings(deadline=None)
@given(tree=module_trees(), min_unit_bytes=st.none() | st.integers(0, 300))
def test_every_operator_is_in_one_unit_where_fsdp_puts_it(model, operator, tree, min_unit_bytes):
    profile = model(*(operator(name, num_bytes, enclosing=enclosing) for name, enclosing, num_bytes in tree))
    units = partition(profile, min_unit_bytes=min_unit_bytes)
    assert units[0].is_root
    assert sorted(o.name for unit in units for o in unit.operators) == sorted(name for name, _, _ in tree)
    assert [(unit.first, -unit.last) for unit in units[1:]] == sorted((u.first, -u.last) for u in units[1:])
    names = {unit.name for unit in units}
    least = default_min_unit_bytes(profile) if min_unit_bytes is None else min_unit_bytes
    for unit in units:
        # a small unit may be a child of the root all the same, as the unit of what is inside it
        is_around = "." not in unit.name and any(held.name != unit.name for held in unit.operators)
        assert unit.is_root or unit.parameter_bytes >= least or is_around
        for held in unit.operators:
            assert unit.name in held.enclosing
            assert unit.name == next(n for n in _at_and_above(held.name) if n in names)
            if held.name:
                position = [segment.operator for segment in profile.segments[:-1]].index(held.name)
                assert unit.first <= position <= unit.last


def _at_and_above(name):
    while name:
        yield name
        name = name.rpartition(".")[0]
    yield ""


def test_small_operators_join_the_outermost_module_around_them_rather_than_the_root(model, operator):
    profile = model(
        operator("model.embedding", 400),
        operator("model.h.0.ln", 10),
        operator("model.h.0.fc", 400),
        operator("model.ln", 10),
        operator("head", 10),
        operator("", 10),
    )
    assert contents(partition(profile, min_unit_bytes=11)) == {
        "": ("head", ""),  # a child of its own, and what the root owns
        "model": ("model.h.0.ln", "model.ln"),
        "model.embedding": ("model.embedding",),
        "model.h.0.fc": ("model.h.0.fc",),
    }


def test_a_child_of_the_root_that_is_a_unit_holds_its_own_parameters_too(model, operator):
    profile = model(operator("model", 10), operator("model.ln", 10), operator("model.fc", 400))
    expected = {"": (), "model": ("model", "model.ln"), "model.fc": ("model.fc",)}
    assert contents(partition(profile, min_unit_bytes=100)) == expected
    alone = model(operator("model", 10), operator("model.fc", 400))
    assert contents(partition(alone, min_unit_bytes=100)) == {"": ("model",), "model.fc": ("model.fc",)}


def test_tied_operators_in_a_child_are_its_unit_however_small(model, operator):
    tied = {"enclosing": ("model", "")}
    profile = model(operator("model.wte", 40, **tied), operator("model.fc", 400), operator("model.head", 0, **tied))
    expected = {"": (), "model": ("model.wte", "model.head"), "model.fc": ("model.fc",)}
    assert contents(partition(profile, min_unit_bytes=100)) == expected


def test_where_a_child_would_take_what_is_shared_with_another_small_operators_join_the_root(model, operator):
    tied = {"enclosing": ("",)}
    profile = model(
        operator("model.wte", 400, **tied),
        operator("model.ln", 10, enclosing=("model.ln", "")),
        operator("head", 0, **tied),
    )
    expected = {"": ("model.wte", "model.ln", "head")}
    assert contents(partition(profile, min_unit_bytes=100)) == expected


def test_what_is_used_outside_of_the_child_stays_its_own(model, operator):
    elsewhere = operator("model.scale", 10, enclosing=("model.scale", ""))
    profile = model(operator("model.ln", 10), elsewhere)
    expected = {"": (), "model": ("model.ln",), "model.scale": ("model.scale",)}
    assert contents(partition(profile, min_unit_bytes=100)) == expected


def test_frozen_parameters_may_have_another_dtype(model, operator):
    frozen = operator("h.fc", 10, frozen=True, dtype="bfloat16")
    profile = model(operator("h", 400), frozen, operator("h.ln", 10, dtype="bfloat16"))
    assert contents(partition(profile, min_unit_bytes=20)) == {
        "": (),
        "h": ("h", "h.fc"),
        "h.ln": ("h.ln",),
    }
    two = model(operator("h.a", 10), operator("h.b", 10, frozen=True, dtype="bfloat16"))
    assert contents(merged(two, partition(two, min_unit_bytes=0), ["h"])) == {"": (), "h": ("h.a", "h.b")}


def test_a_unit_of_several_modules_stays_one_or_goes_whole_where_modules_become_units(model, operator):
    frozen = [operator(f"{block}.mlp.{name}", 10, frozen=True) for block in "ab" for name in ("up", "down")]
    profile = model(operator("a.q", 5), *frozen[:2], operator("b.q", 5), *frozen[2:])
    units = joined(profile, partition(profile, min_unit_bytes=0), [("a.q", "b.q")])
    shared = merged(profile, units, ["a.mlp", "b.mlp"])
    assert contents(shared) == {
        "": (),
        "a.q": ("a.q", "b.q"),
        "a.mlp": ("a.mlp.up", "a.mlp.down"),
        "b.mlp": ("b.mlp.up", "b.mlp.down"),
    }
    of_both = next(unit for unit in shared if unit.name == "a.q")
    assert (of_both.modules, of_both.calls) == (("a.q", "b.q"), ((0, 3),))
    assert merged(profile, units, ["b"]) is None
    assert merged(profile, units, ["a"]) is None
    assert contents(merged(profile, units, ["a", "b"])) == {
        "": (),
        "a": ("a.q", "a.mlp.up", "a.mlp.down"),
        "b": ("b.q", "b.mlp.up", "b.mlp.down"),
    }


def test_what_is_frozen_is_no_unit_with_what_is_trained_where_modules_can_be_units_by_themselves(model, operator):
    held = operator("h.list", 10, frozen=True, enclosing=("h", ""))  # never called itself
    profile = model(
        operator("h.0", 400, frozen=True),
        operator("h.0.down", 10),
        operator("h.ln", 10, frozen=True),
        operator("g", 20),
    )
    profile = dataclasses.replace(profile, operators=(*profile.operators, held, operator("g.ln", 5)))
    units = partition(profile, min_unit_bytes=20)
    assert contents(units) == {"": (), "h": ("h.ln", "h.list"), "h.0": ("h.0", "h.0.down"), "g": ("g", "g.ln")}
    assert contents(apart(profile, units)) == {
        "": (),
        "h": ("h.ln", "h.list"),
        "h.0": ("h.0",),
        "h.0.down": ("h.0.down",),
        "g": ("g", "g.ln"),
    }
    # the root, which is never resident, keeps nothing frozen, and what is trained only where nothing frozen was there
    for names, expected in ((("a", "b"), ()), (("a",), ()), ((), ("a", "b"))):
        small = model(*(operator(name, 10, frozen=name in names) for name in "ab"))
        kept = contents(apart(small, partition(small, min_unit_bytes=20)))[""]
        assert kept == expected
    trained = dataclasses.replace(held, num_trainable=2, gradient_bytes=8)
    profile = dataclasses.replace(profile, operators=(*profile.operators[:-2], trained))
    found = contents(apart(profile, partition(profile, min_unit_bytes=20)))
    assert (found["h"], found["h.ln"]) == (("h.list",), ("h.ln",))


def test_the_outermost_units_of_the_rest_are_children_of_the_root_that_have_something_inside(model, operator):
    rest = (operator("model", 10), operator("model.ln", 10), operator("head", 10), operator("", 10))

    def names(found):
        return {name: [one.name for one in operators] for name, operators in found.items()}

    assert names(outermost(rest)) == {"": ["head", ""], "model": ["model", "model.ln"]}


@pytest.mark.parametrize(
    ("frozen", "expected"), [((), 0), (("m0",), 1), (("m1",), 0), (("m0", "m1"), 2), (("m0", "m1", "m2"), 4)]
)
def test_units_know_where_training_begins(model, operator, frozen, expected):
    profile = model(*(operator(f"m{index}", 100, frozen=f"m{index}" in frozen) for index in range(3)))
    assert {unit.trained_from for unit in partition(profile, min_unit_bytes=0)} == {expected}


def test_training_begins_where_the_module_around_an_operator_that_is_never_called_does(model, operator):
    first, around = operator("first", 100, frozen=True), operator("h.fc", 100, frozen=True)
    held = operator("h.list", 100, enclosing=("h", ""))
    profile = model(first, around)
    profile = dataclasses.replace(profile, operators=(*profile.operators, held))
    assert {unit.trained_from for unit in partition(profile, min_unit_bytes=0)} == {1}
    root = dataclasses.replace(profile, operators=(first, around, operator("", 100)))
    assert {unit.trained_from for unit in partition(root, min_unit_bytes=0)} == {0}
