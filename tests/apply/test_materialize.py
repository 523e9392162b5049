import re

import pytest
import torch
from torch import nn

from lightning_osdp.apply.preparing.initialize import unit_initializer
from lightning_osdp.errors import ProfileError
from tests.support.wrapped_units import Nested

CPU = torch.device("cpu")


def initialised(module, seed=0):
    torch.manual_seed(seed)
    unit_initializer(module, CPU)(module)
    return module


def on_meta(make):
    with torch.device("meta"):
        return make()


class Affine(nn.Module):
    """Module of which one parameter may have values already, when ``reset_parameters`` sets all to one."""

    def __init__(self):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.empty(3)), nn.Parameter(torch.empty(3))

    def reset_parameters(self):
        nn.init.ones_(self.weight)
        nn.init.ones_(self.bias)


class Parent(nn.Module):
    """Module that initialises its child once more, as its constructor would."""

    def __init__(self):
        super().__init__()
        self.child = Affine()
        self.gain = nn.Parameter(torch.empty(1))

    def reset_parameters(self):
        nn.init.zeros_(self.gain)
        nn.init.constant_(self.child.bias, 7.0)


class Bare(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(1))


def test_a_model_with_values_is_left_alone():
    model, state = Nested(), torch.get_rng_state()
    before = list(model.parameters())
    assert unit_initializer(model, CPU) is None
    assert all(a is b for a, b in zip(model.parameters(), before, strict=True))
    assert torch.equal(torch.get_rng_state(), state)


def test_values_that_a_module_has_are_kept_and_are_the_same_objects():
    module = on_meta(Affine)
    module.weight = kept = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
    initialised(module)
    assert module.weight is kept
    assert module.weight.tolist() == [1.0, 2.0, 3.0]
    assert module.bias.tolist() == [1.0, 1.0, 1.0]


def test_the_first_owner_of_a_tied_parameter_initialises_it():
    module = on_meta(lambda: nn.Sequential(nn.Embedding(500, 4), nn.Linear(4, 500)))
    module[1].weight = module[0].weight
    initialised(module)
    assert module[1].weight is module[0].weight
    assert module[0].weight.std().item() == pytest.approx(1.0, abs=0.1)
    assert module[1].bias.abs().max() <= 0.5


def test_a_parent_has_the_last_word():
    module = initialised(on_meta(Parent))
    assert module.child.weight.tolist() == [1.0] * 3
    assert module.child.bias.tolist() == [7.0] * 3
    assert module.gain.tolist() == [0.0]


def test_the_seed_decides_and_equal_modules_differ():
    models = [on_meta(lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))) for _ in range(3)]
    first, again, other = (initialised(model, seed) for model, seed in zip(models, (1, 1, 2), strict=True))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert not torch.equal(first[0].weight, other[0].weight)
    assert not torch.equal(first[0].weight, first[2].weight)


def test_what_may_be_frozen_stays_frozen_and_a_recurrent_layer_uses_its_new_weights():
    module = on_meta(lambda: nn.LSTM(3, 3))
    module.weight_ih_l0.requires_grad_(False)
    initialised(module)
    assert not module.weight_ih_l0.requires_grad
    assert module(torch.ones(2, 3))[0].device == CPU


@pytest.mark.parametrize(
    ("make", "name"), [(lambda: nn.Sequential(Bare()), "0 (Bare)"), (Bare, "the model itself (Bare)")]
)
def test_a_module_that_cannot_initialise_itself_is_named(make, name):
    module = on_meta(make)
    with pytest.raises(ProfileError, match=re.escape(name)):
        unit_initializer(module, CPU)
    assert all(parameter.is_meta for parameter in module.parameters())
