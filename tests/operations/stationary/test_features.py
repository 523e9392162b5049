"""Tensors between the two operators of a pair: elementwise functions alone, and random numbers of each rank."""

import math
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from lightning_osdp.errors import ConfigurationError
from lightning_osdp.operations.stationary.between import Pair
from lightning_osdp.operations.stationary.exchanges import Call
from lightning_osdp.operations.stationary.features import Features


def features(values, rank=0, pair=None):
    call = Call(None, rank, (2, 2), lambda _: None)
    return Features.of(values, pair or Pair(("up", "down")), call, torch.Size([2]))


def new_gelu(x):
    """As transformers writes it."""
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


ELEMENTWISE = {
    "relu": F.relu,
    "relu_": lambda x: F.relu(x * 1, inplace=True),
    "module": nn.GELU("tanh"),
    "silu": F.silu,
    "leaky": nn.LeakyReLU(0.1),
    "new_gelu": new_gelu,
    "gated": lambda x: x * torch.sigmoid(1.702 * x),
    "scaled": lambda x: x * nn.Parameter(torch.tensor(0.5)),
    "as its kind": lambda x: x * 2 if x.dtype.is_floating_point and x.dim() == 2 and x.requires_grad else x.neg(),
    "prelu": nn.PReLU(),
    "precision": lambda x: F.gelu(x.float()).to(x.dtype),
    "evaluated dropout": nn.Dropout(0.5).eval(),
    "contiguous": lambda x: x.contiguous().clone(),
}


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_elementwise_functions_compute_as_on_plain_tensors(name):
    values = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    function = ELEMENTWISE[name].double() if isinstance(ELEMENTWISE[name], nn.Module) else ELEMENTWISE[name]
    for _ in range(2):  # the second time it is known
        found = function(features(values))
        assert isinstance(found, Features)
        assert torch.equal(found.plain(), function(values))
        (of_found,) = torch.autograd.grad(found.plain().sum(), values)
        (of_values,) = torch.autograd.grad(function(values).sum(), values)
        assert torch.equal(of_found, of_values)


def test_functions_are_told_with_their_numbers_and_texts():
    told = []
    call = Call(None, 0, (4,), lambda _: None, told.append)
    given = Features.of(torch.randn(4, 3), Pair(("up", "down")), call, torch.Size([2]))
    for function in (
        lambda x: x * 2,
        lambda x: x * 2,
        lambda x: x * 3,
        lambda x: F.dropout(x, 0.5, training=False),
        lambda x: F.dropout(x, 0.25, training=False),
        F.gelu,
        lambda x: F.gelu(x, approximate="tanh"),
        lambda x: x.to("cpu"),
        lambda x: x.to("cpu:0"),
        lambda x: x.dtype.is_floating_point and x.requires_grad,
    ):
        function(given)
    assert told[0] == told[1]
    assert told[-2] == told[-1]
    assert len(told) == 9
    assert len({*told}) == 7


