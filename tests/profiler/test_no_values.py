import copy

import pytest
import torch
from torch import nn

from lightning_osdp.profiler import without_values


@pytest.fixture
def model():
    found = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3, bias=False))
    found[2].weight = found[0].weight
    found[0].bias.requires_grad_(False)
    found[0].weight.no_decay = True
    return found


def test_shapes_ties_and_marks_stand_for_the_values(model):
    expected = [(name, p.shape, p.dtype, p.requires_grad) for name, p in model.named_parameters(remove_duplicate=False)]
    with without_values(model):
        found = list(model.named_parameters(remove_duplicate=False))
        assert [(name, p.shape, p.dtype, p.requires_grad) for name, p in found] == expected
        assert all(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
        assert model[2].weight is model[0].weight
        assert model[0].weight.no_decay


def test_the_values_are_the_same_objects_afterwards_even_after_an_error(model):
    before, values = dict(model.state_dict(keep_vars=True)), copy.deepcopy(model.state_dict())
    with pytest.raises(ZeroDivisionError), without_values(model):
        raise ZeroDivisionError
    after = model.state_dict(keep_vars=True)
    assert all(after[name] is tensor for name, tensor in before.items())
    assert all(torch.equal(after[name], value) for name, value in values.items())
