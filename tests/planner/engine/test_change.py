"""Changes of a plan while its module is trained, and refused ones."""

import dataclasses

import pytest

from lightning_osdp.core.axes import STATIONARY, Treatment, named
from lightning_osdp.core.plans.parts import Block, Unit
from lightning_osdp.errors import PlanMismatchError
from lightning_osdp.planner.engine import FLIPS, check_change
from tests.support.plans import bare_plan, menu


def unit(name, modes=("ZDP",), **fields):
    return Unit(name=name, operators=(name,), kind="Linear", treatments=named(*modes), **fields)


PLAN = bare_plan(
    (unit("", ("DP",)), unit("a"), unit("b", ("DP", "ZDP"))),
    fingerprint={"a.weight": "(2, 2) float32", "b.weight": "(2, 2) float32"},
    world_size=2,
    blocks=(Block(name="a", treatment=Treatment(saves="recompute")),),
    micro_batch_size=4,
    num_micro_batches=2,
)


def with_unit(**fields):
    units = (*PLAN.units[:2], dataclasses.replace(PLAN.units[2], **fields))
    return dataclasses.replace(PLAN, units=units)


OFFLOADED = dataclasses.replace(PLAN, blocks=(Block(name="b", treatment=Treatment(saves="offload")),))
CHANGES = {
    "keep": with_unit(treatments=named("ZDP", "DP")),
    "sync": with_unit(treatments=named("DP", "ZDP", sync="last")),
    "saves": OFFLOADED,
    "backward_prefetch": dataclasses.replace(PLAN, backward_prefetch="none"),
    "forward_prefetch": dataclasses.replace(PLAN, forward_prefetch=True),
    "asynchronous_unshard": dataclasses.replace(PLAN, asynchronous_unshard=False),
    "late_forward": dataclasses.replace(PLAN, late_forward=("a",)),
    "late_backward": dataclasses.replace(PLAN, late_backward=("a",)),
}


def test_what_may_change_is_tried_field_by_field():
    assert set(CHANGES) == FLIPS


@pytest.mark.parametrize("field", CHANGES)
def test_what_is_run_may_change_where_nothing_is_sharded_anew(field):
    assert CHANGES[field] != PLAN
    check_change(PLAN, CHANGES[field])
    check_change(CHANGES[field], PLAN)


def test_what_a_plan_predicts_and_tells_may_be_anything():
    other = dataclasses.replace(PLAN, peak_bytes=1, step_time_s=2.0, notes=("other",), memory_limit_bytes=5)
    check_change(PLAN, with_unit(time_s=3.0, menu=menu(1.0)))
    check_change(PLAN, other)


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        (dataclasses.replace(PLAN, world_size=4), "world_size is 2 in use and 4 in the plan"),
        (dataclasses.replace(PLAN, micro_batch_size=8), "micro_batch_size is 4 in use and 8 in the plan"),
        (dataclasses.replace(PLAN, num_micro_batches=1), "num_micro_batches is 2 in use and 1 in the plan"),
        (
            dataclasses.replace(PLAN, fingerprint={"a.weight": "(2, 2) float32", "b.weight": "(3, 2) float32"}),
            r"parameter 'b.weight' is '\(2, 2\) float32' in use and '\(3, 2\) float32' in the plan",
        ),
        (
            dataclasses.replace(PLAN, fingerprint={}),
            r"parameter 'a.weight' is '.*' in use and None in the plan \(and 1 more\)",
        ),
        (
            dataclasses.replace(PLAN, units=PLAN.units[:2]),
            r"the list of units is \['', 'a', 'b'\] in use and \['', 'a'\] in the plan",
        ),
        (with_unit(operators=("b", "c")), r"'operators' of unit 'b' is \('b',\) in use and \('b', 'c'\) in the plan"),
        (with_unit(modules=("b", "c")), r"'modules' of unit 'b' is \(\) in use and \('b', 'c'\) in the plan"),
        (
            with_unit(treatments=named("HDP", "HSDP")),
            r"'home' of unit 'b' is \('all',\) in use and \('node',\) in the plan",
        ),
        (with_unit(treatments=named("DP")), "'num_slices' of unit 'b' is 2 in use and 1 in the plan"),
    ],
)
def test_what_cannot_change_is_refused_with_both_values(plan, text):
    allowed = rf"\({', '.join(sorted(FLIPS))}\)"
    remedy = r"To train under that plan, make a new module and a new Trainer with OSDPStrategy\(plan=\.\.\.\)"
    with pytest.raises(PlanMismatchError, match=f"^Expected a plan that differs .* {allowed}, but {text}.*{remedy}"):
        check_change(PLAN, plan)


def test_another_exchange_is_refused_only_where_activations_move():
    check_change(PLAN, with_unit(exchange="row"))
    check_change(with_unit(exchange="row"), PLAN)
    used, planned = (with_unit(treatments=(STATIONARY,), exchange=kind) for kind in ("column", "row"))
    with pytest.raises(PlanMismatchError, match="'exchange' of unit 'b' is 'column' in use and 'row' in the plan"):
        check_change(used, planned)


def test_micro_batches_may_change_where_whoever_drives_steps_says_so():
    check_change(PLAN, dataclasses.replace(PLAN, micro_batch_size=2, num_micro_batches=4), may_divide=True)
    with pytest.raises(PlanMismatchError, match="world_size"):
        check_change(PLAN, dataclasses.replace(PLAN, world_size=4), may_divide=True)
