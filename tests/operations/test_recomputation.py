"""Blocks that keep results of heavy operations where they recompute: bit for bit as blocks that keep everything."""

import copy
import gc
import itertools
import weakref
from collections import Counter
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import _get_current_function_mode_stack
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointError, checkpoint

from lightning_osdp.operations.recomputation import KeptResults, _Result, is_heavy
from lightning_osdp.profiler import LiveBytes

aten = torch.ops.aten
ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu


class Heavy(TorchDispatchMode):
    """Heavy operations as they are dispatched, with the bytes of their results."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        returned = func(*args, **kwargs)
        if is_heavy(func, args, kwargs):
            tensors = returned if isinstance(returned, tuple) else (returned,)
            sizes = (each.untyped_storage().nbytes() for each in tensors if isinstance(each, Tensor))
            self.found.append((func.overloadpacket, sum(sizes)))
        return returned

    @property
    def names(self):
        return Counter(packet for packet, _ in self.found)


class Kept:
    """A block at a level, as torch's checkpoint runs it."""

    def __init__(self, block, positions, *, compares=True):
        self.block, self.differences = block, 0
        self.results = KeptResults(positions, self.note_difference if compares else None)

    def note_difference(self):
        self.differences += 1
        self.results.is_refused = True

    def __call__(self, *given):
        return checkpoint(self.block, *given, use_reentrant=False, context_fn=self.contexts)

    def contexts(self):
        is_training = not isinstance(self.block, nn.Module) or self.block.training
        return self.results.contexts(is_training=is_training)


def step(run, block, x, seed=1):
    """Output, gradients of the input and of all parameters, and heavy operations in backward."""
    torch.manual_seed(seed)
    x = x.clone().requires_grad_()
    block.zero_grad()
    y = run(x)
    with Heavy() as heavy:
        y.float().square().sum().backward()
    return [y.detach(), x.grad, *(parameter.grad for parameter in block.parameters())], heavy.names


def assert_equal(found, expected):
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert (one is None and other is None) or torch.equal(one, other)


def heavy_of(block, x, around=nullcontext):
    """Heavy operations of one forward."""
    torch.manual_seed(1)
    with around(), Heavy() as heavy:
        block(x.clone().requires_grad_())
    return heavy.found


def assert_as_kept(block, x, positions=None, *, around=nullcontext, differences=0, steps=3):
    """Steps of a block at a level are those of the block itself: the first compares, the others hand back."""
    level = Kept(block, range(len(heavy_of(block, x, around))) if positions is None else positions)
    for seed in range(steps):
        with around():
            expected, _ = step(block, block, x, seed)
        with around():
            found, _ = step(level, block, x, seed)
        assert_equal(found, expected)
    assert level.differences == differences
    assert not _get_current_function_mode_stack()
    return level


def held_bytes(level, x):
    """Bytes that live after a forward of a block at a level beside input and output; the output."""
    with LiveBytes("cpu") as live:
        live.track([x, *level.block.parameters()])
        before = live.current_bytes
        y = level(x)
        return live.current_bytes - before - y.untyped_storage().nbytes(), y


