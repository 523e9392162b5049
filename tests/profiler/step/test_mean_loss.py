"""Losses that are means over samples, and those that are not."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_osdp.profiler import why_not_mean

BATCH = (torch.arange(24.0).view(6, 4).sin(), torch.arange(6.0).cos())
TOKENS = torch.tensor([[1, 2, 3], [1, 0, 0], [2, 1, 0], [3, 3, 3], [1, 2, 3], [3, 0, 0]])


def mlp(*between):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), *between, nn.Linear(8, 1))


def regression(model):
    return lambda batch: F.mse_loss(model(batch[0])[:, 0], batch[1])


class OwnDropout(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.dropout = nn.Parameter(torch.ones(8)), 0.5

    def forward(self, x):
        return F.dropout(x * self.weight, self.dropout, self.training)


class Noise(nn.Module):
    def forward(self, x):
        return x + torch.randn_like(x) if self.training else x


class Attention(nn.Module):
    """Attention with a probability in a module of its own, as GPT-2 of Hugging Face has it."""

    def __init__(self, is_named):
        super().__init__()
        self.qkv, self.attn_dropout, self.is_named = nn.Linear(8, 24), nn.Dropout(0.5), is_named

    def forward(self, x):
        qkv = self.qkv(x)[:, None].chunk(3, dim=-1)
        p = self.attn_dropout.p if self.training else 0.0
        attend = F.scaled_dot_product_attention
        found = attend(*qkv, dropout_p=p) if self.is_named else attend(*qkv, None, p, True)
        return F.dropout(torch.dropout(found[:, 0], 0.5, True), 0.5, self.training)


@pytest.mark.parametrize(
    "between",
    [
        [],
        [nn.Dropout(0.5)],
        [OwnDropout()],
        [Attention(is_named=True)],
        [Attention(is_named=False)],
        [nn.LayerNorm(8)],
        [nn.Tanh(), nn.BatchNorm1d(8).eval()],
        [Noise()],
    ],
)
@pytest.mark.parametrize("batch_size", [6, 5])
def test_means_over_samples_are_found_whatever_is_dropped(between, batch_size):
    model = mlp(*between)
    before, flags = {k: v.clone() for k, v in model.state_dict().items()}, [m.training for m in model.modules()]
    state = torch.get_rng_state()
    batch = tuple(tensor[:batch_size] for tensor in BATCH)
    assert why_not_mean(model, regression(model), batch, batch_size=batch_size) is None
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [module.training for module in model.modules()] == flags
    assert torch.equal(torch.get_rng_state(), state)


def contrastive(model):
    return lambda batch: F.cross_entropy(model[0](batch[0]) @ model[0](batch[0]).T, torch.arange(len(batch[0])))


def tokens(model):
    return lambda batch: F.cross_entropy(model(batch).transpose(1, 2), batch, ignore_index=0)


def random_noise(model):
    return lambda batch: regression(model)((batch[0] + torch.randn_like(batch[0]), batch[1]))


def summed(model):
    return lambda batch: {"loss": F.mse_loss(model(batch[0])[:, 0], batch[1], reduction="sum")}


def fails_in_half(model):
    return lambda batch: model(batch[0]).view(6).mean()


@pytest.mark.parametrize(
    ("model", "run", "batch", "why"),
    [
        (mlp(), contrastive, BATCH, "the loss of a batch is not the mean of its halves' losses"),
        (mlp(), summed, BATCH, "the loss of a batch is not the mean of its halves' losses"),
        (nn.Sequential(nn.Embedding(4, 8), nn.Linear(8, 4)), tokens, TOKENS, "the loss of a batch is not the mean"),
        (mlp(nn.BatchNorm1d(8)), regression, BATCH, "1 normalises over the samples of a micro-batch"),
        (mlp(), random_noise, BATCH, "the loss is random, and not by dropout alone"),
        (mlp(), fails_in_half, BATCH, "half a batch cannot be run without gradients (RuntimeError: "),
        (mlp(), regression, (BATCH[0][:1], BATCH[1][:1]), "batches of one sample do not show"),
        (mlp(), regression, [torch.ones(3)], "no tensor or list of the batch has 6 samples first"),
        (mlp().bfloat16(), regression, tuple(t.bfloat16() for t in BATCH), "a loss in torch.bfloat16 is too coarse"),
        (mlp().to("meta"), regression, BATCH, "a model without values does not show"),
    ],
)
def test_what_is_no_mean_says_why(model, run, batch, why):
    size = 1 if len(batch[0]) == 1 else 6
    found = why_not_mean(model, run(model), batch, batch_size=size)
    assert found.startswith(why), found
