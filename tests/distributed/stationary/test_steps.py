"""Operators that move activations, on several ranks: equal to one process that has the samples of all ranks."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lightning_osdp.operations.stationary import Ranks, is_stationary, make_stationary
from lightning_osdp.operations.stationary.exchanges import Call, gather, sum_up, to_features, to_samples
from tests.support.tiers import slow

pytestmark = pytest.mark.distributed

VOCABULARY = 37


def conv(num_inputs, num_outputs):
    """A linear layer whose weight stands the other way."""
    from transformers.pytorch_utils import Conv1D

    return Conv1D(num_outputs, num_inputs)


class Block(nn.Module):
    def __init__(self, width, inner, linear):
        super().__init__()
        self.norm, self.qkv, self.out = (
            nn.LayerNorm(width),
            nn.Linear(width, 3 * width, bias=False),
            linear(width, width),
        )
        self.up, self.act, self.down = linear(width, inner), nn.GELU(), linear(inner, width)

    def forward(self, x):
        query, key, value = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.out(torch.softmax(query @ key.transpose(-1, -2), -1) @ value)
        return x + self.down(self.act(self.up(x)))


class Model(nn.Module):
    """Widths that no number of ranks divides, one of them smaller than four ranks need."""

    def __init__(self, linear=nn.Linear, width=9, inner=31):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, width, padding_idx=3)
        self.blocks = nn.ModuleList(Block(width, inner, linear) for _ in range(2))
        self.narrow, self.wide = linear(width, 2), linear(2, width)
        self.gate, self.lift, self.lower = linear(width, inner), linear(width, inner), linear(inner, width)
        self.query, self.key, self.value = nn.Linear(width, 5, bias=False), linear(width, 5), linear(width, width)
        self.to_query, self.to_key, self.to_value = (linear(width, 16) for _ in range(3))
        self.output = linear(16, width)
        self.by_head, self.of_heads = linear(width, 48), linear(16, width)
        self.head = nn.Linear(width, VOCABULARY)

    def attention(self, x):
        by_head = (
            each(x).unflatten(-1, (4, -1)).transpose(1, 2) for each in (self.to_query, self.to_key, self.to_value)
        )
        return self.output(F.scaled_dot_product_attention(*by_head, is_causal=True).transpose(1, 2).flatten(2))

    def by_heads(self, x):
        query, key, value = self.by_head(x).unflatten(-1, (4, -1)).transpose(1, 2).chunk(3, -1)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.of_heads(mixed.transpose(1, 2).flatten(2))

    def forward(self, indices):
        x = self.embedding(indices)
        for block in self.blocks:
            x = block(x)
        x = x + self.lower(F.silu(self.gate(x)) * self.lift(x))
        x = x + torch.softmax(self.query(x) @ self.key(x).mT, -1) @ self.value(x)
        x = x + self.attention(x)
        x = x + self.by_heads(x)
        return self.head(x + self.wide(torch.tanh(self.narrow(x))))


def _numbers_of_ranks(number):
    found = [torch.zeros((), dtype=torch.int64) for _ in range(dist.get_world_size())]
    dist.all_gather(found, torch.tensor(number))
    return [int(each) for each in found]


def _changed(model):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    kinds = [("embedding", ("embedding",)), ("column", ("head",)), ("row", ("wide",)), ("column", ("narrow",))]
    kinds += [("pair", ("gate", "lift", "lower")), ("column", ("query", "key", "value"))]
    kinds.append(("attention", ("to_query", "to_key", "to_value", "output")))
    kinds.append(("heads", ("by_head", "of_heads")))
    for index in range(2):
        kinds += [("column", (f"blocks.{index}.qkv",)), ("row", (f"blocks.{index}.out",))]
        kinds.append(("pair", (f"blocks.{index}.up", f"blocks.{index}.down")))
    for kind, operators in kinds:
        make_stationary(model, kind, operators, Ranks(mesh=mesh, numbers_of_ranks=_numbers_of_ranks))
    parts = {p for module in model.modules() if is_stationary(module) for p in module.parameters(recurse=False)}
    for block in model.blocks:
        fully_shard(block, mesh=mesh, ignored_params=parts)
    fully_shard(model, mesh=mesh, ignored_params=parts)
    return model


def _batch(step, number, rank):
    """Indices; in the fourth step lengths differ between ranks, and in the last one numbers of samples, one of 0."""
    generator = torch.Generator().manual_seed(100 * step + 10 * number + rank)
    samples = (rank % 3) + (rank > 0) if step == 4 and number == 1 else 2
    return torch.randint(0, VOCABULARY, (samples, 5 + rank * (step == 3)), generator=generator)


def _loss(model, indices):
    return F.cross_entropy(model(indices).flatten(0, 1), indices.flatten(), reduction="sum") / max(1, indices.numel())


OPTIMIZERS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, foreach=True),
    "fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, fused=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9, foreach=False),
}


def trains(dtype, optimizer, linear=nn.Linear):
    """Differences from one process after five steps of two micro-batches that are clipped by norm."""
    dtype, rank, num_ranks = getattr(torch, dtype), dist.get_rank(), dist.get_world_size()
    plain = Model(linear).to(dtype)
    model = _changed(copy.deepcopy(plain))
    configured, reference = OPTIMIZERS[optimizer](model.parameters()), OPTIMIZERS[optimizer](plain.parameters())
    norms = []
    for step in range(5):
        for number in range(2):
            model.set_requires_gradient_sync(number == 1)
            (_loss(model, _batch(step, number, rank)) / 2).backward()
            for other in range(num_ranks):
                (_loss(plain, _batch(step, number, other)) / 2 / num_ranks).backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5).full_tensor()
        norms.append(abs(float(norm - nn.utils.clip_grad_norm_(plain.parameters(), 0.5))))
        for each in (configured, reference):
            each.step()
            each.zero_grad()
    names = dict(plain.named_parameters())
    found = {name: parameter.full_tensor().detach() for name, parameter in model.named_parameters()}
    with torch.no_grad():
        evaluated = (model(_batch(0, 0, rank)) - plain(_batch(0, 0, rank))).abs().max().item()
    whole = StateDictOptions(full_state_dict=True)
    state, states = (
        get_model_state_dict(model, options=whole),
        get_optimizer_state_dict(model, configured, options=whole),
    )
    set_model_state_dict(
        model,
        {name: value + 1 for name, value in state.items()} if rank == 0 else {},
        options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
    )
    loaded = {name: parameter.full_tensor().detach() for name, parameter in model.named_parameters()}
    return {
        "names": [*found] == [*names],
        "weights": max(float((found[name] - names[name]).abs().max()) for name in names),
        "norms": max(norms),
        "evaluated": evaluated,
        "saved": rank > 0 or all(torch.equal(state[name], found[name]) for name in names),
        "states": rank > 0
        or all(
            {field: tuple(value.shape) for field, value in fields.items() if field != "step"}.items()
            <= {
                "exp_avg": tuple(names[name].shape),
                "exp_avg_sq": tuple(names[name].shape),
                "momentum_buffer": tuple(names[name].shape),
            }.items()
            for name, fields in states["state"].items()
        ),
        "loaded": all(torch.equal(loaded[name], found[name] + 1) for name in names),
    }


CASES = [
    ("float64", "adamw", 1e-9),
    ("float64", "fused", 1e-9),
    ("float64", "sgd", 1e-9),
    ("float32", "sgd", 1e-5),
]


@pytest.mark.parametrize(
    ("case", "world_size"),
    [(CASES[0], 2), (CASES[1], 2), *(slow(case, 2) for case in CASES[2:]), *(slow(case, 4) for case in CASES)],
)
def test_five_steps_equal_one_process(ranks, case, world_size):
    dtype, optimizer, tolerance = case
    for found in ranks(world_size).run(trains, dtype=dtype, optimizer=optimizer):
        assert found.pop("weights") < tolerance
        assert found.pop("norms") < tolerance
        assert found.pop("evaluated") < 10 * tolerance
        assert found == dict.fromkeys(found, True)


def test_steps_of_weights_that_stand_the_other_way_equal_one_process(ranks):
    pytest.importorskip("transformers")
    for found in ranks(2).run(trains, dtype="float64", optimizer="adamw", linear=conv):
        assert max(found.pop("weights"), found.pop("norms"), found.pop("evaluated")) < 1e-9
        assert found == dict.fromkeys(found, True)


def exchanges(rows):
    """Checks what each exchange gives, in both directions, for so many rows of each rank."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    call = Call(dist.group.WORLD, rank, tuple(rows), lambda *_: None)
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(sum(rows), 5, generator=generator)
    sizes, at = [2, 2, 1, 0] if num_ranks == 4 else [3, 2], sum(rows[:rank])
    own, part = whole[at : at + rows[rank]], whole.split(sizes, 1)[rank]
    summands = [torch.randn(sum(rows), 5, generator=generator) for _ in range(num_ranks)]
    summed = sum(summands)[at : at + rows[rank]]
    found = {}
    for name, exchange, given, there, gradient, back in (
        ("gather", gather, own, whole, summands[rank], summed),
        ("sum_up", sum_up, summands[rank], summed, own, whole),
        ("to_samples", lambda x, call: to_samples(x, call, 5), part, own, own, part),
        ("to_features", to_features, own, part, part, own),
    ):
        leaf = given.clone().requires_grad_()
        got = exchange(leaf, call)
        got.backward(gradient)
        found[name] = torch.allclose(got, there), torch.allclose(leaf.grad, back), got.shape == there.shape
    return found