class Attention(nn.Module):
    """Pre-norm transformer block: products 0, 2, 3 and 4, and attention 1."""

    def __init__(self, dropout=0.0):
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.out, self.norm = nn.Linear(16, 48), nn.Linear(16, 16), nn.LayerNorm(16)
        self.up, self.down, self.dropout = nn.Linear(16, 64), nn.Linear(64, 16), dropout

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = (t.view(batch, length, 2, -1).transpose(1, 2) for t in self.qkv(self.norm(x)).split(width, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=self.dropout if self.training else 0.0)
        x = x + F.dropout(self.out(y.transpose(1, 2).reshape(batch, length, width)), self.dropout, self.training)
        return x + F.dropout(self.down(F.gelu(self.up(x))), self.dropout, self.training)


@pytest.fixture
def x():
    return torch.randn(2, 8, 16, generator=torch.Generator().manual_seed(0))


# ---- which operations are heavy


def operands(*shapes):
    return [torch.ones(shape) for shape in shapes]


@pytest.mark.parametrize(
    ("function", "args", "kwargs", "expected"),
    [
        (aten.mm.default, operands((2, 3), (3, 4)), {}, True),
        (aten.mm.out, operands((2, 3), (3, 4)), {"out": torch.empty(2, 4)}, False),
        (aten.addmm.default, operands(4, (2, 3), (3, 4)), {"beta": 2}, True),
        (aten.addmm_.default, operands((2, 4), (2, 3), (3, 4)), {}, False),
        (aten.convolution.default, [*operands((1, 1, 5), (1, 1, 2)), None, [1], [0], [1], False, [0], 1], {}, True),
        (aten.add.Tensor, operands(2, 2), {}, False),
        (ATTENTION.default, operands(*[(1, 1, 2, 4)] * 3), {}, True),
        (ATTENTION.default, operands(*[(1, 1, 2, 4)] * 3), {"dropout_p": 0.5}, False),
        (ATTENTION.default, [*operands(*[(1, 1, 2, 4)] * 3), 0.5], {}, False),
        (ATTENTION.default, [*operands(*[(1, 1, 2, 4)] * 3), 0.0, True], {}, True),
        (aten._scaled_dot_product_efficient_attention.default, [*operands(2, 2, 2), None, True, 0.1], {}, False),
        (aten._scaled_dot_product_efficient_attention.default, [*operands(2, 2, 2), None, True], {}, True),
        (aten.mm.default, [TwoTensor(*operands((2, 3), (2, 3))), torch.ones(3, 4)], {}, False),
        (aten.mm.default, [torch.ones(2, 3).to_sparse(), torch.ones(3, 4)], {}, False),
        (torch.ops.higher_order.cond, (), {}, False),
    ],
)
def test_heavy_operations_are_deterministic_and_return_tensors_of_their_own(function, args, kwargs, expected):
    assert is_heavy(function, args, kwargs) is expected


# ---- what is kept, run again and handed back


@pytest.mark.parametrize("positions", [c for n in range(6) for c in itertools.combinations(range(5), n)])
def test_gradients_bytes_and_operations_of_every_level(x, positions):
    block = Attention()
    heavy = heavy_of(block, x)
    assert [packet for packet, _ in heavy] == [aten.addmm, ATTENTION, *[aten.addmm] * 3]
    expected, own = step(block, block, x)
    level = Kept(block, positions)
    kept_bytes = sum(heavy[position][1] for position in positions)
    for number in range(3):
        given = x.clone().requires_grad_()
        found_bytes, y = held_bytes(level, given)
        assert found_bytes == kept_bytes
        del y
        found, again = step(level, block, x)
        assert_equal(found, expected)
        # backward needs no result of the last product; the first time, the others are compared with new ones
        handed_back = positions if number else ()
        rest = [heavy[i][0] for i in range(4) if i not in handed_back]
        assert again - own == Counter(rest)
    assert level.differences == 0


class Products(nn.Module):
    """Ways to heavy operations other than layers."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.weight, self.conv = nn.Parameter(torch.randn(16, 16) / 4), nn.Conv1d(8, 8, 3, padding=1)
        self.bilinear = nn.Bilinear(16, 16, 16)

    def forward(self, x):
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = torch.sin(torch.einsum("btc,cd->btd", x, self.weight))
        x = torch.sin(self.conv(x) @ self.weight)
        x = torch.sin(torch.ops.aten.mm(x[0], self.weight) + torch.baddbmm(x, x.mT.mT, self.weight.expand(2, 16, 16)))
        return torch.sin(self.bilinear(x, x)) + torch.sin(Product.apply(x[1], self.weight))


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return (x @ weight).tanh() @ weight

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        with torch.enable_grad():
            inputs = x.detach().requires_grad_(), weight.detach().requires_grad_()
            y = (inputs[0] @ inputs[1]).tanh() @ inputs[1]
        return torch.autograd.grad(y, inputs, gradient)


def test_positions_are_those_of_operations_as_a_dispatch_mode_sees_them(x):
    block = Products()
    heavy = heavy_of(block, x)
    assert len(heavy) > 9
    for position, (_, num_bytes) in enumerate(heavy):
        level = Kept(block, [position])
        for _ in range(3):
            assert held_bytes(level, x.clone().requires_grad_())[0] == num_bytes
            level(x.clone().requires_grad_()).sum().backward()
        assert level.differences == 0
    assert_as_kept(block, x)


def test_results_live_as_long_as_the_graph(x):
    block = Attention()
    level = Kept(block, [0, 3])
    for _ in range(2):
        y = level(x.clone().requires_grad_())
        storages = [weakref.ref(t.untyped_storage()) for t in kept_tensors(y)]
        assert len(storages) == 2
        assert all(each() is not None for each in storages)
        y.sum().backward()
        del y
        assert all(each() is None for each in storages)


def kept_tensors(y):
    """Tensors that are kept while an output is there."""
    assert y.grad_fn is not None
    gc.collect()
    found = [value for result in gc.get_objects() if isinstance(result, _Result) for value in result.values]
    return [value for value in found if isinstance(value, Tensor)]


def test_views_of_a_kept_result_hold_it_once(x):
    class Split(nn.Linear):
        def forward(self, x):
            q, _, v = super().forward(x).split(16, -1)
            return torch.sin(v.contiguous() * 2) * torch.sin(q)

    block = Split(16, 48)
    level = assert_as_kept(block, x)
    assert held_bytes(level, x.clone().requires_grad_())[0] == 2 * 8 * 48 * 4


def test_positions_that_a_forward_does_not_have_keep_nothing(x):
    block = Attention()
    level = assert_as_kept(block, x, [7, 99])
    assert held_bytes(level, x.clone().requires_grad_())[0] == 0


# ---- random numbers


class Dropouts(nn.Module):
    def __init__(self, drop):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.drop = nn.Linear(16, 16), nn.Linear(16, 16), drop

    def forward(self, x):
        return self.second(torch.sin(self.drop(self.first(torch.tanh(self.drop(self.first(x)))))))


@pytest.mark.parametrize(
    "block",
    [
        Attention(0.2),
        Dropouts(lambda x: F.dropout(x, 0.5)),
        Dropouts(lambda x: torch.native_dropout(x, 0.5, True)[0]),
        Dropouts(lambda x: x * torch.empty_like(x).bernoulli_(0.5)),
    ],
    ids=["attention", "dropout", "native_dropout", "bernoulli_"],
)
def test_random_operations_run_again_with_the_same_numbers(x, block):
    assert_as_kept(block, x)
    torch.manual_seed(1)
    block(x.requires_grad_())
    expected = torch.rand(3)
    torch.manual_seed(1)
    Kept(block, [0])(x)
    assert torch.equal(torch.rand(3), expected)


def test_what_is_learned_in_training_is_not_used_in_evaluation(x):
    """In training attention is random and no heavy operation: it is made of others, which have other positions."""
    block = Attention(0.2)
    level = Kept(block, [1])
    for is_training in (True, False, True, False):
        block.train(is_training)
        heavy = heavy_of(block, x)
        assert (heavy[1][0] is ATTENTION) is not is_training
        assert held_bytes(level, x.clone().requires_grad_())[0] == heavy[1][1]
        assert_equal(step(level, block, x)[0], step(block, block, x)[0])


# ---- autocast


def autocast():
    return torch.autocast("cpu", torch.bfloat16)


def test_autocast(x):
    assert_as_kept(Attention(), x, around=autocast)


class Shared(nn.Linear):
    """Layer that is called before the block and in it, so that autocast has cached its weight."""

    def __init__(self):
        torch.manual_seed(0)
        super().__init__(16, 16)

    def block(self, x):
        return torch.tanh(super().forward(torch.sin(super().forward(x))))


def test_a_weight_that_autocast_has_cached(x):
    layer = Shared()
    level = Kept(layer.block, [0, 1])

    def run(block):
        def loss(x):
            with autocast():
                return block(layer(x))

        return loss

    for _ in range(3):
        assert_equal(step(run(level), layer, x)[0], step(run(layer.block), layer, x)[0])
    assert level.differences == 0


def test_weights_in_bf16(x):
    assert_as_kept(Attention().bfloat16(), x.bfloat16())


# ---- results that the block writes to


class Writing(nn.Module):
    def __init__(self, write):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.write = nn.Linear(16, 16), nn.Linear(16, 16), write

    def forward(self, x):
        return torch.sin(self.second(torch.sin(self.write(self.first(x), x))))


def through_data(h, x):
    h.data.add_(1.0)
    return h


def through_numpy(h, x):
    h.detach().numpy()[...] += 1
    return h


def through_dlpack(h, x):
    torch.from_dlpack(h.detach()).add_(1.0)
    return h


def through_a_view(h, x):
    h[..., :4].add_(1.0)
    return h


SEEN = {
    "relu_": lambda h, x: F.relu_(h),
    "add_": lambda h, x: h.add_(x),
    "view": through_a_view,
    "data": through_data,
    "numpy": through_numpy,
    "dlpack": through_dlpack,
}


@pytest.mark.parametrize("write", SEEN)
def test_operations_whose_results_are_written_to_run_again(x, write):
    block = Writing(SEEN[write])
    level = assert_as_kept(block, x)
    assert held_bytes(level, x.clone().requires_grad_())[0] == 2 * 8 * 16 * 4  # of the second alone


@pytest.mark.parametrize("write", SEEN)
def test_writes_may_begin_after_results_were_compared(x, write):
    begun = []
    block = Writing(lambda h, x: SEEN[write](h, x) if begun else h)
    level = Kept(block, [0, 1])
    for number in range(4):
        begun += [number] if number > 1 else []
        assert_equal(step(level, block, x)[0], step(block, block, x)[0])
    assert level.differences == 0


def test_writes_to_other_tensors_leave_kept_results(x):
    block = Writing(lambda h, x: torch.sin(h).add_(x))
    level = assert_as_kept(block, x)
    assert held_bytes(level, x.clone().requires_grad_())[0] == 2 * 2 * 8 * 16 * 4


class Table(nn.Module):
    """Attention without projections, which makes a table by one more product, and keeps it, where it has none yet.

    Where its forward runs again, the table is there. Sequences are as long as features are many, so that its two
    products take operands of the same shapes.

    Args:
        rank: of the table; 8 gives its product operands of these shapes, too.
    """

    def __init__(self, rank):
        super().__init__()
        self.gain, self.table, self.rank = nn.Parameter(torch.rand(8)), None, rank

    def forward(self, x):
        if self.table is None:
            self.table = torch.matmul(torch.ones(2, 8, self.rank), torch.ones(2, self.rank, 8))
        x = torch.sin(x * self.gain)
        return torch.sin(torch.matmul(torch.matmul(x, x.mT).softmax(-1) + self.table, x))


@pytest.mark.parametrize("rank", [2, 8])
def test_a_product_that_forward_alone_makes_does_not_shift_the_others(x, rank):
    block, x = Table(rank), x[..., :8]
    level = Kept(block, [0, 1])
    block(x)
    for number in range(4):
        found = []
        for run in (block, level):
            block.table = None if number > 1 else block.table  # after the first step, in which results are compared
            found.append(step(run, block, x)[0])
        assert_equal(*found)
    assert level.differences == 0


def test_results_of_inference_mode_run_again(x):
    class Judged(Attention):
        def forward(self, x):
            with torch.inference_mode():
                judged = self.out(self.out(x).sin()).sigmoid()
            return torch.sin(self.down(torch.sin(self.up(torch.sin(x)))) * judged.clone())

    block = Judged()
    level = assert_as_kept(block, x, [0, 1])
    assert held_bytes(level, x.clone().requires_grad_())[0] == sum(n for _, n in heavy_of(block, x)[:2]) > 0


def test_products_under_vmap(x):
    class Mapped(Attention):
        def forward(self, x):
            return torch.sin(torch.vmap(lambda each: torch.sin(self.down(torch.sin(self.up(each)))))(x))

    assert_as_kept(Mapped(), x)


def unseen(h, x):
    """Adds to the tensor past its version counter, and without torch's knowledge, as a kernel of somebody else may."""
    torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(h.detach())).add_(1.0)
    return h


