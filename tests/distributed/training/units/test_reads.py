"""Units of which backward reads no weights are not gathered for it; where a step reads them all the same, they are."""

import dataclasses

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from lightning_osdp import apply_plan
from lightning_osdp.core.axes import Treatment
from lightning_osdp.core.plans.parts import Block
from tests.distributed.support.fits import plan_for
from tests.distributed.support.models import Base
from tests.distributed.training.units.test_resident import STEPS, Gathers, differs, ran
from tests.support.tiers import slow

pytestmark = pytest.mark.distributed

WIDTH = 12


class First(nn.Linear):
    """A Linear that gets the batch, with what makes backward read its weight if it is told to."""

    reads = False

    def forward(self, x):
        hidden = super().forward(x)
        return hidden * self.weight.square().sum() if self.reads else hidden


class Tables(Base):
    """A Linear and embeddings whose inputs need no gradient, among what backward reads; one is called twice."""

    differentiates = False

    def __init__(self, optimizer="adamw"):
        super().__init__(optimizer)
        self.table, self.first = nn.Embedding(7, WIDTH), First(5, WIDTH)
        self.body = nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(2)])
        self.again = nn.Embedding(7, WIDTH)
        self.head = nn.Linear(WIDTH, 3)

    def loss(self, batch):
        x, y = (each.to(self.head.weight.dtype) for each in batch)
        if self.differentiates and self.global_step >= 2:
            x = x.requires_grad_()
        tokens = batch[0].abs().mul(2).long().clamp(max=6)
        hidden = self.first(x) + self.table(tokens[:, 0])
        for place, layer in enumerate(self.body):
            hidden = layer(hidden) + self.again(tokens[:, 1 + place])
        return F.mse_loss(self.head(hidden).float(), y.float())

    def dataset(self):
        generator = torch.Generator().manual_seed(1)
        return TensorDataset(torch.randn(160, 5, generator=generator), torch.randn(160, 3, generator=generator))


class Differentiating(Tables):
    """Tables whose batch has gradients from the third step on, for which backward reads the first weight."""

    differentiates = True


def made(kind=Tables, dtype=torch.float64):
    return kind().to(dtype)


def planned(modes="zdp", dtype=torch.float64, **options):
    return plan_for(made(dtype=dtype), modes, world_size=dist.get_world_size(), **options)


def trains_like_ddp(kind, modes, num_micro_batches, recomputes):
    """Difference from DDP, units that are said to be unread, and how often these and others are gathered."""
    plan = planned(modes, num_micro_batches=num_micro_batches)
    if recomputes:
        plan = dataclasses.replace(plan, blocks=(Block(name="first", treatment=Treatment(saves="recompute")),))
    options, module = {"accumulate_grad_batches": num_micro_batches}, made(kind)
    with Gathers() as gathers:
        _, found = ran(module, plan, **options)
    _, expected = ran(made(kind), **options)
    unread = [unit.name for unit in plan.units if not unit.is_read]
    return differs(found, expected), unread, gathers.of(module, ["first", "body.0.0", "again", "table"])


@pytest.mark.parametrize(
    ("number", "kind", "modes", "num_micro_batches", "recomputes", "expected"),
    [
        (2, Tables, "zdp", 1, False, [STEPS, 2 * STEPS, 2 * STEPS, STEPS]),
        (2, Tables, "zdp", 3, False, [3 * STEPS, 6 * STEPS, 6 * STEPS, 3 * STEPS]),
        (2, Tables, "zdp", 1, True, [2 * STEPS, 2 * STEPS, 2 * STEPS, STEPS]),
        (2, Differentiating, "zdp", 1, False, [2 + 2 * (STEPS - 2), 2 * STEPS, 2 * STEPS, STEPS]),
        slow(4, Tables, "mixed", 2, False, None),
    ],
)
def test_what_backward_does_not_read_is_gathered_in_forward_alone(
    ranks, number, kind, modes, num_micro_batches, recomputes, expected
):
    given = {"kind": kind, "modes": modes, "num_micro_batches": num_micro_batches, "recomputes": recomputes}
    for apart, unread, gathered in ranks(number).run(trains_like_ddp, **given):
        assert (apart < 1e-12, sorted(unread)) == (True, ["again", "first", "table"])
        assert expected is None or gathered == expected


def trains_in_low_precision():
    """Tells if losses in bf16 stay the same where backward leaves units alone of which autocast saves copies."""
    plan = planned(dtype=torch.float32)
    every = dataclasses.replace(plan, units=tuple(dataclasses.replace(unit, is_read=True) for unit in plan.units))
    losses = []
    for each in (plan, every):
        module = made(dtype=torch.float32)
        ran(module, each, precision="bf16-mixed")
        losses.append(module.losses)
    return losses[0] == losses[1]


def test_in_low_precision_nothing_is_read_that_is_not_gathered(ranks):
    assert all(ranks(2).run(trains_in_low_precision))


def reads_what_it_should_not():
    """The error of a backward that reads what no profile has seen it read."""
    module = made()
    apply_plan(module, planned(), device=torch.device("cpu"))
    module.first.reads = True
    batch = next(iter(module.loader(dist.get_rank(), dist.get_world_size())))
    try:
        module.loss(batch).backward()
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_weight_that_is_read_against_all_expectation_is_an_error(ranks):
    for told in ranks(2).run(reads_what_it_should_not):
        assert "modified by an inplace operation" in told


def together():
    """Difference from DDP where two modules that backward does not read are one unit, and how often it is gathered."""
    plan = planned()
    units = {unit.name: unit for unit in plan.units}
    table, first = units.pop("table"), units.pop("first")
    joined = dataclasses.replace(
        first,
        operators=(*first.operators, *table.operators),
        modules=("first", "table"),
        parameter_bytes=first.parameter_bytes + table.parameter_bytes,
        gradient_bytes=None,
        menu=(),
    )
    names = ["", "first", *(name for name in units if name)]
    plan = dataclasses.replace(plan, units=tuple(({**units, "first": joined})[name] for name in names))
    module = made()
    with Gathers() as gathers:
        _, found = ran(module, plan)
    _, expected = ran(made())
    return differs(found, expected), gathers.of(module, ["first"])


def test_a_unit_of_several_modules_is_gathered_in_forward_alone(ranks):
    for apart, gathered in ranks(2).run(together):
        assert (apart < 1e-12, gathered) == (True, [STEPS])
