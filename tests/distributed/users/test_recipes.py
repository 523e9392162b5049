"""Kinds of training that the manual has recipes for, planned by the strategy itself: as under DDP, or an error."""

from importlib.util import find_spec

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_osdp import OSDPStrategy
from tests.distributed.support.fits import EVERYTHING, failure, without_measuring
from tests.distributed.support.models import BATCH_SIZE
from tests.distributed.support.ranks import RankPool
from tests.distributed.support.user_runs import Chain, fitted, planned

pytestmark = pytest.mark.distributed


WIDTH, EXPERTS = 6, 4


class Mixture(Chain):
    """Mixture of experts: a router sends each sample to the expert that it likes best; each expert is called alone."""

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
    """Mixture with the weights of all experts in one parameter of one module."""

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


def mixtures():
    """Returns differences from DDP, and units, by how experts are called."""
    found = {}
    for name, make in {"each is called": lambda: Mixture(is_each_called=True), "stacked": Stacked}.items():
        found[name], plan, _ = planned(make)
        found[name, "units"] = sorted(unit.name for unit in plan.units if "experts" in unit.name)
    return found


@without_measuring
def experts_apart():
    """Returns the error of a rank that calls only the experts with samples, which are others on another rank."""
    return failure(lambda: fitted(OSDPStrategy(search_space=EVERYTHING), Mixture(is_each_called=False), max_steps=8))


def contrastive():
    """Difference from DDP in windows of two micro-batches, and what the plan makes of these."""
    off, plan, _ = planned(Contrastive, accumulate_grad_batches=2)
    return off, plan.micro_batch_size, plan.num_micro_batches


def transformers_models():
    """Runs `hf_recipes`, which needs ``transformers``."""
    from tests.distributed.support.hf import hf_recipes

    return hf_recipes.trained()


def test_experts_in_one_module_or_all_called_equal_ddp(ranks):
    for found in ranks(2).run(mixtures):
        for name in ("each is called", "stacked"):
            assert found[name] < 1e-10, name
        assert found["each is called", "units"] == [f"experts.{index}" for index in range(EXPERTS)]
        assert found["stacked", "units"] == ["experts"]


def test_experts_that_only_some_ranks_call_are_an_error():
    pool = RankPool(2)  # its own pool: collectives that found no partner are left
    try:
        assert {kind for kind, _ in pool.run(experts_apart)} == {"RanksApartError"}
    finally:
        pool.close()


@pytest.mark.slow
def test_two_forwards_and_a_loss_over_pairs_equal_ddp(ranks):
    for off, *batch in ranks(2).run(contrastive):
        assert off < 1e-10
        assert batch == [BATCH_SIZE, 2]


@pytest.mark.slow
@pytest.mark.skipif(
    find_spec("transformers") is None, reason="needs transformers: python -m pip install --group models"
)
def test_models_of_transformers_with_masks_checkpoints_and_experts_equal_ddp(ranks):
    for found in ranks(2).run(transformers_models):
        for name, tolerance in (("GPT2", 1e-9), ("Llama", 1e-6), ("Mixtral", 1e-4)):
            off, moved = found[name]
            assert off < tolerance < moved / 10, name