def test_unseen_writes_are_found_where_a_result_is_first_compared_and_nothing_is_handed_back(x):
    block = Writing(unseen)
    assert_as_kept(block, x, differences=1)
    careless = Kept(block, [0], compares=False)
    assert not torch.equal(step(careless, block, x)[0][2], step(block, block, x)[0][2])  # the test can fail


# ---- several backwards


def test_further_backwards_take_the_same_results(x):
    block = Attention()
    level = Kept(block, range(5))
    for number in range(3):
        block.zero_grad()
        y = level(x.clone().requires_grad_())
        counts = []
        for _ in range(2):
            with Heavy() as heavy:
                y.square().sum().backward(retain_graph=True)
            counts.append(heavy.names[ATTENTION])
        expected = block(x.clone().requires_grad_())
        gradients = [parameter.grad for parameter in block.parameters()]
        for parameter in block.parameters():
            parameter.grad = None
        for _ in range(2):
            expected.square().sum().backward(retain_graph=True)
        assert_equal(gradients, [parameter.grad for parameter in block.parameters()])
        assert counts == ([1, 1] if number == 0 else [0, 0])


def test_two_outputs_with_two_backwards(x):
    block = Attention()

    def branches(x):
        return torch.sin(block.up(x)), torch.sin(block.out(x))

    level = Kept(branches, [0, 1])
    for _ in range(3):
        found = []
        for run in (branches, level):
            block.zero_grad()
            given = x.clone().requires_grad_()
            for y in run(given):
                y.sum().backward()
            found.append([given.grad, *(parameter.grad for parameter in block.parameters())])
        assert_equal(*found)


