"""The simulated peak against a count of live storages, where units move activations."""

import dataclasses

import pytest
import torch.distributed as dist

from lightning_osdp import OSDPStrategy, SearchSpace
from lightning_osdp.callbacks.plan_monitor import PlanMonitor
from lightning_osdp.core.axes import NODE_STATIONARY, STATIONARY
from lightning_osdp.planner.simulation import simulate
from tests.distributed.support.fits import moving, plan_for, profile_of, stated_cluster, trainer
from tests.distributed.support.models import build
from tests.support.tiers import slow

pytestmark = pytest.mark.distributed


def predicted_and_counted_peak(name, kinds, num_micro_batches, node_size=None):
    """Bytes predicted and counted where all operators that may move activations do, and which those are."""
    module, world_size = build(name, "adamw"), dist.get_world_size()
    space = SearchSpace(min_unit_bytes=1024, share_units=False)
    plan = plan_for(module, "mixed", world_size=world_size, num_micro_batches=num_micro_batches, space=space)
    profile, taken, found = profile_of(module), set(), []
    own = {operator for unit in plan.units if unit.name for operator in unit.operators}
    for each in sorted(profile.exchanges, key=lambda each: -len(each.operators)):
        if each.kind in kinds and own.issuperset(each.operators) and taken.isdisjoint(each.operators):
            found.append((each.kind, each.operators))
            taken |= {*each.operators}
    plan = moving(plan, found, STATIONARY if node_size is None else NODE_STATIONARY)
    plan = dataclasses.replace(plan, node_size=node_size)
    predicted = simulate(plan, profile, dataclasses.replace(stated_cluster(world_size), node_size=node_size)).peak
    fit = trainer(OSDPStrategy(plan=plan, node_size=node_size), accumulate_grad_batches=num_micro_batches)
    module = build(name, "adamw")
    fit.fit(module, module.loader(dist.get_rank(), world_size))
    check = next(callback for callback in fit.callbacks if isinstance(callback, PlanMonitor))
    return predicted.peak_bytes, check.measured.peak_bytes, found


KINDS = pytest.mark.parametrize("kinds", [("column", "row"), ("pair",)])


@pytest.mark.parametrize("num_micro_batches", [slow(1), 3])
@KINDS
@pytest.mark.parametrize("name", ["wide_mlp", slow("wide_gpt"), "wide_gated"])
def test_peak_of_a_step_is_what_was_predicted(ranks, name, kinds, num_micro_batches):
    predicted, counted, found = ranks(2).run(
        predicted_and_counted_peak, name=name, kinds=kinds, num_micro_batches=num_micro_batches
    )[0]
    assert found
    assert predicted == pytest.approx(counted, rel=5e-3)


SHARED = {
    "wide_attention": [("column", ("query", "key", "value"))],
    "wide_attending": [
        ("attention", tuple(f"blocks.{index}.1.{name}" for name in ("query", "key", "value", "output")))
        for index in range(2)
    ],
    "wide_attending_of_one": [
        ("attention", tuple(f"blocks.{index}.1.{name}" for name in ("qkv", "output"))) for index in range(2)
    ],
    "wide_attending_by_head": [
        ("heads", tuple(f"blocks.{index}.1.{name}" for name in ("qkv", "output"))) for index in range(2)
    ],
    "wide_gated_by_one": [
        ("gated", tuple(f"blocks.{index}.2.{name}" for name in ("gate_up", "down"))) for index in range(2)
    ],
}
"""Exchanges of models in which three operators take one input, or one makes what three do."""


@pytest.mark.parametrize("name", SHARED)
@pytest.mark.parametrize(
    ("world_size", "num_micro_batches", "node_size"), [(2, 3, None), slow(2, 1, None), slow(4, 3, None), slow(4, 3, 2)]
)
def test_peak_of_operators_of_one_input_is_what_was_predicted(ranks, name, world_size, num_micro_batches, node_size):
    expected = SHARED[name]
    ((kind, _), *_) = expected
    name = "wide_attending_by_head" if kind == "gated" else name
    options = {"num_micro_batches": num_micro_batches, "node_size": node_size}
    ((predicted, counted, found), *_) = ranks(world_size).run(
        predicted_and_counted_peak, name=name, kinds=(kind,), **options
    )
    assert all(each in found for each in expected)
    assert predicted == pytest.approx(counted, rel=1e-2 if kind == "gated" else 5e-3)  # too high by 0.9% at most


@pytest.mark.slow
@KINDS
def test_peak_of_a_step_in_nodes_is_what_was_predicted(ranks, kinds):
    predicted, counted, found = ranks(4).run(
        predicted_and_counted_peak, name="wide_mlp", kinds=kinds, num_micro_batches=3, node_size=2
    )[0]
    assert found
    assert predicted == pytest.approx(counted, rel=5e-3)
