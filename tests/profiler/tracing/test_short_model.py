"""Leaving repeated blocks out must not change anything, and must not happen where they are not known to be alike."""

import random
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from lightning_osdp.profiler import ComputePrecision
from tests.profiler.traced import both, is_shortened
from tests.support.tiers import but_slow

WIDTH, SAMPLES, DEPTH = 8, 4, 10


class Block(nn.Module):
    """Pre-norm residual; what differs between blocks is set from outside."""

    def __init__(self, index):
        super().__init__()
        self.index = index
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class Model(nn.Module):
    """Blocks between two layers; `passed` says how they are run."""

    def __init__(self, passed, blocks):
        super().__init__()
        self.enter, self.blocks, self.head = nn.Linear(WIDTH, WIDTH), blocks, nn.Linear(WIDTH, 3)
        self.passed = passed

    def forward(self, x):
        return self.head(self.passed(self, self.enter(x))).square().mean()


def in_turn(model, x):
    for block in model.blocks:
        x = block(x)
    return x


def model_of(change=lambda blocks: None, passed=in_turn, depth=DEPTH, kind=Block):
    blocks = nn.ModuleList(kind(index) for index in range(depth))
    change(blocks)
    return Model(passed, blocks)


def found(model, find=both):
    return find(model, torch.ones(SAMPLES, 5, WIDTH), SAMPLES, model)


def one_other_at_the_end(blocks):
    blocks[-2].dropout.p = 0.5


def shared_buffer(blocks):
    for block in blocks:
        block.register_buffer("mask", blocks[0].up.bias.detach())


def an_index_that_nothing_reads(blocks):
    for block in blocks:
        block.config = {"index": block.index}


def checkpointed(model, x):
    for block in model.blocks:
        x = checkpoint(block, x, use_reentrant=False)
    return x


def reentrant(model, x):
    for block in model.blocks:
        x = checkpoint(block, x, use_reentrant=True)
    return x


def a_bias_for_all(model, x):
    bias = x.mean(0)  # its gradient grows from block to block of backward
    for block in model.blocks:
        x = block(x + bias)
    return x


def work_between(model, x):
    for block in model.blocks:
        x = torch.tanh(block(x)) * 0.5
    return x


