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
