"""The simulated peak against a count of live storages in real training steps."""

import dataclasses
from unittest import mock

import pytest
import torch.distributed as dist

from lightning_osdp import OSDPStrategy, SearchSpace
from lightning_osdp.callbacks import peak
from lightning_osdp.callbacks.plan_monitor import PlanMonitor
from lightning_osdp.planner.simulation import simulate
from tests.distributed.support.fits import plan_for, profile_of, stated_cluster, trainer
from tests.distributed.support.models import WideMLP, build
from tests.support.tiers import slow

pytestmark = pytest.mark.distributed


def predicted_and_counted_peak(name, optimizer, modes, num_micro_batches=1, prefetch="pre"):
    """Bytes that the simulator says a plan takes, and the peak that training steps were counted to take."""
    module, world_size = build(name, optimizer), dist.get_world_size()
    space = SearchSpace(min_unit_bytes=1024, share_units=False)
    plan = plan_for(module, modes, world_size=world_size, num_micro_batches=num_micro_batches, space=space)
    plan = dataclasses.replace(plan, backward_prefetch=prefetch)
    predicted = simulate(plan, profile_of(module), stated_cluster(world_size)).peak
    strategy = OSDPStrategy(plan=plan)
    fit = trainer(strategy, accumulate_grad_batches=num_micro_batches)
    module = build(name, optimizer)
    fit.fit(module, module.loader(dist.get_rank(), world_size))
    check = next(callback for callback in fit.callbacks if isinstance(callback, PlanMonitor))
    return predicted.peak_bytes, check.measured.peak_bytes, predicted.phase


@pytest.mark.parametrize("prefetch", ["pre", slow("none")])
@pytest.mark.parametrize("num_micro_batches", [slow(1), 3])
@pytest.mark.parametrize("modes", ["zdp", "dp", "mixed"])
@pytest.mark.parametrize("name", ["wide_mlp", slow("wide_gpt")])
def test_peak_of_a_step_is_what_was_predicted(ranks, name, modes, num_micro_batches, prefetch):
    predicted, counted, _ = ranks(2).run(
        predicted_and_counted_peak,
        name=name,
        optimizer="adamw",
        modes=modes,
        num_micro_batches=num_micro_batches,
        prefetch=prefetch,
    )[0]
    assert predicted == pytest.approx(counted, rel=2e-3)


@pytest.mark.parametrize("world_size", [1, slow(4)])
@pytest.mark.parametrize("name", ["wide_mlp", "tied_gpt"])
def test_peak_on_one_rank_and_on_four(ranks, world_size, name):
    predicted, counted, _ = ranks(world_size).run(
        predicted_and_counted_peak, name=name, optimizer="sgd", modes="mixed"
    )[0]
    assert predicted == pytest.approx(counted, rel=2e-3)


def test_optimizer_temporaries_can_be_the_peak(ranks):
    predicted, counted, phase = ranks(1).run(
        predicted_and_counted_peak, name="wide_mlp", optimizer="adamw", modes="zdp"
    )[0]
    assert phase == "optimizer step"
    assert predicted == pytest.approx(counted, rel=2e-3)


class Based(WideMLP):
    """Wide layers that are frozen, between a trained first and a trained last one."""

    def __init__(self, optimizer="adamw"):
        super().__init__(optimizer)
        for layer in self.layers[1:-1]:
            layer.requires_grad_(False)


def predicted_and_counted_residence(num_resident, num_micro_batches, together):
    """Bytes in the first steps and in later ones, predicted and counted, where so many frozen layers are resident."""
    world_size, space = dist.get_world_size(), SearchSpace(min_unit_bytes=1024, share_units=False)
    plan = plan_for(Based(), "mixed", world_size=world_size, num_micro_batches=num_micro_batches, space=space)
    chosen = ["layers.3", "layers.1", "layers.2"][:num_resident]
    units = [unit.treated(keep="always") if unit.name in chosen else unit for unit in plan.units]
    if together:
        name, names = min(chosen), tuple(sorted(chosen))
        one = dataclasses.replace(units[[unit.name for unit in units].index(name)], operators=names, modules=names)
        units = [one if unit.name == name else unit for unit in units if unit.name not in names[1:]]
    plan = dataclasses.replace(plan, units=tuple(units))
    predicted = simulate(plan, profile_of(Based()), stated_cluster(world_size))
    counted = []
    for warm_up in (0, peak.WARM_UP_STEPS):
        with mock.patch.object(peak, "WARM_UP_STEPS", warm_up):
            fit = trainer(OSDPStrategy(plan=plan), accumulate_grad_batches=num_micro_batches)
            module = Based()
            fit.fit(module, module.loader(dist.get_rank(), world_size))
        check = next(callback for callback in fit.callbacks if isinstance(callback, PlanMonitor))
        counted.append(check.measured.peak_bytes)
    gathered = sum(len(list(Based().get_submodule(name).parameters())) for name in chosen)  # one after the other
    steady = max(moment.num_bytes for _, moment in predicted.moments[gathered:])
    return predicted.peak.peak_bytes, steady, predicted.peak.parts["optimizer state"], counted


@pytest.mark.parametrize(
    ("num_resident", "num_micro_batches", "together"),
    [slow(1, 1, False), slow(3, 1, False), slow(3, 1, True), (3, 3, False)],
)
def test_peak_of_resident_units_is_what_was_predicted_from_the_first_step_on(
    ranks, num_resident, num_micro_batches, together
):
    largest, steady, state, counted = ranks(2).run(
        predicted_and_counted_residence,
        num_resident=num_resident,
        num_micro_batches=num_micro_batches,
        together=together,
    )[0]
    first, later = counted
    assert steady == pytest.approx(later, rel=2e-3)
    # the first step of all has no states yet, as that of a fit that goes on has
    assert first * 0.998 <= largest <= max(first + state, later) * 1.002


def predicted_and_counted_replicas(num_micro_batches, sync, number):
    """Bytes in later steps, predicted and counted, where every so many-th unit is whole on each rank."""
    world_size, space = dist.get_world_size(), SearchSpace(min_unit_bytes=1024, share_units=False)
    module = build("wide_mlp", "adamw")
    plan = plan_for(module, "mixed", world_size=world_size, num_micro_batches=num_micro_batches, space=space)
    units = [
        unit.treated(home="one", keep="nothing", sync=sync) if unit.name and place % number == 0 else unit
        for place, unit in enumerate(plan.units)
    ]
    plan = dataclasses.replace(plan, units=tuple(units))
    predicted = simulate(plan, profile_of(module), stated_cluster(world_size)).peak
    fit = trainer(OSDPStrategy(plan=plan), accumulate_grad_batches=num_micro_batches)
    module = build("wide_mlp", "adamw")
    fit.fit(module, module.loader(dist.get_rank(), world_size))
    check = next(callback for callback in fit.callbacks if isinstance(callback, PlanMonitor))
    return predicted.peak_bytes, check.measured.peak_bytes, predicted.parts


@pytest.mark.parametrize(
    ("num_micro_batches", "sync", "number"),
    [slow(1, "every", 1), slow(1, "every", 2), (3, "every", 2), slow(3, "last", 1), slow(3, "last", 2)],
)
def test_peak_of_replicated_units_is_what_was_predicted(ranks, num_micro_batches, sync, number):
    predicted, counted, parts = ranks(2).run(
        predicted_and_counted_replicas, num_micro_batches=num_micro_batches, sync=sync, number=number
    )[0]
    assert predicted == pytest.approx(counted, rel=2e-3), parts
