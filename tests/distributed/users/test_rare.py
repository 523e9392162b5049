"""Sequences that are packed, nested or in lists, and parameters of few rows, as under DDP."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader

from lightning_osdp import OSDPStrategy
from tests.distributed.support.fits import EVERYTHING
from tests.distributed.support.models import BATCH_SIZE
from tests.distributed.support.user_runs import WIDTH, Chain, check, compared, fitted, plan_with, refusal
from tests.support.tiers import slow

pytestmark = pytest.mark.distributed


class Packed(Chain):
    """Reads sequences of different lengths, packed."""

    def __init__(self, optimizer="adamw"):
        super().__init__(optimizer)
        self.first = nn.GRU(7, WIDTH)

    def loss(self, batch):
        _, last = self.first(batch)
        return self.last(self.norm(torch.tanh(self.third(self.second(last[0]))))).mul(self.scale).square().mean()

    def loader(self, rank, world_size, batch_size=4):
        drawn = torch.Generator().manual_seed(rank)
        lengths = torch.randint(2, 6, (32,), generator=drawn).tolist()
        sequences = [torch.randn(length, 7, generator=drawn, dtype=self.scale.dtype) for length in lengths]
        return DataLoader(sequences, batch_size=batch_size, collate_fn=self.collated)

    def collated(self, sequences):
        return pack_sequence(sequences, enforce_sorted=False)

    def validation_step(self, batch, batch_idx):
        pass


class Jagged(Packed):
    """Reads sequences as a nested tensor."""

    def __init__(self, optimizer="adamw"):
        super().__init__(optimizer)
        self.first = nn.Linear(7, WIDTH)

    def collated(self, sequences):
        return torch.nested.nested_tensor(sequences, layout=torch.jagged)

    def loss(self, batch):
        hidden = self.third(torch.tanh(self.second(torch.tanh(self.first(batch)))))
        return self.told(torch.stack([each.mean(0) for each in hidden.unbind()]))

    def told(self, means):
        return F.mse_loss(self.last(self.norm(means)) * self.scale, means[:, :3].detach().cos())


class Listed(Jagged):
    """Reads sequences in lists in a mapping in a tuple."""

    def collated(self, sequences):
        return {"sequences": list(sequences), "lengths": [len(each) for each in sequences]}, ("name", None)

    def loss(self, batch):
        given, _ = batch
        hidden = [torch.tanh(self.first(each)).sum(0) for each in given["sequences"]]
        means = torch.stack(hidden) / torch.tensor(given["lengths"])[:, None]
        return self.told(self.third(torch.tanh(self.second(means))))


class Row(Chain):
    """Has a row and, frozen, none, in the root."""

    def __init__(self, optimizer="adamw"):
        super().__init__(optimizer)
        self.one = nn.Parameter(torch.ones(1, WIDTH))
        self.none = nn.Parameter(torch.empty(0, WIDTH), requires_grad=False)

    def features(self, x):
        return super().features(x) + torch.cat([self.none, self.one]).sum(0)


class Empty(Chain):
    """Has a unit without any row."""

    def __init__(self, optimizer="adamw"):
        super().__init__(optimizer)
        self.third = nn.Linear(WIDTH, 0)

    def features(self, x):
        hidden = torch.tanh(self.second(torch.tanh(self.first(x))))
        return hidden + self.third(hidden).sum(-1, keepdim=True)


KINDS = {"row": Row, "packed": Packed, "jagged": Jagged, "listed": Listed}


def trained(is_given):
    """Differences from DDP under a plan of the strategy's own, and under one that ``is_given``."""
    found = {}
    for name, kind in KINDS.items():
        own = OSDPStrategy(search_space=EVERYTHING)
        strategies = {"given": OSDPStrategy(plan=plan_with(kind, "mixed"))} if is_given else {}
        strategies["planned"] = own
        found[name] = compared(kind, strategies, max_steps=3)
        assert own.plan.micro_batch_size == BATCH_SIZE
    return found


def refused():
    plan = plan_with(Empty, "zdp")
    return refusal(lambda: fitted(OSDPStrategy(plan=plan), Empty(), max_steps=1))


def test_parameters_without_elements_are_refused(ranks):
    for told in ranks(2).run(refused):
        assert told.startswith(
            "ConfigurationError: Expected parameters with elements, got 'third.weight' of shape (0, "
        )
        assert "Leave it out, make it a buffer, or freeze it" in told


@pytest.mark.parametrize("is_given", [False, slow(True)])
def test_rows_and_batches_that_are_no_tensors_equal_ddp(ranks, is_given):
    found = ranks(2).run(trained, is_given=is_given)[0]
    assert list(found) == list(KINDS)
    check(found)
