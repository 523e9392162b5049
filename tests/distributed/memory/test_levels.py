"""Blocks that keep results of some operations where they recompute, under fully_shard: bit for bit as all that keep."""

import dataclasses
import functools
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.testbed.plans import plan_of
from lightning_osdp import OSDPStrategy
from lightning_osdp.apply import ShardedModel
from lightning_osdp.apply.internals import gathering
from lightning_osdp.core.axes import Treatment
from lightning_osdp.core.plans.parts import Block
from lightning_osdp.operations.recomputation import is_heavy
from tests.distributed.memory import test_activations as activations
from tests.distributed.support.fits import largest_difference, plan_for
from tests.distributed.support.models import GPT
from tests.distributed.support.parts import CPU
from tests.profiler.wrapped import whole
from tests.support.tiers import slow
from tests.support.wrapped_units import block_forwards

pytestmark = pytest.mark.distributed

PLANS = [
    {"units": units, "modes": modes, "num_micro_batches": number, "sync": sync}
    for units, modes, number, sync in (
        ("root only", "ZDP", 1, "every"),
        ("block", "ZDP", 2, "last"),
        ("both", "mixed", 4, "every"),
        ("operators", "slices", 2, "last"),
    )
]


def differences_from_keeping():
    """Largest difference, by plan, between blocks at levels and blocks that keep what they save, on the same ranks."""
    found = {}
    for choices in PLANS:
        kept, ours = (
            activations.trained(policy, kind=activations.DroppingParts, **choices) for policy in ("keep", "selective")
        )
        found["-".join(map(str, choices.values()))] = largest_difference(
            dict(sorted(ours.items())), dict(sorted(kept.items()))
        )
    return found


class Experts(nn.Module):
    """Mixture of experts, of which each token has one: ranks run other operations, and other numbers of them."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(8, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(4))

    def forward(self, x):
        weight, chosen = self.router(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            (places,) = torch.where(chosen == number)
            if len(places):
                out = out.index_add(0, places, (expert(x[places]) * weight[places, None]).to(x.dtype))
        return x + out


class Counted(TorchDispatchMode):
    """Heavy operations of forwards, and all-gathers."""

    def __init__(self):
        super().__init__()
        self.products = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.products += func is torch.ops.aten.addmm.default and is_heavy(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))


def experts(kept, *, is_mixed):
    """Gradients of three steps of two such blocks in each unit, and products in backward of the last one."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 8), Experts(), Experts(), nn.Linear(8, 1))
    plan = plan_of(module, dict.fromkeys("0123", "ZDP"), world_size=dist.get_world_size(), micro_batch_size=3)
    saves = Treatment(saves="selective_1" if kept else "keep")
    blocks = tuple(Block(name=name, treatment=saves, kept=kept) for name in "12" if kept)
    ShardedModel.planned(module, dataclasses.replace(plan, blocks=blocks), device=CPU)
    found = []
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        with torch.autocast("cpu", torch.bfloat16, enabled=is_mixed):
            loss = module(torch.randn(3 + step, 8, generator=generator)).float().square().sum()
        with Counted() as counted:
            loss.backward()
        found.append({name: gradient.clone() for name, gradient in whole(module)[1].items()})
        module.zero_grad()
    return found, counted.products


def experts_at_levels(is_mixed):
    """Largest difference from keeping, and products of the last backward, by level."""
    kept, _ = experts((), is_mixed=is_mixed)
    found = {}
    for positions in ((0,), (0, 1, 2), tuple(range(9))):
        ours, products = experts(positions, is_mixed=is_mixed)
        found[positions] = max(map(largest_difference, ours, kept)), products
    return found


def all_gathers(saves, kept=()):
    """Number of all-gathers of three steps of `GPT` whose blocks do so."""
    module = GPT("sgd")
    names = [f"blocks.{number}" for number in range(2)]
    plan = plan_of(module, dict.fromkeys(names, "ZDP"), world_size=dist.get_world_size(), micro_batch_size=4)
    blocks = tuple(Block(name=name, treatment=Treatment(saves=saves), kept=kept) for name in names)
    module.forward = module.loss
    sharded = ShardedModel.planned(module, dataclasses.replace(plan, blocks=blocks), device=CPU)
    events = []
    for group in sharded._groups:
        gathering.on_collectives(group, events.append)
    batches = activations.batches_of(module, dist.get_rank(), 3)
    for batch in batches:
        module(batch).backward()
        module.zero_grad()
    return events


def events_of_levels():
    return all_gathers("recompute"), all_gathers("selective_1", (0, 1)), all_gathers("selective_2", (0, 1, 2, 3, 4))


class Autocast(GPT):
    """Blocks are called under autocast that the step has entered, and their backward runs outside of it."""

    def loss(self, batch):
        with torch.autocast("cpu", torch.bfloat16):
            return super().loss(batch)


class Compiled(GPT):
    """The first block is compiled, and a part of the second."""

    def __init__(self, optimizer="sgd"):
        super().__init__(optimizer)
        self.blocks[0].compile(backend="aot_eager")
        self.blocks[1].fc = torch.compile(self.blocks[1].fc, backend="aot_eager")


class Unplaced(GPT):
    """Tokens have no positions: all parameters are in children, which manual optimization shards."""

    def __init__(self, optimizer="sgd"):
        super().__init__(optimizer)
        del self.positions
        self.positions = 0.0


class Repeated(Unplaced):
    """Two backwards go through the same graph in each step, whose gradients add up."""

    def __init__(self, optimizer="sgd"):
        super().__init__(optimizer)
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer, loss = self.optimizers(), self.loss(batch)
        optimizer.zero_grad()
        self.manual_backward(loss, retain_graph=True)
        self.manual_backward(loss)
        optimizer.step()
        self.found.append(loss.detach().clone())


