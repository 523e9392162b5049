"""Operations of blocks that checkpointing runs again: as torch runs them, and what they take of forward's seconds."""

from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import flop_registry

from lightning_osdp.core.cluster import DeviceRates
from lightning_osdp.errors import UntraceableError
from lightning_osdp.profiler import profile_model
from lightning_osdp.profiler.step.run_step import StepRunner
from lightning_osdp.profiler.timing.rerun_time import block_operations
from lightning_osdp.profiler.tracing.trace import trace_step
from tests.profiler.traced import CPU
from tests.support.tiers import slow

WIDTH, LENGTH, HEADS = 16, 8, 2
RATES = DeviceRates(flops_per_s={"float32": 1e9}, bytes_per_s=1e30)
FLOPS = {
    *flop_registry,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu,  # which torch has no formula for
}


class Llama(nn.Module):
    """Eight products and attentions; only the last product saves nothing that backward needs."""

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(WIDTH) for _ in range(2))
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(WIDTH, 3 * WIDTH, bias=False) for _ in range(2))
        self.down = nn.Linear(3 * WIDTH, WIDTH, bias=False)

    def forward(self, x):
        y = self.norms[0](x)
        q, k, v = (layer(y).unflatten(-1, (HEADS, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        y = self.norms[1](x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Gpt2(nn.Module):
    dropout = 0.0

    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        qkv = self.qkv(self.norms[0](x)).chunk(3, dim=-1)
        q, k, v = (each.unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in qkv)
        attended = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout, is_causal=True)
        x = x + F.dropout(self.out(attended.transpose(1, 2).flatten(2)), self.dropout)
        return x + F.dropout(self.down(F.gelu(self.up(self.norms[1](x)))), self.dropout)


class Gpt2WithDropout(Gpt2):
    dropout = 0.1


class Outputs(nn.Module):
    """Block whose output is read by what it saves last."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return torch.tanh(self.second(self.first(x)))


KINDS = {each.__name__: each for each in (Llama, Gpt2, Gpt2WithDropout, Outputs)}


class Model(nn.Module):
    def __init__(self, kind, num_blocks=3):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)
        self.blocks = nn.ModuleList(KINDS[kind]() for _ in range(num_blocks))

    def training_step(self, batch, batch_idx):
        x = self.first(batch)
        for block in self.blocks:
            x = block(x)
        return self.last(x).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Products(TorchDispatchMode):
    """Operations that are counted in floating-point operations, in their order."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket in FLOPS:
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def run_and_run_again(block):
    """Names of the products of a block's forward, and of those that torch's checkpoint runs again."""
    x = torch.randn(4, LENGTH, WIDTH, requires_grad=True)
    again = []

    def run(given):
        with Products() as products:
            try:
                return block(given)
            finally:  # torch stops by an exception
                again.append(products.names)

    checkpoint(run, x, use_reentrant=False).sum().backward()
    return again


@pytest.mark.parametrize(
    ("kind", "expected"),
    [slow("Llama", (8, 7)), slow("Gpt2", (5, 4)), ("Gpt2WithDropout", (6, 6)), ("Outputs", (2, 2))],
)
def test_products_that_run_again_are_those_that_torch_runs_again(kind, expected):
    model = Model(kind)
    forward, again = run_and_run_again(model.blocks[0])
    assert (len(forward), len(again)) == expected
    step = StepRunner(model, torch.randn(4, LENGTH, WIDTH), 4, lambda batch: model.training_step(batch, 0), CPU)
    trace = trace_step(step, ("recompute",))
    for block in block_operations(step, trace, 4).values():
        found = [
            [str(each.function) for _, each in operations if each.flops > 0]
            for operations in (block.operations, block.operations[: block.num_again])
        ]
        assert found == [forward, again]


FEW = [("Gpt2WithDropout", 3), ("Outputs", 12)]
"""Kinds and numbers of blocks; of twelve, a few stand for all."""


@pytest.mark.parametrize(
    ("kind", "num_blocks"), [*FEW, *(slow(*case) for case in product(KINDS, (3, 12)) if case not in FEW)]
)
def test_seconds_of_running_again_are_those_of_what_runs_again(kind, num_blocks):
    model = Model(kind, num_blocks)
    batch = torch.randn(4, LENGTH, WIDTH)
    profile = profile_model(model, batch, rates=RATES, activations=("keep", "recompute"))
    assert len(profile.blocks) == num_blocks
    for block in profile.blocks:
        first, last = block.span
        forward_s = sum(segment.forward_s.at(4) for segment in profile.segments[first : last + 1])
        last_product_s = 4 * LENGTH * 2 * {"Llama": 3, "Gpt2": 4}.get(kind, 0) * WIDTH * WIDTH / 1e9
        assert block.rerun_s.at(4) == pytest.approx(forward_s - last_product_s, rel=1e-9)
        assert block.rerun_s.at(2) == pytest.approx((forward_s - last_product_s) / 2, rel=1e-9)


def test_where_operations_cannot_be_timed_one_by_one_all_of_forward_counts(monkeypatch, caplog):
    caplog.set_level("INFO")

    def refuse(*_, **__):
        raise UntraceableError("no such values")

    monkeypatch.setattr("lightning_osdp.profiler.model.replayed_s", refuse)
    profile = profile_model(Model("Llama", 2), torch.randn(4, LENGTH, WIDTH), activations=("keep", "recompute"))
    for block in profile.blocks:
        first, last = block.span
        forward_s = sum(segment.forward_s.at(4) for segment in profile.segments[first : last + 1])
        assert block.rerun_s.at(4) == pytest.approx(forward_s)
    assert "operations cannot be timed: no such values" in caplog.text