def test_double_backward(x):
    block = Attention()
    level = Kept(block, range(5))
    for _ in range(3):
        found = []
        for run in (block, level):
            block.zero_grad()
            given = x.clone().requires_grad_()
            with sdpa_kernel(SDPBackend.MATH):
                (gradient,) = torch.autograd.grad(run(given).square().sum(), given, create_graph=True)
                gradient.square().sum().backward()
            found.append([gradient.detach(), given.grad, *(parameter.grad for parameter in block.parameters())])
        assert_equal(*found)


def test_backward_inside_of_forward(x):
    """The block runs again while its forward runs, and counts neither those operations nor those of backward."""
    block = Attention()

    def penalised(x):
        hidden = block.up(torch.sin(x))
        (gradient,) = torch.autograd.grad(torch.tanh(block.down(torch.sin(hidden))).sum(), hidden, retain_graph=True)
        return torch.sin(block.down(hidden * gradient))

    level = Kept(penalised, [0, 1, 2])
    for _ in range(3):
        assert_equal(step(level, block, x)[0], step(penalised, block, x)[0])
    assert level.differences == 0


def test_several_forwards_before_their_backwards(x):
    block = Attention(0.1)
    level = Kept(block, [0, 2, 3])
    for seed in range(3):
        found = []
        for run in (block, level):
            torch.manual_seed(seed)
            block.zero_grad()
            outputs = [run((x + number).requires_grad_()) for number in range(3)]
            for y in reversed(outputs):
                y.square().sum().backward()
            found.append([parameter.grad for parameter in block.parameters()])
        assert_equal(*found)