def under_autocast(model, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return in_turn(model, x)


class Pair(nn.Module):
    """A block of blocks."""

    def __init__(self, index):
        super().__init__()
        self.parts = nn.Sequential(Block(index), Block(index))

    def forward(self, x):
        return self.parts(x)


FOLDED = {
    "plain": model_of,
    "deep": lambda: model_of(depth=24),
    "pairs": lambda: model_of(kind=Pair),
    "two runs": lambda: model_of(lambda blocks: setattr(blocks[11].dropout, "p", 0.5), depth=20),
    "one other at the end": lambda: model_of(one_other_at_the_end, depth=12),
    "buffer": lambda: model_of(shared_buffer),
    "unread index": lambda: model_of(an_index_that_nothing_reads),
    "checkpointed": lambda: model_of(passed=checkpointed),
    "reentrant": lambda: model_of(passed=reentrant),
    "a bias for all": lambda: model_of(passed=a_bias_for_all),
    "work between": lambda: model_of(passed=work_between),
    "no gradients": lambda: model_of(lambda blocks: blocks.requires_grad_(False), depth=12),
}


SLOW_FOLDED = [
    "plain",
    "a bias for all",
    "pairs",
    "two runs",
    "deep",
    "reentrant",
    "work between",
    "buffer",
    "unread index",
    "no gradients",
    "one other at the end",
]


@pytest.mark.parametrize("name", but_slow(FOLDED, slow=SLOW_FOLDED))
def test_left_out_blocks_are_as_those_that_stay(name):
    is_short, short, whole = found(FOLDED[name]())
    assert is_short
    assert short == whole


def test_left_out_blocks_compute_in_the_precision_of_the_others():
    precision = ComputePrecision(torch.bfloat16, exempt=(nn.LayerNorm,))
    model = model_of()
    with precision.applied(model):
        is_short, short, whole = both(model, torch.ones(SAMPLES, 5, WIDTH).bfloat16(), SAMPLES, model)
    assert is_short
    assert short == whole


def differs(attribute, value):
    def change(blocks):
        for name in attribute.split(".")[:-1]:
            blocks = getattr(blocks, name)
        setattr(blocks, attribute.split(".")[-1], value)

    return lambda: model_of(lambda blocks: change(blocks[5]))


def each_scaled(blocks):
    for block in blocks:
        block.register_forward_hook(lambda block, _, x: x * (1 + 0.1 * block.index))


def every_fourth_larger(blocks):
    for block in blocks:
        block.register_forward_hook(lambda block, _, x: x.square().sqrt() if block.index % 4 == 1 else x)


def counted(blocks):
    """Counts calls of all blocks; the sixth call does more."""
    calls = blocks[0].calls = [0]

    def count(_, __, x):
        calls[0] += 1
        return torch.sin(x) if calls[0] == 6 else x

    for block in blocks:
        block.register_forward_hook(count)


def one_hook(blocks):
    blocks[5].up.register_forward_hook(lambda _, __, x: x.relu())


def one_backward_hook(blocks):
    blocks[5].up.register_full_backward_hook(lambda _, gradients, __: (gradients[0] * 2,))


def one_tensor_hook(blocks):
    blocks[5].norm.register_forward_hook(lambda _, __, x: x.register_hook(lambda gradient: gradient * 2) and None)


def one_keeps_its_gradient(blocks):
    blocks[5].norm.register_forward_hook(lambda _, __, x: x.retain_grad())


def two_tied(blocks):
    blocks[6].up.weight = blocks[3].up.weight


def all_tied(blocks):
    for block in blocks[1:]:
        block.up.weight = blocks[0].up.weight


def one_twice(blocks):
    blocks[6] = blocks[5]


def the_next_ones_weight(blocks):
    for block, after in pairwise(blocks):
        block.neighbour = [after]
        block.register_forward_hook(lambda block, _, x: x + block.neighbour[0].up.bias.sum())


def one_frozen(blocks):
    blocks[5].requires_grad_(False)


def skips(model, x):
    """Runs blocks as a U-Net: the second half takes what the first half left."""
    left, half = [], len(model.blocks) // 2
    for block in model.blocks[:half]:
        x = block(x)
        left.append(x)
    for block in model.blocks[half:]:
        x = block(x + left.pop())
    return x


def features(model, x):
    """Runs blocks, and joins the outputs of every fourth one."""
    kept = []
    for index, block in enumerate(model.blocks):
        x = block(x)
        if index % 4 == 3:
            kept.append(x)
    return torch.cat(kept)


def looked_at_later(model, x):
    """Runs blocks, and keeps one output in the middle with which nothing is done."""
    kept = []
    for index, block in enumerate(model.blocks):
        x = block(x)
        if index == 5:
            kept.append(x)
    model.looked_at = kept
    return x


def halfway(model, x):
    outputs = []
    for block in model.blocks:
        x = block(x)
        outputs.append(x)
    return x + outputs[len(outputs) // 2]


def at_random(model, x):
    for block in model.blocks:
        if random.random() < 0.7:
            x = block(x)
    return x


def twice_each(model, x):
    for block in model.blocks:
        x = block(block(x))
    return x


def around_again(model, x):
    return in_turn(model, in_turn(model, x))


def by_number(model, x):
    for index in range(DEPTH):
        x = model.blocks[index](x)
    return x


def backwards(model, x):
    for block in reversed(model.blocks):
        x = block(x)
    return x


def averaged(model, x):
    for block in model.blocks:
        x = x + block(x) / len(model.blocks)
    return x


def reading_ahead(model, x):
    for index, block in enumerate(model.blocks):
        x = block(x) * model.blocks[(index + 3) % len(model.blocks)].up.bias.mean()
    return x


def its_own_gradient(model, x):
    y = in_turn(model, x)
    (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return y + slope


SLOW = [
    "features", "around_again", "reading_ahead", "under_autocast", "averaged", "at_random", "backwards", "each_scaled",
    "by_number", "looked_at_later", "skips", "twice_each", "halfway", "two_tied", "one_backward_hook", "eps",
    "evaluation", "one_keeps_its_gradient", "one_twice", "every_fourth_larger", "its_own_gradient", "one_hook",
    "one_tensor_hook", "the_next_ones_weight", "counted", "all_tied",
]  # fmt: skip
NOT_FOLDED = {
    "dropout": differs("dropout.p", 0.5),
    "eps": differs("norm.eps", 1e-3),
    "evaluation": lambda: model_of(lambda blocks: blocks[5].eval()),
    "shape": differs("dropout", nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1))),
    **{
        change.__name__: lambda change=change: model_of(change)
        for change in (
            each_scaled, every_fourth_larger, counted, one_hook, one_backward_hook, one_tensor_hook,
            one_keeps_its_gradient, two_tied, all_tied, one_twice, the_next_ones_weight, one_frozen,
        )
    },
    **{
        passed.__name__: lambda passed=passed: model_of(passed=passed)
        for passed in (
            skips, features, looked_at_later, halfway, at_random, twice_each, around_again, by_number, backwards,
            averaged, reading_ahead, its_own_gradient, under_autocast,
        )
    },
}  # fmt: skip


@pytest.mark.parametrize("name", but_slow(NOT_FOLDED, slow=SLOW))
def test_all_blocks_stay_where_they_may_differ(name):
    assert not found(NOT_FOLDED[name](), is_shortened)