@pytest.mark.parametrize("rows", [[3, 3], [2, 0], [0, 0], [4, 4, 4, 4], [1, 5, 0, 2]])
def test_exchanges_bring_what_they_say_in_both_directions(ranks, rows):
    for found in ranks(len(rows)).run(exchanges, rows=rows):
        assert found == dict.fromkeys(found, (True, True, True))


class Dropping(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(8, 16, bias=False), nn.Dropout(0.5), nn.Linear(16, 8, bias=False)

    def forward(self, x):
        return self.down(self.drop(self.up(x)))


def masks():
    """Masks of features, as each rank draws them under one seed, and what a step computes with the masks of all."""
    model = Dropping()
    for weight in model.parameters():
        weight.data.fill_(1.0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    make_stationary(model, "pair", ("up", "down"), Ranks(mesh=mesh, numbers_of_ranks=_numbers_of_ranks))
    seen = []
    model.drop.register_forward_hook(lambda _, __, output: seen.append(output.plain().detach() > 0))
    torch.manual_seed(0)
    output = model(torch.ones(3, 8))
    whole = [
        torch.zeros(3 * dist.get_world_size(), 16 // dist.get_world_size(), dtype=torch.bool)
        for _ in range(dist.get_world_size())
    ]
    dist.all_gather(whole, seen[0])
    at = 3 * dist.get_rank()
    expected = (torch.cat(whole, 1)[at : at + 3] * 16.0).sum(1, keepdim=True).expand(3, 8)
    return [mask.tolist() for mask in whole], torch.equal(output, expected), torch.get_rng_state().tolist()


def test_dropout_between_a_pair_has_another_mask_on_each_rank(ranks):
    (masks_0, is_right_0, state_0), (masks_1, is_right_1, state_1) = ranks(2).run(masks)
    assert masks_0 == masks_1
    assert masks_0[0] != masks_0[1]
    assert is_right_0
    assert is_right_1
    assert state_0 == state_1
    assert ranks(2).run(masks)[0][0] == masks_0
