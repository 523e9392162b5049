"""The profiler on models as people write them: it understands them, and leaves them as they were."""

import functools
import random

import pytest
import torch

from lightning_osdp.profiler import profile_model
from tests.profiler.entangled_models import MODELS
from tests.profiler.wrapped import compare, gradients
from tests.support.tiers import but_slow


def measured(profile):
    """Returns all of a profile that a second one must repeat exactly: everything but times."""
    memory = [
        {name: value for name, value in vars(segment).items() if not name.endswith("_s")}
        for segment in profile.segments
    ]
    return profile.operators, memory, profile.spans


NAMES = but_slow(MODELS, slow=["Transformer"])


@pytest.mark.parametrize("name", NAMES)
def test_profiling_leaves_the_model_as_it_was(name):
    model = MODELS[name]()
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    flags = [module.training for module in model.modules()]
    attributes = {key: value for key, value in vars(model).items() if not key.startswith("_")}
    random.seed(5)
    states = torch.get_rng_state(), random.getstate()
    first, second = profile_model(model, model.batch()), profile_model(model, model.batch())
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert measured(first) == measured(second)
    after = model.state_dict()
    assert all(torch.equal(after[key], value) for key, value in before.items())
    assert [module.training for module in model.modules()] == flags
    assert {key: value for key, value in vars(model).items() if not key.startswith("_")} == attributes
    assert all(p.grad is None and not p._backward_hooks for p in model.parameters())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules() if "BatchNorm" not in repr(m))


@functools.cache
def profiled(name):
    """A model and its profile."""
    model = MODELS[name]()
    return model, profile_model(model, model.batch())


@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_counts_once(name):
    model, profile = profiled(name)
    parameters = list(model.parameters())
    assert sum(operator.parameter_bytes for operator in profile) == sum(
        p.numel() * p.element_size() for p in parameters
    )
    assert sum(operator.num_trainable for operator in profile) == sum(p.numel() for p in parameters if p.requires_grad)
    assert all(operator.enclosing[-1] == "" for operator in profile)
    positions = [parameter.position for operator in profile for parameter in operator.parameters]
    assert sorted(positions) == list(range(len(parameters)))


@pytest.mark.parametrize("name", MODELS)
def test_calls_lie_within_forward(name):
    _, profile = profiled(name)
    names = {operator.name for operator in profile} - {""}
    assert profile.loss.operator == ""
    assert {segment.operator for segment in profile.segments[:-1]} <= names
    assert names & set(profile.spans) == {segment.operator for segment in profile.segments[:-1]}
    for module, spans in profile.spans.items():
        assert module in names | {above for operator in profile for above in operator.enclosing}
        assert all(0 <= first <= last < len(profile.segments) - 1 for first, last in spans)
        assert list(spans) == sorted(spans)
    assert profile.saved_bytes.at(profile.profiled_batch_size) > 0


@pytest.mark.parametrize("name", MODELS)
def test_a_plan_from_the_profile_computes_the_same_gradients_on_one_rank(one_rank, name):
    difference, _ = compare(name, world_size=1)
    assert difference < 1e-6


def test_gradients_of_the_models_are_there():
    for model_class in MODELS.values():
        model = model_class()
        found, loss = gradients(model, lambda batch, model=model: model.training_step(batch, 0), model.batch())
        assert loss > 0
        assert any(gradient is not None and gradient.any() for gradient in found.values())