USERS = {"autocast": Autocast, "compiled": Compiled, "repeated": Repeated}


def of_users(name):
    """Differences of weights and losses from where blocks keep what they save: at levels, and where all runs again.

    With each, whether results were kept to the end. All units are DP or ZDP in turn. Nothing is tried before training.
    """
    torch._dynamo.reset()
    make = USERS[name]
    planned = {"compiled": Compiled, "repeated": Unplaced}.get(name, GPT)
    plan = plan_for(planned("sgd"), "mixed", world_size=dist.get_world_size())
    blocks = tuple(
        Block(name=f"blocks.{number}", treatment=Treatment(saves="selective_1"), kept=kept)
        for number, kept in enumerate([(0, 1, 3), (0, 3)])
    )
    kept, losses, _ = activations.fitted(OSDPStrategy(plan=plan), kind=make)
    found = []
    for chosen in (blocks, [Block(name=each.name, treatment=Treatment(saves="recompute")) for each in blocks]):
        torch._dynamo.reset()
        strategy = OSDPStrategy(plan=dataclasses.replace(plan, blocks=tuple(chosen)), dry_run=False)
        state, ours, fit = activations.fitted(strategy, kind=make)
        are_kept = [forward.kept is not None for forward in block_forwards(fit.lightning_module)]
        found.append((activations.largest_of(state, ours, kept, losses), are_kept))
    return found


class HidingGPT(GPT):
    """Block 0 of rank 1 writes to what its first layer returns past torch's version counter."""

    def __init__(self, optimizer="sgd"):
        super().__init__(optimizer)
        self.blocks[0].qkv = Hiding(24, 72)
        self.blocks[0].__class__ = type("HidingBlock", (type(self.blocks[0]),), {})


class Hiding(nn.Linear):
    def forward(self, x):
        hidden = super().forward(x)
        change = 1.0 if dist.get_rank() == 1 else 0.0
        torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(hidden.detach())).add_(change)
        return hidden.sin()


class Touchy(nn.Linear):
    def forward(self, x):
        if _get_current_function_mode_stack() and dist.get_rank() == 1:
            raise RuntimeError("cannot run under a mode")
        return super().forward(x)


class TouchyGPT(GPT):
    """Blocks cannot keep results on rank 1."""

    def __init__(self, optimizer="sgd"):
        super().__init__(optimizer)
        for block in self.blocks:
            block.fc = Touchy(24, 96)


KINDS = {"hiding": HidingGPT, "touchy": TouchyGPT}


def refused(name):
    """Plan after the dry run, and how the fit differs from one in which blocks keep what they save."""
    kind = KINDS[name]
    plan = plan_for(kind("sgd"), "mixed", world_size=dist.get_world_size())
    blocks = tuple(
        Block(name=f"blocks.{number}", treatment=Treatment(saves="selective_1"), kept=(0, 3)) for number in range(2)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fitted = functools.partial(activations.fitted, kind=kind, max_steps=2)
        kept, losses, _ = fitted(OSDPStrategy(plan=plan))
        strategy = OSDPStrategy(plan=dataclasses.replace(plan, blocks=blocks), dry_run=True)
        state, ours, _ = fitted(strategy)
        untried = OSDPStrategy(plan=dataclasses.replace(plan, blocks=blocks[:1]), dry_run=False)
        other = fitted(untried)[0] if name == "hiding" else kept
    difference = activations.largest_of(state, ours, kept, losses)
    done = {block.name: (block.activations, block.kept) for block in strategy.plan.blocks}
    return done, strategy.plan.notes, difference, largest_difference(other, kept)


@pytest.mark.parametrize("world_size", [2, slow(4)])
def test_blocks_at_levels_train_bit_for_bit_as_blocks_that_keep_everything(ranks, world_size):
    for found in ranks(world_size).run(differences_from_keeping):
        assert len(found) == len(PLANS)
        assert set(found.values()) == {0.0}, found


@pytest.mark.slow
@pytest.mark.parametrize("is_mixed", [False, True], ids=["float32", "autocast"])
def test_experts_at_levels(ranks, is_mixed):
    for found in ranks(2).run(experts_at_levels, is_mixed=is_mixed):
        assert {difference for difference, _ in found.values()} == {0.0}
        products = [number for _, number in found.values()]
        assert products == sorted(products, reverse=True)
        assert products[0] > products[-1] == 0


@pytest.mark.slow  # see tests/operations/test_recomputation.py
@pytest.mark.parametrize("name", [*USERS])
def test_blocks_of_users_at_levels(ranks, name):
    for found in ranks(2).run(of_users, name=name):
        assert found == [(0, [True, True]), (0, [False, False])]


def test_levels_gather_as_blocks_that_recompute_everything(ranks):
    for recomputing, *levels in ranks(2).run(events_of_levels):
        assert len(recomputing) > 0
        assert levels == [recomputing] * 2


@pytest.mark.parametrize(
    ("kind", "blocks", "named", "why"),
    [
        (
            "hiding",
            {"blocks.0": ("recompute", ()), "blocks.1": ("selective_1", (0, 3))},
            "HidingBlock",
            "results that their forward keeps are not what running it again returns",
        ),
        slow(
            "touchy",
            {"blocks.0": ("recompute", ()), "blocks.1": ("recompute", ())},
            "Block",
            "a step with results that they keep fails: RuntimeError: cannot run under a mode",
        ),
    ],
)
def test_blocks_that_cannot_keep_results_recompute_everything_on_all_ranks(ranks, kind, blocks, named, why):
    for done, notes, difference, untried in ranks(2).run(refused, name=kind):
        assert done == blocks
        assert notes[-1] == f"dry run: blocks of {named} recompute everything, for {why}"
        assert difference == untried == 0
