"""Weights that a step writes to, from whichever step on and in whatever way: trained as under DDP, or refused."""

from functools import partial

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_osdp import OSDPStrategy
from tests.distributed.support import by_hand
from tests.distributed.support.fits import largest_difference, trainer, without_measuring
from tests.distributed.support.user_runs import (
    Chain,
    check,
    ddp,
    difference,
    differences,
    fitted,
    moved,
    plan_with,
    refusal,
)
from tests.support.tiers import slow

pytestmark = pytest.mark.distributed

LIMIT = 0.12


def set_anew(parameter):
    parameter.data = parameter.data.clamp(-LIMIT, LIMIT)


def by_numpy(parameter):
    values = parameter.detach().numpy()
    values.clip(-LIMIT, LIMIT, out=values)


WAYS = {
    "data": lambda parameter: parameter.data.clamp_(-LIMIT, LIMIT),
    "view": lambda parameter: parameter.data.view(-1).clamp_(-LIMIT, LIMIT),
    "as data": set_anew,
    "numpy": by_numpy,
}
"""Ways in which people clip weights."""


class Clipped(Chain):
    """Clips its weights before forward, or those of its root, from a step on."""

    def __init__(self, way, start, *, is_root_alone):
        super().__init__()
        self.clip, self.start, self.is_root_alone = WAYS[way], start, is_root_alone

    def training_step(self, batch, batch_idx):
        if self.trainer.global_step >= self.start:
            for parameter in self.parameters(recurse=not self.is_root_alone):
                self.clip(parameter)
        return super().training_step(batch, batch_idx)


class Critic(by_hand.GAN):
    """Clips its critic where each step begins, from a step on."""

    def __init__(self, start):
        super().__init__()
        self.start = start

    def training_step(self, batch, batch_idx):
        if batch_idx >= self.start:
            for parameter in self.discriminator.parameters():
                parameter.data.clamp_(-LIMIT, LIMIT)
        super().training_step(batch, batch_idx)


class Waits(TorchDispatchMode):
    """Operations for which a host waits for its device."""

    def __init__(self):
        super().__init__()
        self.names, self.num_copies = [], 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if operation._overloadpacket in (torch.ops.aten.equal, torch.ops.aten._local_scalar_dense):
            self.names.append(str(operation))
        self.num_copies += operation._overloadpacket == torch.ops.aten._foreach_copy_
        return operation(*args, **(kwargs or {}))


class Counting(L.Callback):
    """Notes them in a step, after those in which PlanMonitor counts bytes."""

    reads_parameters = False

    def __init__(self):
        self.waits = Waits()

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if batch_idx == 6:
            self.waits.__enter__()

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if batch_idx == 6:
            self.waits.__exit__(None, None, None)


def written_from(starts):
    """Differences from DDP of models whose steps begin to write late."""
    found = {}
    for start in starts:
        make = partial(Clipped, "data", start, is_root_alone=False)
        found[f"data, {start}"] = differences(make, ("mixed",), max_steps=start + 6, max_epochs=-1)
    return found


def written():
    """Differences from DDP of models whose steps write late in windows; what is refused; what a step waits for."""
    found, windows = {}, {"max_steps": 9, "accumulate_grad_batches": 2}
    for is_root_alone, ways in ((False, ("data",)), (True, ("view", "as data", "numpy"))):
        makes = {way: partial(Clipped, way, 6, is_root_alone=is_root_alone) for way in ways}
        expected = fitted(ddp(), makes[ways[0]](), **windows)
        own = found["windows", ways] = {"moved": moved(expected[0], makes[ways[0]])}
        plan = plan_with(makes[ways[0]], "dp", num_micro_batches=2, sync="last")
        for way, make in makes.items():
            own[way] = difference(fitted(OSDPStrategy(plan=plan), make(), **windows), expected)
    low, refused, waits = {"dtype": "float32", "precision": "bf16-mixed"}, [], []
    for way in ("data", "view"):
        plan = plan_with(Chain, "mixed", dtype="float32")
        make = partial(Clipped, way, 5, is_root_alone=True)
        refused.append(
            refusal(lambda make=make, plan=plan: fitted(OSDPStrategy(plan=plan), make(), max_steps=6, **low))
        )
    for options in (low, {}):
        counting = Counting()
        plan = plan_with(Chain, "mixed", dtype=options.get("dtype", "float64"))
        fitted(OSDPStrategy(plan=plan), Chain("sgd"), max_steps=8, callbacks=[counting], **options)
        waits.append((counting.waits.names, counting.waits.num_copies))
    return found, refused, waits


@without_measuring
def written_by_hand(starts):
    """Differences from DDP of models that optimize manually and write to weights, early or late."""
    found = {}
    for start in starts:
        trained = []
        for strategy in (by_hand.ddp, by_hand.ours()):
            module = Critic(start)
            start_state = {name: value.clone() for name, value in module.state_dict().items()}
            fit = trainer(strategy(), max_steps=20)
            fit.fit(module, module.loader(dist.get_rank(), dist.get_world_size()))
            trained.append((module, fit.strategy.lightning_module_state_dict()))
        moved = largest_difference(trained[0][1], start_state)
        if dist.get_rank() == 0:
            found[f"by hand, {start}"] = {"moved": moved, "planned": by_hand.compared(trained[1], trained[0])}
    return found


@pytest.mark.parametrize(("world_size", "starts"), [(2, (5,)), slow(2, (0, 50)), slow(4, (0, 5, 50))])
def test_weights_that_a_step_writes_to_are_those_that_train(ranks, world_size, starts):
    check(ranks(world_size).run(written_from, starts=starts)[0])


@pytest.mark.parametrize("world_size", [2, slow(4)])
def test_weights_that_a_step_writes_to_late_are_those_that_train(ranks, world_size):
    found, refused, waits = ranks(world_size).run(written)[0]
    check(found)
    for told in refused:
        assert "Expected a step to leave parameters as they are that are gathered in torch.bfloat16 and kept in" in told
        assert "but it has written to those of 'scale' or of others in its unit. Change weights in a hook" in told
    (low, _), (own, num_copies) = waits
    assert low == own == [], waits
    assert num_copies > 0


@pytest.mark.parametrize(("world_size", "starts"), [(2, (5,)), slow(2, (0,)), slow(4, (0, 5))])
def test_weights_that_a_manual_step_writes_to_late_are_those_that_train(ranks, world_size, starts):
    check(ranks(world_size).run(written_by_hand, starts=starts)[0], 1e-5)
