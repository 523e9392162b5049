"""Collectives of the user's own in a step: in training, while it is profiled, and in a dry run."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.nn import functional as collectives
from torch.nn import functional as F

from lightning_osdp import OSDPStrategy
from tests.distributed.support.fits import EVERYTHING
from tests.distributed.support.user_runs import WIDTH, Chain, check, compared, plan_with
from tests.support.tiers import but_slow, slow

pytestmark = pytest.mark.distributed


class Reduced(Chain):
    """Weighs its loss by a mean over all ranks, and keeps a sum over them."""

    def __init__(self, optimizer="adamw"):
        super().__init__(optimizer)
        self.register_buffer("total", torch.zeros(()))

    def loss(self, batch):
        loss = super().loss(batch)
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        self.total = self.total + mean
        return loss * (1 + mean / dist.get_world_size())


class Contrasted(Chain):
    """Tells its samples from those of all ranks, whose features it gathers."""

    gathers = staticmethod(lambda module, x: module.all_gather(x, sync_grads=True).flatten(0, 1))

    def loss(self, batch):
        x, _ = (tensor.to(self.scale.dtype) for tensor in batch)
        one, other = (F.normalize(self.last(self.norm(self.features(each)))) for each in (x, x + 0.1))
        own = torch.arange(len(one)) + dist.get_rank() * len(one)
        return F.cross_entropy(one @ self.gathers(self, other).T * self.scale, own)


class Gathered(Contrasted):
    """Model that gathers by torch's own collectives with gradients."""

    gathers = staticmethod(lambda _, x: torch.cat(collectives.all_gather(x)))


class Detached(Contrasted):
    """Model that gathers without gradients of what other ranks have."""

    @staticmethod
    def gathers(module, x):
        found = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(found, x.detach())
        found[dist.get_rank()] = x
        return torch.cat(found)


class Centred(nn.Module):
    """Takes the mean over the batches of all ranks, and a running one, as synchronised batch normalisation does."""

    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.register_buffer("running", torch.zeros(width))

    def forward(self, x):
        x = self.linear(x)
        if not self.training:
            return x - self.running
        mean = collectives.all_reduce(x.mean(0)) / dist.get_world_size()
        self.running = 0.9 * self.running + 0.1 * mean.detach()
        return x - mean


class Synchronised(Chain):
    units = ("first", "second", "third", "norm", "last")

    def __init__(self, optimizer="adamw"):
        super().__init__(optimizer)
        self.second = Centred(WIDTH)


class Told(Chain):
    """Tells objects, and has its scale from rank 0."""

    def loss(self, batch):
        told = [None] * dist.get_world_size()
        dist.all_gather_object(told, {"samples": len(batch[0])})
        factor = torch.full((), 1.0 + dist.get_rank())
        dist.broadcast(factor, src=0)
        return super().loss(batch) * factor * sum(each["samples"] for each in told)


KINDS = {
    "reduced": Reduced,
    "contrasted": Contrasted,
    "gathered": Gathered,
    "detached": Detached,
    "synchronised": Synchronised,
    "told": Told,
}


def trained(name):
    """Differences from DDP under a plan given, with a dry run too, and under one of the strategy's own."""
    plan = plan_with(KINDS[name], "mixed")
    strategies = {
        "given": OSDPStrategy(plan=plan),
        "dry run": OSDPStrategy(plan=plan, dry_run=True),
        "planned": OSDPStrategy(search_space=EVERYTHING),
    }
    return {name: compared(KINDS[name], strategies, max_steps=3, limit_val_batches=1, val_check_interval=3)}


@pytest.mark.parametrize("name", but_slow(KINDS, slow={"gathered", "detached", "told", "synchronised", "reduced"}))
@pytest.mark.parametrize("world_size", [2, slow(4)])
def test_collectives_in_a_step_are_those_under_ddp(ranks, name, world_size):
    check(ranks(world_size).run(trained, name=name)[0])
