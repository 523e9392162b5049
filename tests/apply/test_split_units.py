"""Plans with slices: which units there are, what meta operators become, and what is refused."""

import dataclasses
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.testbed.groups import fake_group
from benchmarks.testbed.plans import plan_of
from lightning_osdp.apply import ShardedModel, apply_plan
from lightning_osdp.errors import ConfigurationError, PlanMismatchError, ProfileError
from tests.support.wrapped_units import units_of

CPU = torch.device("cpu")


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.block = nn.Embedding(9, 6), nn.Sequential(nn.Linear(6, 7), nn.LayerNorm(7))
        self.tied, self.head = nn.Linear(7, 6, bias=False), nn.Linear(6, 9, bias=False)
        self.head.weight = self.tokens.weight
        self.conv = nn.Conv1d(7, 7, 1)

    def forward(self, x):
        return self.head(self.tied(self.block(self.tokens(x))))


def split_plan(modes, world_size=1, module=None):
    return plan_of(module or Layers(), modes, world_size=world_size, micro_batch_size=1)


def test_slices_are_units_with_modes_of_their_own():
    with fake_group(2):
        root = apply_plan(Layers(), split_plan({"block.0": ("ZDP", "DP", "ZDP"), "tied": "ZDP"}, 2), device=CPU)
        found = units_of(root)
    assert {name: mode for name, (_, mode) in found.items() if name} == {
        "block.0.slices.0": "ZDP",
        "block.0.slices.1": "DP",
        "block.0.slices.2": "ZDP",
        "tied": "ZDP",
    }
    assert found["block.0.slices.2"][0] == ["block.0.slices.2.weight", "block.0.slices.2.bias"]


def test_all_slices_reduce_when_their_unit_does():
    plan = split_plan({"block.0": ("ZDP", "DP", "ZDP"), "tied": ("DP", "DP")}, 2)
    units = tuple(unit.treated(sync="last" if unit.name == "block.0" else "every") for unit in plan.units)
    plan = dataclasses.replace(plan, units=units)
    with fake_group(2):
        sharded = ShardedModel.planned(Layers(), plan, device=CPU)
        waiting = [unit.name for unit in sharded.units if unit.treatment["sync"] == "last"]
        assert waiting == [f"block.0.slices.{index}" for index in range(3)]


@pytest.mark.parametrize(
    ("modes", "error", "text"),
    [
        (
            {"conv": ("DP", "DP")},
            PlanMismatchError,
            "'conv' to be one that can be split into 2 slices, but this Conv1d",
        ),
        ({"tied": ("DP",) * 8}, PlanMismatchError, "'tied' to have a feature for each of its 8 slices, but it has 7"),
        ({"block": ("DP", "ZDP")}, ConfigurationError, "unit 'block' holds ['block.0', 'block.1']. Give it one slice"),
        ({"": ("DP", "ZDP")}, ConfigurationError, "Expected a unit with 2 slices to be one operator"),
    ],
)
def test_slices_that_cannot_be_are_refused(modes, error, text):
    model = Layers()
    with fake_group(1), pytest.raises(error, match=re.escape(text)):
        apply_plan(model, split_plan(modes), device=CPU)
    assert type(model.tied) is nn.Linear


def test_an_operator_that_shares_its_weight_is_refused():
    model = Layers()
    with fake_group(1), pytest.raises(PlanMismatchError, match="shares a parameter"):
        apply_plan(model, split_plan({"tokens": ("DP", "DP")}), device=CPU)


class Plain(nn.Module):
    """Operators whose values come from reset_parameters, one frozen."""

    def __init__(self):
        super().__init__()
        self.tokens, self.up = nn.Embedding(11, 8, padding_idx=2), nn.Linear(8, 10)
        self.norm, self.down = nn.LayerNorm(10), nn.Linear(10, 5, bias=False).requires_grad_(False)

    def forward(self, x):
        return self.down(self.norm(F.gelu(self.up(self.tokens(x)))))


def values(modes, known):
    with torch.device("meta"):
        model = Plain()
    for name in known:
        torch.manual_seed(5)
        setattr(model, name, nn.Linear(8, 10))
    torch.manual_seed(3)
    with fake_group(1):
        sharded = ShardedModel.planned(model, split_plan(modes, module=model), device=CPU)
        assert sharded.run(model.forward, torch.arange(4)).shape == (4, 5)
        return model, {name: value.full_tensor().clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("known", [(), ("up",)])
@pytest.mark.parametrize(("first", "second", "third"), [(2, 3, 4), (8, 8, 2), (1, 4, 1)])
def test_slices_of_meta_operators_get_what_the_whole_ones_would(first, second, third, known):
    _, expected = values({"tokens": "ZDP", "up": "DP", "down": "DP"}, known)
    modes = {"tokens": ("ZDP",) * first, "up": ("DP",) * second, "down": ("ZDP",) * third}
    model, found = values(modes, known)
    assert list(found) == list(expected)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert not any(p.requires_grad for name, p in model.named_parameters() if "down" in name)


class Resetting(nn.Module):
    """Module that initialises a child, too, which is sharded by then."""

    def __init__(self):
        super().__init__()
        self.fc, self.gain = nn.Linear(4, 4), nn.Parameter(torch.zeros(2))

    def reset_parameters(self):
        nn.init.zeros_(self.fc.weight)


def test_an_initialisation_that_reaches_for_slices_is_refused():
    with torch.device("meta"):
        model = Resetting()
    with fake_group(1), pytest.raises(ProfileError, match=r"'weight' of fc\.slices\.0, which is a unit of its own"):
        apply_plan(model, split_plan({"fc": ("DP", "DP")}, module=model), device=CPU)


def test_an_initialisation_of_the_callers_cannot_know_of_slices():
    with torch.device("meta"):
        model = Plain()
    with fake_group(1), pytest.raises(ConfigurationError, match="Expected no param_init_fn where Linear"):
        apply_plan(model, split_plan({"up": ("DP", "DP")}, module=model), device=CPU, param_init_fn=lambda module: None)
