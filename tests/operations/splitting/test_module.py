"""Split operators are whole ones to all who look at them: names, state, hooks, attributes."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.utils import parametrizations, parametrize

from benchmarks.testbed.groups import fake_group
from lightning_osdp.errors import ConfigurationError, ShardedParameterError
from lightning_osdp.operations.splitting import cut_dims, split, splittable
from lightning_osdp.operations.splitting.sharded import ShardedParameter
from tests.support.transposed import Conv1D

MAKERS = {
    "linear": lambda: nn.Linear(7, 5),
    "no_bias": lambda: nn.Linear(7, 5, bias=False),
    "transposed": lambda: Conv1D(5, 7),
    "embedding": lambda: nn.Embedding(5, 7),
}


@pytest.fixture(params=MAKERS)
def make(request):
    return MAKERS[request.param]


def state_of(module):
    return {name: value.clone() for name, value in module.state_dict().items()}


def same(a, b):
    return list(a) == list(b) and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("num_slices", [1, 2, 3, 7])
def test_names_shapes_and_values_are_those_of_the_whole_operator(make, num_slices):
    model = nn.Sequential(nn.LayerNorm(7), make(), nn.LayerNorm(5))
    before, operator = state_of(model), model[1]
    assert split(operator, num_slices) is operator
    assert same(state_of(model), before)
    assert torch.equal(operator.weight, before["1.weight"])
    assert [name for name, _ in operator.named_parameters()] == [
        *(f"slices.{index}.weight" for index in range(num_slices)),
        *([f"slices.{num_slices - 1}.bias"] if "1.bias" in before else []),
    ]


def test_any_number_of_slices_loads_from_any(make):
    state = state_of(make())
    for num_slices in (1, 3, 4):
        found = split(make(), num_slices)
        found.load_state_dict(state)
        assert same(state_of(found), state)
        state = {name: value + 1 for name, value in found.state_dict().items()}
    assigned = split(make(), 3)
    assigned.load_state_dict(state, assign=True)
    assert same(state_of(assigned), state)


def test_wrong_shapes_and_names_are_told_by_their_whole_names():
    model = nn.Sequential(split(nn.Linear(7, 5), 3))
    with pytest.raises(RuntimeError, match=r"size mismatch for 0\.weight: copying a param with shape \(5, 6\)"):
        model.load_state_dict({"0.weight": torch.zeros(5, 6), "0.bias": torch.zeros(5)})
    with pytest.raises(RuntimeError, match=r"Unexpected key\(s\) in state_dict: \"0\.extra\""):
        model.load_state_dict({**model.state_dict(), "0.extra": torch.zeros(1)})


def test_hooks_attributes_and_references_stay():
    linear = nn.Linear(6, 4)
    linear.note, linear.weight.no_decay = "mine", True
    holder, calls = [linear], []
    linear.register_forward_hook(lambda module, args, output: calls.append(args[0].shape))
    linear.eval()
    split(linear, 3)
    holder[0](torch.ones(2, 6))
    assert calls == [(2, 6)]
    assert (linear.note, linear.in_features, linear.out_features, linear.training) == ("mine", 6, 4, False)
    assert not linear.slices[1].training
    assert [part.in_features for part in linear.slices] == [2, 2, 2]
    assert all(part.weight.no_decay for part in linear.slices)
    assert "Linear of 6 features in 3 slices" in repr(linear)


@pytest.mark.parametrize("name", ["linear", "no_bias", "embedding"])
def test_split_operators_can_be_copied_and_pickled(name):
    module = split(MAKERS[name](), 3)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert same(state_of(other), state_of(module))
        assert other.slices[0].weight is not module.slices[0].weight


def test_the_usual_weight_decay_recipes_see_weights_and_biases():
    model = nn.Sequential(nn.Embedding(9, 6), split(nn.Linear(6, 4), 3), nn.LayerNorm(4), nn.Linear(4, 2))
    by_module = {
        f"{path}.{name}"
        for path, module in model.named_modules()
        for name, _ in module.named_parameters(recurse=False)
        if isinstance(module, nn.Linear) and name.endswith("weight")
    }
    by_name = {name for name, _ in model.named_parameters() if name.endswith("weight") and name[0] in "13"}
    by_shape = {name for name, parameter in model.named_parameters() if parameter.ndim >= 2} - {"0.weight"}
    assert by_module == by_name == by_shape == {*(f"1.slices.{index}.weight" for index in range(3)), "3.weight"}
    assert [name for name, _ in model.named_parameters() if name.endswith("bias")] == [
        "1.slices.2.bias",
        "2.bias",
        "3.bias",
    ]


def test_a_sharded_parameter_tells_its_metadata_and_where_to_read_its_values():
    linear = split(nn.Linear(6, 4).double(), 3)
    with fake_group(2):  # one slice is sharded, the others are gathered now
        piece = distribute_tensor(linear.slices[1].weight.data, init_device_mesh("cpu", (2,)), [Shard(0)])
    linear.slices[1].weight = nn.Parameter(piece)
    weight = linear.weight
    assert isinstance(weight, ShardedParameter)
    assert (weight.shape, weight.dtype, weight.device.type, weight.requires_grad) == (
        (4, 6),
        torch.float64,
        "cpu",
        True,
    )
    assert "ShardedParameter('weight', shape=(4, 6)" in repr(weight)
    for read in (
        lambda: weight + 1,
        weight.norm,
        weight.detach,
        lambda: weight[0],
        lambda: torch.equal(weight, weight),
    ):
        with pytest.raises(
            ShardedParameterError, match=r"Expected the whole 'weight' of a split operator.*Read it from"
        ):
            read()
    assert linear.bias.shape == (4,)


class Wide(nn.Linear):
    """A subclass may compute anything."""


def with_forward():
    linear = nn.Linear(4, 4)
    linear.forward = lambda x: x
    return linear


def with_parameter_hook():
    linear = nn.Linear(4, 4)
    linear.weight.register_hook(lambda gradient: gradient)
    return linear


def with_state_hook():
    linear = nn.Linear(4, 4)
    linear.register_load_state_dict_pre_hook(lambda *_: None)
    return linear


def with_buffer():
    linear = nn.Linear(4, 4)
    linear.register_buffer("mask", torch.ones(4))
    return linear


def with_wrong_weight():
    linear = nn.Linear(4, 4)
    linear.weight = nn.Parameter(torch.zeros(4, 5))
    return linear


@pytest.mark.parametrize(
    "module",
    [
        Wide(4, 4),
        nn.Conv2d(4, 4, 1),
        nn.LazyLinear(4),
        nn.Embedding(4, 4, max_norm=1.0),
        parametrizations.weight_norm(nn.Linear(4, 4)),
        parametrizations.orthogonal(nn.Linear(4, 4)),
        with_forward(),
        with_parameter_hook(),
        with_state_hook(),
        with_buffer(),
        with_wrong_weight(),
        nn.Sequential(),
    ],
)
def test_what_slices_would_change_is_not_split(module):
    assert splittable(nn.Sequential(module)) == {}
    with pytest.raises(ConfigurationError, match=r"Expected an operator that can be split.*Leave it whole\."):
        split(module, 2)


def test_more_slices_than_features_are_refused_and_nothing_is_changed():
    linear = nn.Linear(3, 4)
    with pytest.raises(ConfigurationError, match="between 1 and 3 slices"):
        split(linear, 4)
    assert type(linear) is nn.Linear
    assert linear(torch.ones(3)).shape == (4,)


def test_the_operators_of_a_model_that_can_be_split():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.tokens, self.positions = nn.Embedding(9, 8), nn.Embedding(5, 8)
            self.layer = nn.TransformerEncoderLayer(8, 2, 16)
            self.fc, self.same, self.conv = nn.Linear(8, 6), nn.Linear(6, 6), Conv1D(8, 6)
            self.fc_again = self.fc
            self.part_a, self.part_b = nn.Linear(6, 6), nn.Linear(6, 6)
            self.part_b.bias = self.part_a.bias
            self.head = nn.Linear(8, 9, bias=False)
            self.head.weight = self.tokens.weight
            self.normed = parametrize.register_parametrization(nn.Linear(6, 6), "weight", nn.Identity())

    model = Model()
    assert splittable(model) == {"positions": 8, "fc": 8, "same": 6, "conv": 6}
    assert splittable(nn.Linear(4, 4)) == {}
    assert [cut_dims(module) for module in (model.fc, model.conv, model.positions)] == [
        {"weight": 1},
        {"weight": 0},
        {"weight": 1},
    ]
