"""Models of which torch compiles a part, or all, train as under DDP."""

import dataclasses
import shutil
import tempfile
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from lightning_osdp import OSDPPrecision, OSDPStrategy
from lightning_osdp.core.axes import Treatment
from lightning_osdp.core.plans.parts import Block
from tests.distributed.support.fits import EVERYTHING, trainer, without_measuring
from tests.distributed.support.models import Base, OddMLP
from tests.distributed.support.user_runs import (
    TOLERANCE,
    check,
    ddp,
    difference,
    differences,
    fitted,
    plan_with,
    refusal,
)
from tests.support.tiers import slow

pytestmark = pytest.mark.distributed


class Body(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(7, 12), nn.LayerNorm(12), nn.Linear(12, 7)

    def forward(self, x):
        return x + self.down(torch.tanh(self.norm(self.up(x))))


class Compiled(Base):
    """Two blocks, of which the first, or both, are compiled; or all of it in place."""

    def __init__(self, optimizer="adamw", *, how="first", units=None, **options):
        super().__init__(optimizer)
        self.blocks = nn.ModuleList([Body(), Body()])
        self.last = nn.Linear(7, 3)
        self.scale = nn.Parameter(torch.ones(1))
        if units is not None:
            self.units = units
        if how in {"first", "both"}:
            for place in range(1 + (how == "both")):
                self.blocks[place] = torch.compile(self.blocks[place], **options)
        elif how == "first in place":
            self.blocks[0].compile(**options)
        elif how == "both in place":
            for block in self.blocks:
                block.compile(**options)
        elif how == "all in place":
            self.compile(**options)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.last(x) * self.scale

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        self.found.append(loss.detach().clone())
        return loss

    def loss(self, batch):
        x, y = (tensor.to(self.scale.dtype) for tensor in batch)
        return F.mse_loss(self(x), y)

    def dataset(self):
        return OddMLP().dataset()


AROUND = ("blocks.0", "blocks.1", "last")
"""Units whose hooks are outside of what is compiled."""


def given_plans(how, backend, places):
    """Differences from DDP under plans whose units are inside of compiled blocks, or around them."""
    options, found = {"how": how, "backend": backend}, {}
    plans = {"inside": ({}, ("mixed",)), "around": ({"units": AROUND}, ("zdp",))}
    for place in places:
        torch._dynamo.reset()
        more, kinds = plans[place]
        found[place] = differences(partial(Compiled, **options, **more), kinds, max_steps=7)
    return found


def around(backend):
    """Differences from DDP where whole blocks are units, compiled whole."""
    torch._dynamo.reset()
    make = partial(Compiled, how="both", backend=backend, fullgraph=True, units=AROUND)
    return {backend: differences(make, ("mixed",), max_steps=7, val_check_interval=2, limit_val_batches=1)}


@without_measuring
def planned(how, **options):
    """Difference from DDP under a plan that is made, names of its units, and what it says."""
    torch._dynamo.reset()
    make = partial(Compiled, how=how, backend="eager", **options)
    own = fitted(OSDPStrategy(search_space=EVERYTHING), make(), max_steps=3)
    plan = own[2].strategy.plan
    return difference(own, fitted(ddp(), make(), max_steps=3)), [unit.name for unit in plan.units], plan.notes


def refused():
    """Returns errors of plans with a unit inside what is compiled whole, and of one with a block there."""
    found = []
    for how in ("both", "first in place"):
        make = partial(Compiled, how=how, backend="eager", fullgraph=True)
        strategy = OSDPStrategy(plan=plan_with(make, "mixed"))
        found.append(refusal(partial(fitted, strategy, make())))
    make = partial(Compiled, how="all in place", backend="eager", fullgraph=True)
    blocks = (Block(name="blocks.0", treatment=Treatment(saves="recompute")),)
    strategy = OSDPStrategy(plan=dataclasses.replace(plan_with(make, "mixed"), blocks=blocks))
    return found, refusal(partial(fitted, strategy, make()))


def resumed():
    """Differences from DDP where training goes on from a checkpoint of the other strategy, and from its own."""
    torch._dynamo.reset()
    make, folder = partial(Compiled, how="first", backend="eager"), [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    plan = plan_with(make, "mixed")
    strategies = {"ddp": ddp, "osdp": lambda: OSDPStrategy(plan=plan)}
    paths = {name: Path(folder[0], f"{name}.ckpt") for name in strategies}
    for name, strategy in strategies.items():
        fitted(strategy(), make(), max_steps=3)[2].save_checkpoint(paths[name])
    pairs = [(name, saver) for name in strategies for saver in strategies]
    found = [fitted(strategies[name](), make(), ckpt_path=paths[saver]) for name, saver in pairs]
    return [difference(each, found[0]) for each in found]


@without_measuring
def by_lightning(backend):
    """Difference from DDP of a compiled LightningModule under a plan that is made, and what it says."""
    torch._dynamo.reset()

    def run(strategy):
        is_ours = isinstance(strategy, OSDPStrategy)
        options = {"plugins": [OSDPPrecision("64-true")]} if is_ours else {"precision": "64-true"}
        module = Compiled(how="not").double()
        loader = module.loader(dist.get_rank(), dist.get_world_size())
        fit = trainer(strategy, max_steps=3, **options)
        fit.fit(torch.compile(module, backend=backend), loader)
        weights = fit.strategy.lightning_module_state_dict()
        return {name: weights[name].detach().clone() for name in sorted(weights)}, module.losses, fit

    by_ddp, own = run(ddp()), run(OSDPStrategy(search_space=EVERYTHING))
    return difference(own, by_ddp), own[2].strategy.plan.notes


PLACES = ["inside", "around"]


@pytest.mark.parametrize(
    ("how", "backend", "places"),
    [
        slow("first", "aot_eager", PLACES),
        slow("first in place", "eager", PLACES),
        slow("all in place", "eager", PLACES),
    ],
)
def test_compiled_modules_train_under_plans(ranks, how, backend, places):
    check(ranks(2).run(given_plans, how=how, backend=backend, places=places)[0])


@pytest.mark.parametrize(
    "backend",
    [
        slow("eager"),
        pytest.param(
            "inductor",
            marks=[
                pytest.mark.slow,
                pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler"),
            ],
        ),
    ],
)
def test_blocks_that_are_compiled_whole_are_units(ranks, backend):
    check(ranks(2).run(around, backend=backend)[0])


@pytest.mark.slow
def test_a_plan_is_made_of_compiled_blocks_and_says_how_they_were_timed(ranks):
    apart, units, notes = ranks(2).run(planned, how="both")[0]
    assert apart < TOLERANCE
    assert "blocks.0._orig_mod.up" in units
    assert "blocks.0._orig_mod" not in units
    (note,) = notes
    assert note.startswith("'blocks.0', 'blocks.1': profiled as eager code")


@pytest.mark.parametrize("how", [slow("both"), "both in place"])
def test_a_block_that_is_compiled_whole_is_one_unit(ranks, how):
    apart, units, _ = ranks(2).run(planned, how=how, fullgraph=True)[0]
    assert apart < TOLERANCE
    assert units == ["", "blocks.0", "blocks.1", "last"]


def test_units_and_blocks_inside_of_what_is_compiled_whole_are_refused(ranks):
    units, block = ranks(2).run(refused)[0]
    for told in units:
        assert told.startswith(
            "ConfigurationError: Expected no unit inside 'blocks.0', which is compiled with fullgraph"
        )
    assert block.startswith(
        "ConfigurationError: Expected no block that recomputes or offloads inside the model, which is compiled with"
        " fullgraph=True, but the plan has 'blocks.0'"
    )


@pytest.mark.slow
def test_checkpoints_of_compiled_models_are_those_of_ddp(ranks):
    assert max(ranks(2).run(resumed)[0]) < TOLERANCE


@pytest.mark.parametrize("backend", ["eager", slow("aot_eager")])
def test_a_compiled_lightning_module_trains(ranks, backend):
    apart, (note,) = ranks(2).run(by_lightning, backend=backend)[0]
    assert apart < TOLERANCE
    assert note.startswith("the whole model: profiled as eager code")
