"""Ranks whose losses depend on other operators that move activations: equal to DDP, or an error on all ranks."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from lightning_osdp import OSDPStrategy
from lightning_osdp.core.axes import Treatment
from lightning_osdp.core.plans.parts import Block
from lightning_osdp.operations.stationary import is_stationary
from tests.distributed.stationary.test_training import EXCHANGES, refused, stationary_plan
from tests.distributed.support.user_runs import WIDTH, Chain, ddp, difference, fitted, moved
from tests.support.tiers import slow

pytestmark = pytest.mark.distributed

CHECKED = 2
"""Steps in which ranks report all collectives beforehand."""


class Auxiliary(nn.Module):
    """A pair, a unit whose weights move, and a layer."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x, *, ends=True):
        features = torch.tanh(self.up(x))
        return self.head(self.norm(self.down(features) if ends else x))


class Branching(Chain):
    """Has a head whose output only some ranks put into their loss, after the first steps, and in one step none.

    Args:
        part: name of what a rank leaves out of its loss, or does with the head.
    """

    def __init__(self, optimizer="adamw", *, part="head"):
        super().__init__(optimizer)
        self.part, self.aux = part, Auxiliary()

    def loss(self, batch):
        x, y = (tensor.to(self.scale.dtype) for tensor in batch)
        hidden = self.norm(self.features(x))
        told, step = self.last(hidden) * self.scale, len(self.found)
        is_other = step > CHECKED and (step + dist.get_rank()) % 2 == 1
        if self.part == "detached":
            hidden = hidden.detach() if is_other else hidden
        with torch.no_grad() if self.part == "no_grad" and is_other else nullcontext():
            aux = self.aux(hidden, ends=self.part != "end" or not is_other)
        loss = F.mse_loss(told, y)
        if self.part == "asked":
            torch.autograd.grad(told.sum() if is_other else hidden.sum(), hidden, retain_graph=True)
        if self.part in ("head", "block") and (is_other or step == 2 * CHECKED + 2):
            return loss
        if self.part == "last":  # and all that is after it
            return hidden.square().mean() if is_other else loss
        return loss + F.mse_loss(aux, y)


EXCHANGES[Branching] = [*EXCHANGES[Chain], ("pair", ("aux.up", "aux.down")), ("column", ("aux.head",))]


def trained(part, **options):
    """Difference from DDP, and how far weights moved."""
    make, number = partial(Branching, part=part), options.get("accumulate_grad_batches", 1)
    expected = fitted(ddp(find_unused_parameters=True), make(), max_steps=7 // number, **options)
    plan = stationary_plan(make, num_micro_batches=number)
    own = fitted(OSDPStrategy(plan=plan, dry_run=True), make(), max_steps=7 // number, **options)
    assert sum(is_stationary(child) for child in own[2].lightning_module.modules()) == 7
    return difference(own, expected), moved(expected[0], make)


def equal():
    found = {part: trained(part) for part in ("head", "last", "detached")}
    return {**found, "accumulated": trained("head", accumulate_grad_batches=2)}


@pytest.mark.parametrize("world_size", [2, slow(4)])
def test_ranks_whose_losses_leave_operators_out_train_as_under_ddp(ranks, world_size):
    for found in ranks(world_size).run(equal):
        for part, (off, far) in found.items():
            assert off < 1e-9, part
            assert far > 1e-3, part


def refusals():
    """Errors, by what ranks do otherwise."""
    found = {}
    for part in ("no_grad", "asked", "block", "end"):
        make = partial(Branching, part=part)
        blocks = [Block(name="aux", treatment=Treatment(saves="recompute"))] if part == "block" else []
        found[part] = refused(stationary_plan(make, "dp", blocks=blocks), make)
    return found


TEXTS = {
    "no_grad": "Expected all ranks or none to call an operator that moves activations under torch.no_grad",
    "asked": "Expected every rank to run the same modules in the same order",
    "block": "Expected backward to come to the same modules on every rank",
    "end": "Expected every rank to run the same modules in the same order",
}


def test_ranks_that_cannot_take_part_are_an_error_on_all_ranks(ranks):
    for found in ranks(2).run(refusals):
        for part, text in TEXTS.items():
            assert found[part] is not None, part
            assert found[part].startswith(f"RanksApartError: {text}"), (part, found[part])
            assert "SearchSpace(modes=('ZDP', 'DP'))" in found[part]


class Projecting(Chain):
    """Has three operators that take one input, of which only some ranks do otherwise, after the first steps.

    Args:
        part: what they do with them: ask for the gradient of another one, learn from a slope, or call two in another
            order; or call two of them for two inputs in another order, which is right for each rank by itself.
    """

    def __init__(self, optimizer="adamw", *, part="asked"):
        super().__init__(optimizer)
        self.part = part
        self.query, self.key, self.value = nn.Linear(WIDTH, 3), nn.Linear(WIDTH, 3), nn.Linear(WIDTH, 3)

    def loss(self, batch):
        x, y = (tensor.to(self.scale.dtype) for tensor in batch)
        hidden = self.norm(self.features(x))
        is_other = len(self.found) > CHECKED and dist.get_rank() == 1
        if self.part == "order":
            first, second = (self.key, self.query) if is_other else (self.query, self.key)
            made = first(hidden) * second(hidden) * self.value(hidden)
            return F.mse_loss(made + self.last(hidden) * self.scale, y)
        if self.part == "inputs":
            other = torch.tanh(hidden)
            queries = [self.query(each) for each in (hidden, other)]
            keys = [self.key(each) for each in ((other, hidden) if is_other else (hidden, other))]
            mixed = queries[0] * queries[1] * keys[0] * keys[1]
            return F.mse_loss(mixed * self.value(hidden) * self.value(other) + self.last(hidden) * self.scale, y)
        query, key, value = self.query(hidden), self.key(hidden), self.value(hidden)
        if self.part == "slope":
            loss = F.mse_loss(query * key * value + self.last(hidden) * self.scale, y)
            (slope,) = torch.autograd.grad(query.square().sum(), hidden, create_graph=True)
            return loss + slope.square().mean() if is_other else loss
        torch.autograd.grad((key if is_other else query).sum(), hidden, retain_graph=True)
        return F.mse_loss(query * key * value + self.last(hidden) * self.scale, y)


EXCHANGES[Projecting] = [*EXCHANGES[Chain], ("column", ("query", "key", "value"))]


def of_columns():
    """Errors of columns of one input, by what ranks do otherwise, and the difference from DDP of what is right."""
    errors = {}
    for part in ("asked", "order", "slope"):
        make = partial(Projecting, part=part)
        errors[part] = refused(stationary_plan(make, "dp"), make)
    make = partial(Projecting, part="inputs")
    expected = fitted(ddp(), make(), max_steps=6)
    own = fitted(OSDPStrategy(plan=stationary_plan(make), dry_run=True), make(), max_steps=6)
    return errors, difference(own, expected), moved(expected[0], make)


def test_columns_of_one_input_tell_ranks_apart_and_take_inputs_in_any_order(ranks):
    for errors, off, far in ranks(2).run(of_columns):
        for part in ("asked", "slope"):
            assert errors[part].startswith("RanksApartError: Expected every rank to run the same modules"), part
        assert "several of one input in another order" in errors["order"]
        assert off < 1e-9
        assert far > 1e-3
