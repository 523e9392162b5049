"""One step of a model under a plan made from its profile, and of the plain model."""

import random

import torch

from lightning_osdp.apply import ShardedModel
from lightning_osdp.core.axes import NAMED_MODES, named
from lightning_osdp.core.plans.parts import Unit
from lightning_osdp.core.units import partition
from lightning_osdp.profiler import fingerprint, profile_model
from tests.profiler.entangled_models import MODELS
from tests.support.plans import bare_plan


def plan_of(profile, world_size, modes=("ZDP",), min_unit_bytes=0):
    """A plan with every operator in a unit of its own where that is possible, and these modes in turn."""
    units = partition(profile, min_unit_bytes=min_unit_bytes)
    return bare_plan(
        (
            Unit(
                name=unit.name,
                operators=tuple(operator.name for operator in unit.operators),
                kind=unit.kind,
                treatments=named(modes[index % len(modes)]),
            )
            for index, unit in enumerate(units)
        ),
        fingerprint=profile.fingerprint,
        world_size=world_size,
        memory_limit_bytes=2**40,
        micro_batch_size=4,
        node_size=2 if any(NAMED_MODES[mode].needs_nodes for mode in modes) else None,
    )


def gradients(model, step, batch):
    """Loss and gradient by parameter name of one step from the same random state."""
    torch.manual_seed(3)
    random.seed(3)
    returned = step(batch)
    loss = returned["loss"] if isinstance(returned, dict) else returned
    loss.backward()
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}, loss.item()


def whole(root):
    """Weights and gradients by name, whole and in memory of their own; None for a parameter without a gradient."""
    named = dict(root.named_parameters())
    weights = {name: parameter.detach().full_tensor().clone() for name, parameter in named.items()}
    return weights, {name: None if p.grad is None else p.grad.full_tensor().clone() for name, p in named.items()}


def compare(name, world_size, modes=("ZDP",)):
    """Largest difference of loss and gradients from the plain model's, relative to the largest gradient; unit names."""
    expected, expected_loss = gradients(
        plain := MODELS[name](), lambda batch: plain.training_step(batch, 0), plain.batch()
    )
    model = MODELS[name]()
    plan = plan_of(profile_model(model, model.batch(), activations=("keep",)), world_size, modes)
    assert plan.fingerprint == fingerprint(model)
    sharded = ShardedModel.planned(model, plan, device=torch.device("cpu"))
    _, loss = gradients(model, lambda batch: sharded.run(model.training_step, batch, 0), model.batch())
    difference = abs(loss - expected_loss) / abs(expected_loss)
    _, found = whole(model)
    scale = max(float(gradient.abs().max()) for gradient in expected.values() if gradient is not None)
    assert list(found) == list(expected)
    for key, gradient in expected.items():
        other = found[key] if found[key] is not None else torch.zeros(())
        difference = max(difference, float((other - (0 if gradient is None else gradient)).abs().max()) / scale)
    return difference, [unit.name for unit in plan.units]