READS = {
    "shape": lambda x: x.shape[-1],
    "size": lambda x: x.size(-1),
    "numel": torch.numel,
    "nelement": lambda x: x.nelement(),
    "__len__": len,
    "stride": lambda x: x.stride(0),
    "nbytes": lambda x: x.nbytes,
}
"""Functions that give numbers of this rank's features."""
OTHERS = {
    "softmax": lambda x: F.softmax(x, -1),
    "normalized": lambda x: F.layer_norm(x, (3,)),
    "module": nn.LayerNorm(3),
    "batch": nn.BatchNorm1d(3),
    "batch without values": nn.BatchNorm1d(3, affine=False, track_running_stats=False),
    "per feature": lambda x: x * torch.randn(3),
    "mask": lambda x: x.masked_fill(torch.rand(4, 1) > 0.5, 0),
    "mean": lambda x: x - x.mean(),
    "glu": lambda x: F.glu(torch.cat([x, x], -1)),
    "flipped": lambda x: x.flip(-1),
    "cumulative": lambda x: x.cumsum(0),
    "linear": nn.Linear(3, 3),
    "indexed": lambda x: x[:2],
    "channels": lambda x: F.dropout1d(x[None], 0.5)[0],
    "item": lambda x: x.max().item(),
    "joined": lambda x: torch.cat([x, x]),
    "hooked": lambda x: x.register_hook(print),
    "number of this rank": lambda x: x * torch.tensor(0.5),
    "buffer of this rank": lambda x: x * nn.BatchNorm1d(3).num_batches_tracked,
    "made of a parameter": lambda x: x * nn.Parameter(torch.tensor(0.5)).exp(),
    "written": lambda x: x.__setitem__(slice(None), 0.0),
    **{f"reads {name}": lambda x, read=read: x / read(x) for name, read in READS.items()},
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_functions_are_refused_each_time(name):
    pair = Pair(("up", "down"))
    for _ in range(2):
        with pytest.raises(
            ConfigurationError, match="only elementwise functions of one tensor between 'up' and 'down'"
        ):
            OTHERS[name](features(torch.randn(4, 3), pair=pair))


def test_features_go_together_where_they_are_made_of_one_input():
    pair, call = Pair(("gate", "up", "down")), Call(None, 0, (2, 2), lambda _: None)
    gate, up = torch.randn(4, 3), torch.randn(4, 3)
    found = F.silu(Features.of(gate, pair, call, torch.Size([2]))) * Features.of(up, pair, call, torch.Size([2]))
    assert torch.equal(found.plain(), F.silu(gate) * up)
    with pytest.raises(ConfigurationError, match=r"between 'gate', 'up' and 'down'.*, of features .* another input"):
        found * features(up, pair=pair)


def test_an_error_says_which_function():
    with pytest.raises(ConfigurationError, match=re.escape("got softmax, which runs _softmax")):
        F.softmax(features(torch.randn(4, 3)), -1)


class Seen(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.classes = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.classes |= {type(each) for each in args if isinstance(each, torch.Tensor)}
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("name", ["shape", "size", "numel"])
def test_an_error_says_that_sizes_are_of_this_rank(name):
    with pytest.raises(ConfigurationError, match=f"got {name}, which gives what only this rank's features have"):
        READS[name](features(torch.randn(4, 3)))


def test_backward_meets_plain_tensors_alone():
    values = torch.randn(4, 3, requires_grad=True)
    found = F.silu(F.dropout(F.gelu(features(values)), 0.5)).plain().sum()
    with Seen() as seen:
        found.backward()
    assert seen.classes == {torch.Tensor}


def masks(rank, times=1):
    torch.manual_seed(0)
    pair = Pair(("up", "down"))
    return [F.dropout(features(torch.ones(64, 64), rank, pair), 0.25).plain() for _ in range(times)]


def test_dropout_draws_other_numbers_on_each_rank_and_the_same_with_one_seed():
    (of_0,), (of_1,), (again,) = masks(0), masks(1), masks(0)
    assert torch.equal(of_0, again)
    assert 0.55 < (of_0 == of_1).float().mean() < 0.7  # 0.75 ** 2 + 0.25 ** 2 = 0.625
    assert 0.7 < (of_0 > 0).float().mean() < 0.8
    first, second = masks(0, times=2)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("shape", [(0, 64), (64, 0), (0, 0)])
def test_ranks_draw_alike_where_a_tensor_is_empty(shape):
    """Without rows at first, or without features at all."""
    found, states = [], []
    for rank in (0, 1):
        torch.manual_seed(0)
        pair = Pair(("up", "down"))
        empty = F.dropout(features(torch.ones(shape), 0, pair), 0.25)
        assert empty.plain().shape == shape
        found.append(F.dropout(features(torch.ones(64, 64), rank, pair), 0.25).plain())
        states.append(torch.get_rng_state())
    assert not torch.equal(*found)
    assert torch.equal(*states)
    torch.manual_seed(0)
    F.dropout(features(torch.ones(64, 64)), 0.25)
    F.dropout(features(torch.ones(64, 64)), 0.25)
    assert torch.equal(torch.get_rng_state(), states[0])


def test_random_numbers_go_on_alike_on_all_ranks():
    states = []
    for rank in (0, 1):
        masks(rank, times=2)
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


def test_functions_without_random_numbers_leave_the_state():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    F.gelu(features(torch.randn(4, 3, generator=torch.Generator())))
    assert torch.equal(torch.get_rng_state(), before)


def test_dropout_that_runs_again_draws_the_same():
    torch.manual_seed(0)
    pair = Pair(("up", "down"))
    values = torch.randn(32, 16, requires_grad=True)

    def block(x):
        return F.dropout(F.gelu(features(x, 1, pair)), 0.5).plain() ** 2

    kept = torch.get_rng_state()
    (of_checkpoint,) = torch.autograd.grad(checkpoint(block, values, use_reentrant=False).sum(), values)
    torch.set_rng_state(kept)
    (plain,) = torch.autograd.grad(block(values).sum(), values)
    assert torch.equal(of_checkpoint, plain)