# ---- kernels of attention


@pytest.mark.parametrize("kernel", [SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], ids=str)
def test_kernels_of_attention(x, kernel):
    assert_as_kept(Attention(), x, around=lambda: sdpa_kernel(kernel))


def test_another_kernel_in_backward_than_in_forward_is_refused_as_by_torch(x):
    block = Attention()
    level = Kept(block, range(5))
    for run in (lambda x: checkpoint(block, x, use_reentrant=False), level, level):
        with sdpa_kernel(SDPBackend.MATH):
            y = run(x.clone().requires_grad_())
        with pytest.raises(CheckpointError, match="different"):
            y.sum().backward()


class Masked(nn.Module):
    def __init__(self, mask):
        super().__init__()
        self.mask = mask

    def forward(self, x):
        return torch.sin(F.scaled_dot_product_attention(x, torch.sin(x), x, attn_mask=self.mask))


@pytest.mark.parametrize("mask", [torch.ones(8, 8).tril().bool(), torch.randn(2, 8, 8)], ids=["bool", "float"])
def test_masks_of_attention(x, mask):
    assert_as_kept(Masked(mask), x)


# ---- blocks of other kinds


class Experts(nn.Module):
    """Mixture of experts, of which each token has one: how many operations there are depends on the input."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.router = nn.Linear(16, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(4))

    def forward(self, x):
        tokens = x.flatten(0, 1)
        weight, chosen = self.router(tokens).softmax(-1).max(-1)
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            (places,) = torch.where(chosen == number)
            if len(places):
                out = out.index_add(0, places, expert(tokens[places]) * weight[places, None])
        return x + out.view_as(x)


@pytest.mark.parametrize("positions", [range(9), [0, 1, 3], [2, 7]], ids=str)
def test_experts_that_run_only_where_they_have_tokens(positions):
    block = Experts()
    level, counts = Kept(block, positions), set()
    for seed in range(8):
        x = torch.randn(1, 3 + seed % 2, 16, generator=torch.Generator().manual_seed(seed))
        counts.add(len(heavy_of(block, x)))
        assert_equal(step(level, block, x)[0], step(block, block, x)[0])
    assert len(counts) > 1
    assert level.differences == 0


def test_convolutions():
    torch.manual_seed(0)
    block = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(8, 8, 3, padding=1),
        nn.GELU(),
        nn.Conv2d(8, 3, 1),
    )
    assert_as_kept(block, torch.randn(2, 3, 6, 6))


class Inner(nn.Module):
    """Block whose own code recomputes a part of it."""

    def __init__(self):
        super().__init__()
        self.block = Attention(0.1)

    def forward(self, x):
        return torch.sin(checkpoint(self.block, torch.sin(self.block.out(x)), use_reentrant=False))


def test_a_block_that_recomputes_a_part_by_itself(x):
    assert_as_kept(Inner(), x)


def test_a_block_inside_of_another_checkpoint(x):
    block = Attention(0.1)
    level = Kept(block, [0, 3])
    for _ in range(3):
        found, _ = step(lambda x: checkpoint(level, x, use_reentrant=False), block, x)
        assert_equal(found, step(block, block, x)[0])


def test_tensors_of_subclasses_with_operations_of_their_own_are_left_alone(x):
    block = Writing(lambda h, x: h)
    level = Kept(block, [0, 1])
    for _ in range(3):
        found = []
        for run in (block, level):
            given = TwoTensor(x.clone(), x.clone() + 1).requires_grad_()
            y = run(given)
            y.sum().backward()
            found.append([y.a, y.b, given.grad.a, given.grad.b])
        assert_equal(*([each.detach() for each in tensors] for tensors in found))
    assert kept_tensors(y) == []


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"
)  # dynamo looks at it
@pytest.mark.parametrize("is_whole", [False, True], ids=["parts", "whole"])
def test_compiled_functions_of_a_block_stay_compiled(x, is_whole):
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    block = Attention()
    inner = torch.compile(lambda h: F.gelu(block.up(h)), backend=backend, fullgraph=is_whole)

    def forward(x):
        return torch.sin(block.down(inner(torch.sin(block.out(x)))))

    level = Kept(forward, [0, 1])
    for _ in range(3):
        found = []
        for run in (forward, level):  # without the mode of `step`, under which nothing is compiled
            block.zero_grad()
            given = x.clone().requires_grad_()
            run(given).square().sum().backward()
            found.append([given.grad, *(parameter.grad for parameter in block.parameters())])
        assert_equal(*found)
    assert graphs
    assert len(kept_tensors(level(x.clone().requires_grad_()))) == 2


# ---- errors, copies


def test_a_forward_that_fails_leaves_nothing(x):
    block = Attention()
    level, fails = Kept(block, [0, 1]), [True]
    handle = block.up.register_forward_hook(lambda *_: 1 / 0 if fails else None)
    with pytest.raises(ZeroDivisionError):
        level(x.clone().requires_grad_())
    assert not _get_current_function_mode_stack()
    fails.clear()
    assert_equal(step(level, block, x)[0], step(block, block, x)[0])
    handle.remove()


def test_refused_results_are_neither_kept_nor_handed_back(x):
    block = Attention()
    level = assert_as_kept(block, x, range(4))
    y = level(x.clone().requires_grad_())
    level.results.is_refused = True
    with Heavy() as heavy:
        y.sum().backward()
    assert heavy.names[ATTENTION] == 1
    assert held_bytes(level, x.clone().requires_grad_())[0] == 0


def test_a_copy_is_another_choice_that_knows_the_block(x):
    block = Attention()
    results = Kept(block, [0, 1], compares=False).results
    checkpoint(block, x.requires_grad_(), use_reentrant=False, context_fn=results.contexts)
    twin = copy.deepcopy(results)
    assert twin.chosen(True) == results.chosen(True)
