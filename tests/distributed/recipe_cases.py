"""Kinds of training that people ask about, as the ranks run them: planned by the strategy itself; against DDP."""

import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parent))

from cases import EVERYTHING, largest_difference, without_measuring
from strategy_cases import failure
from user_runs import Chain, ddp, difference, fitted

from lightning_osdp import OSDPStrategy

WIDTH, EXPERTS = 6, 4


class Mixture(Chain):
    """Each sample is sent to the expert that a router likes best, and the experts are called one by one."""

    def __init__(self, optimizer="adamw", *, is_each_called):
        super().__init__(optimizer)
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS)])
        self.is_each_called = is_each_called

    def features(self, x):
        x = torch.tanh(self.first(x))
        weights, chosen = self.router(20 * x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            sent = (chosen == index).nonzero().flatten()
            if self.is_each_called or len(sent):
                out = out.index_add(0, sent, expert(x[sent]) * weights[sent, None])
        return torch.tanh(self.third(torch.tanh(self.second(x + out))))


class Stacked(Chain):
    """The same with the weights of all experts in one parameter of one module."""

    def __init__(self, optimizer="adamw"):
        super().__init__(optimizer)
        self.router, self.experts = nn.Linear(WIDTH, EXPERTS), Experts()

    def features(self, x):
        x = torch.tanh(self.first(x))
        return torch.tanh(self.third(torch.tanh(self.second(x + self.experts(x, self.router(20 * x))))))


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / WIDTH)

    def forward(self, x, scores):
        weights, chosen = scores.softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for index in chosen.unique().tolist():
            sent = (chosen == index).nonzero().flatten()
            out = out.index_add(0, sent, x[sent] @ self.weight[index] * weights[sent, None])
        return out


class Contrastive(Chain):
    """Two forwards of one encoder in each step, and a loss over all pairs of the batch."""

    def loss(self, batch):
        x = batch[0].to(self.scale.dtype)
        one, other = (F.normalize(self.norm(self.features(view)), dim=-1) for view in (x, x.flip(1)))
        logits = one @ other.T * self.scale.exp()
        own = torch.arange(len(logits))
        return (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2 + self.last(one).square().mean()


@without_measuring
def planned(make, **options):
    """Difference from DDP, the plan, and the weights that DDP trains."""
    own = fitted(OSDPStrategy(search_space=EVERYTHING), make(), max_steps=4, **options)
    expected = fitted(ddp(find_unused_parameters=True), make(), max_steps=4, **options)
    return difference(own, expected), own[2].strategy.plan, expected[0]


def moved(state, make):
    """How far weights are from where they began."""
    start = {name: value.double() for name, value in sorted(make().state_dict().items())}
    return largest_difference({name: value.double() for name, value in state.items()}, start)


def mixtures():
    """By how experts are called."""
    found = {}
    for name, make in {"each is called": lambda: Mixture(is_each_called=True), "stacked": Stacked}.items():
        found[name], plan, _ = planned(make)
        found[name, "units"] = sorted(unit.name for unit in plan.units if "experts" in unit.name)
    return found


@without_measuring
def experts_apart():
    """What a rank raises where only the experts with samples are called, which are others on another rank."""
    return failure(lambda: fitted(OSDPStrategy(search_space=EVERYTHING), Mixture(is_each_called=False), max_steps=8))


def contrastive():
    """Difference from DDP in windows of two micro-batches, and what the plan makes of these."""
    off, plan, _ = planned(Contrastive, accumulate_grad_batches=2)
    return off, plan.micro_batch_size, plan.num_micro_batches


def transformers_models():
    """See `hf_recipe_cases`, which needs ``transformers``."""
    import hf_recipe_cases

    return hf_recipe_cases.trained()
