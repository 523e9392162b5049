"""Places of ranks' blocks in results: each function is compared with itself on blocks in another order."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from lightning_osdp.operations.stationary.blocks import Blocks, MixedError, follow, gives_sizes

SAMPLES, LENGTH, HEADS, SIZE = 2, 3, 4, 6
WIDTH = HEADS * SIZE


class Following(TorchFunctionMode):
    """Follows blocks of these tensors through functions."""

    def __init__(self, *tensors, number=None, num_parts=1):
        super().__init__()
        self.known = WeakIdKeyDictionary()
        for tensor in tensors:
            self.known[tensor] = Blocks(-1, number or tensor.shape[-1] // num_parts, num_parts)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        if any(self.known.get(each) for each in tensors) and not gives_sizes(func):
            found = follow(func, args, kwargs, self.known.get)
            made = [each for each in tree_leaves(result) if isinstance(each, Tensor)]
            assert len(made) == len(found.blocks)
            for each, blocks in zip(made, found.blocks, strict=True):
                self.known[each] = blocks
        return result


def by_head(x, heads=HEADS):
    return x.view(SAMPLES, LENGTH, heads, -1).transpose(1, 2)


def merged(x):
    return x.transpose(1, 2).reshape(SAMPLES, LENGTH, -1)


def rotated(x):
    """As transformers writes it."""
    cos, sin = torch.rand(2, LENGTH, SIZE, generator=torch.Generator().manual_seed(0)).unbind(0)
    first, second = x[..., : SIZE // 2], x[..., SIZE // 2 :]
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def by_hand(q, k, v):
    weights = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
    mask = torch.tril(torch.ones(LENGTH, LENGTH)).view(1, 1, LENGTH, LENGTH)
    weights = weights.masked_fill(mask[:, :, :LENGTH, :LENGTH] == 0, float("-inf"))
    return F.dropout(F.softmax(weights, dim=-1, dtype=torch.float32), 0.0) @ v


def complex_turned(x):
    turned = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2)) * torch.ones(
        LENGTH, SIZE // 2, dtype=torch.cfloat
    )
    return torch.view_as_real(turned).flatten(3).type_as(x)


def repeated(x, number):
    samples, heads, length, size = x.shape
    return (
        x[:, :, None, :, :].expand(samples, heads, number, length, size).reshape(samples, heads * number, length, size)
    )


sdpa = F.scaled_dot_product_attention
NORM = nn.RMSNorm(SIZE)

ATTENTIONS = {
    "flash": lambda q, k, v: merged(sdpa(by_head(q), by_head(k), by_head(v), is_causal=True)),
    "with a mask": lambda q, k, v: merged(sdpa(by_head(q), by_head(k), by_head(v), attn_mask=torch.eye(LENGTH))),
    "by hand": lambda q, k, v: merged(by_hand(by_head(q), by_head(k), by_head(v))),
    "matmul": lambda q, k, v: merged(torch.matmul(torch.matmul(by_head(q), by_head(k).mT).softmax(-1), by_head(v))),
    "rotary": lambda q, k, v: merged(sdpa(rotated(by_head(q)), rotated(by_head(k)), by_head(v))),
    "complex": lambda q, k, v: merged(sdpa(complex_turned(by_head(q)), complex_turned(by_head(k)), by_head(v))),
    "normalized": lambda q, k, v: merged(sdpa(NORM(by_head(q)), F.layer_norm(by_head(k), (SIZE,)), by_head(v))),
    "by its mean": lambda q, k, v: merged(
        sdpa(by_head(q) / by_head(q).pow(2).mean(-1, keepdim=True), by_head(k), by_head(v))
    ),
    "unflattened": lambda q, k, v: (
        sdpa(*(x.unflatten(-1, (HEADS, SIZE)).permute(0, 2, 1, 3) for x in (q, k, v))).permute(0, 2, 1, 3).flatten(2)
    ),
    "clipped": lambda q, k, v: merged(
        sdpa(by_head(q).clamp(-1, 1).contiguous(), by_head(k), by_head(v).to(torch.float32))
    ),
    "first position": lambda q, k, v: merged(sdpa(by_head(q), by_head(k), by_head(v)))[:, 0],
    "samples and positions in one": lambda q, k, v: merged(sdpa(by_head(q), by_head(k), by_head(v)).clone()).view(
        -1, WIDTH
    ),
}
GROUPED = {
    "enable_gqa": lambda q, k, v: merged(sdpa(by_head(q), by_head(k, 2), by_head(v, 2), enable_gqa=True)),
    "expanded": lambda q, k, v: merged(sdpa(by_head(q), repeated(by_head(k, 2), 2), repeated(by_head(v, 2), 2))),
    "repeat_interleave": lambda q, k, v: merged(
        sdpa(by_head(q), by_head(k, 2).repeat_interleave(2, dim=1), torch.repeat_interleave(by_head(v, 2), 2, dim=1))
    ),
}


def in_another_order(x, number, order, dim=-1):
    return torch.cat([x.chunk(number, dim)[place] for place in order], dim)


def inputs(*widths):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(SAMPLES, LENGTH, width, generator=generator) for width in widths]


@pytest.mark.parametrize("name", [*ATTENTIONS, *GROUPED])
def test_attention_does_the_same_to_each_block(name):
    """Blocks of queries, keys and values in another order make a result with its blocks in that order."""
    function, number = (ATTENTIONS | GROUPED)[name], 2 if name in GROUPED else HEADS
    given = inputs(WIDTH, *[number * SIZE] * 2)
    with Following(*given) as following:
        result = function(*given)
    assert following.known[result] == Blocks(-1, number)
    order = [*range(1, number), 0]
    found = function(*(in_another_order(x, number, order) for x in given))
    torch.testing.assert_close(found, in_another_order(result, number, order))


@pytest.mark.parametrize("name", [*ATTENTIONS, *GROUPED])
def test_fewer_blocks_are_blocks_too(name):
    given = inputs(WIDTH, *[(2 if name in GROUPED else HEADS) * SIZE] * 2)
    with Following(*given, number=2) as following:
        result = (ATTENTIONS | GROUPED)[name](*given)
    assert following.known[result] == Blocks(-1, 2)


TOGETHER = {
    "split": lambda x: merged(sdpa(*(by_head(part) for part in x.split(WIDTH, dim=2)))),
    "chunks": lambda x: merged(by_hand(*(by_head(part) for part in torch.chunk(x, 3, -1)))),
    "slices": lambda x: merged(sdpa(by_head(x[..., :WIDTH]), *map(by_head, x[..., WIDTH:].chunk(2, -1)))),
    "a dimension": lambda x: merged(sdpa(*x.reshape(SAMPLES, LENGTH, 3, HEADS, SIZE).permute(2, 0, 3, 1, 4).unbind(0))),
    "indices": lambda x: merged(
        sdpa(*(x.view(SAMPLES, LENGTH, 3, HEADS, SIZE)[:, :, i].mT.mT.transpose(1, 2) for i in range(3)))
    ),
    "heads of all": lambda x: merged(sdpa(*x.view(SAMPLES, LENGTH, 3 * HEADS, SIZE).transpose(1, 2).split(HEADS, 1))),
    "by itself": lambda x: merged(sdpa(*(by_head(part) for part in (x * 2.0).clone().tensor_split(3, -1)))),
}


@pytest.mark.parametrize("number", [HEADS, 2])
@pytest.mark.parametrize("name", TOGETHER)
def test_queries_keys_and_values_of_one_operator_have_blocks_each(name, number):
    (x,) = inputs(3 * WIDTH)
    with Following(x, number=number if number == 2 else None, num_parts=3) as following:
        result = TOGETHER[name](x)
    assert following.known[result] == Blocks(-1, number)
    order = [*range(1, number), 0]
    found = TOGETHER[name](torch.cat([in_another_order(part, number, order) for part in x.chunk(3, -1)], -1))
    torch.testing.assert_close(found, in_another_order(result, number, order))


APART = {
    "halves": lambda x: x.chunk(2, -1),
    "a part of queries": lambda x: x[..., : WIDTH // 2],
    "from keys to values": lambda x: x[..., WIDTH // 2 : WIDTH + WIDTH // 2],
    "heads before parts": lambda x: x.view(SAMPLES, LENGTH, HEADS, 3 * SIZE),
    "parts that are cut": lambda x: x.view(SAMPLES, LENGTH, 2, -1),
    "as one": lambda x: x.view(SAMPLES, LENGTH, 3, WIDTH).flatten(2),
    "with one of them": lambda x: x.chunk(3, -1)[0] + x.view(SAMPLES, LENGTH, 3, WIDTH)[:, :, 0, :1],
}


@pytest.mark.parametrize("name", APART)
def test_parts_that_are_cut_or_joined_otherwise_are_refused(name):
    (x,) = inputs(3 * WIDTH)
    with pytest.raises(MixedError), Following(x, number=HEADS, num_parts=3):
        APART[name](x)


OTHERS = {
    "slopes": lambda x: by_head(x) * torch.rand(HEADS, 1, 1),
    "of features": lambda x: x + torch.rand(WIDTH),
    "over heads": lambda x: by_head(x).sum(1),
    "over all": lambda x: x.mean(-1),
    "softmax of heads": lambda x: by_head(x).softmax(dim=1),
    "without a dimension": lambda x: x.sum(),
    "norm of features": lambda x: F.layer_norm(x, (WIDTH,)),
    "linear": lambda x: F.linear(x, torch.rand(5, WIDTH)),
    "of one tensor": lambda x: by_head(x) @ torch.rand(SIZE, SIZE),
    "between heads": lambda x: x.view(SAMPLES, LENGTH, HEADS, SIZE) @ x.view(SAMPLES, LENGTH, HEADS, SIZE).mT,
    "some heads": lambda x: by_head(x)[:, :2],
    "one head": lambda x: by_head(x)[:, 0],
    "every other head": lambda x: by_head(x)[:, ::2],
    "heads of a list": lambda x: by_head(x)[:, [1, 0, 3, 2]],
    "halves of features": lambda x: torch.cat(x.chunk(2, -1)[::-1], -1),
    "along heads": lambda x: torch.cat([by_head(x), by_head(x)], 1),
    "turned": lambda x: by_head(x).flip(1),
    "rolled": lambda x: by_head(x).roll(1, 1),
    "positions and heads in one": lambda x: by_head(x).transpose(1, 2).transpose(2, 3).reshape(SAMPLES, LENGTH, WIDTH),
    "heads that are cut": lambda x: x.view(SAMPLES, LENGTH, 1, 1, 5, -1) if WIDTH % 5 == 0 else x.reshape(SAMPLES, -1),
    "samples and heads in one": lambda x: by_head(x).reshape(SAMPLES * HEADS, LENGTH, SIZE),
    "cumulative": lambda x: by_head(x).cumsum(1),
    "joined by another name": lambda x: torch.cat([by_head(x), by_head(x)], axis=1),
    "over no dimension": lambda x: by_head(x).sum(dim=[]),
    "slopes of each head": lambda x: F.prelu(by_head(x), torch.rand(HEADS)),
    "as another": lambda x: x.view(SAMPLES, LENGTH, HEADS, SIZE).view_as(x.view(SAMPLES, SIZE, HEADS, LENGTH)),
    "outer product": lambda x: torch.outer(x[0, 0], x[0, 0]),
    "numbers of a generator": lambda x: (x * 0).bernoulli(generator=torch.Generator()),
    "sorted": lambda x: x.sort(-1).values,
    "written": lambda x: x.__setitem__(slice(None), 0.0),
    "written to another": lambda x: torch.zeros(x.shape).add_(x),
    "a mask of each head": lambda x: sdpa(
        by_head(x), by_head(x), by_head(x), attn_mask=torch.rand(1, HEADS, LENGTH, LENGTH)
    ),
    "its own keys": lambda x: sdpa(by_head(x), torch.rand(SAMPLES, HEADS, LENGTH, SIZE), by_head(x)),
    "two orders": lambda x: (
        by_head(x).transpose(1, 2) + by_head(x)[:, :LENGTH].transpose(1, 2).transpose(1, 2).transpose(1, 2)
    ),
    "multi-head of torch": lambda x: nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)(x, x, x)[0],
}


@pytest.mark.parametrize("name", OTHERS)
def test_functions_that_mix_blocks_or_know_them_apart_are_refused(name):
    (x,) = inputs(WIDTH)
    with pytest.raises(MixedError), Following(x):
        OTHERS[name](x)


@pytest.mark.parametrize(("dropout", "is_random"), [(0.0, False), (0.5, True)])
def test_attention_that_drops_draws_random_numbers(dropout, is_random):
    def of_all(_):
        return Blocks(-3, HEADS)

    q, k, v = (by_head(x) for x in inputs(*[WIDTH] * 3))
    assert follow(sdpa, (q, k, v), {"dropout_p": dropout}, of_all).is_random == is_random
    assert follow(F.dropout, (q, dropout), {}, of_all).is_random == is_random


def test_functions_are_tried_without_a_change_of_what_they_are_given_and_of_random_numbers():
    (x,) = inputs(WIDTH)
    before, state = x.clone(), torch.get_rng_state()
    assert follow(Tensor.mul_, (x, 2.0), {}, lambda _: Blocks(-1, HEADS)).blocks == (Blocks(-1, HEADS),)
    follow(F.dropout, (x, 0.5), {}, lambda _: Blocks(-1, HEADS))
    assert torch.equal(x, before)
    assert torch.equal(torch.get_rng_state(), state)
