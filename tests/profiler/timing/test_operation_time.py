from functools import partial
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.testbed.emulated.cuda import FakeCuda
from lightning_osdp.core.cluster import DeviceRates
from lightning_osdp.errors import ConfigurationError, UntraceableError
from lightning_osdp.machines import Machine
from lightning_osdp.profiler import LiveBytes
from lightning_osdp.profiler.step.fake_model import faked
from lightning_osdp.profiler.timing import operation_time
from lightning_osdp.profiler.timing.operation_time import (
    Operand,
    OperationRecorder,
    replayed_s,
    roofline_s,
    segment_seconds,
)
from tests.profiler.entangled_models import MODELS
from tests.profiler.traced import CPU, PRECISIONS, module_step
from tests.support.this_cpu import skip_what_it_lacks
from tests.support.tiers import in_turn

DTYPES = ("float32", "float64", "bfloat16")


def recorded(run, *tensors):
    with FakeTensorMode() as mode, OperationRecorder() as recorder:
        run(*(mode.from_tensor(tensor) for tensor in tensors))
    return [operation for counter in recorder.operations.values() for operation in counter.elements()]


def only(run, *tensors):
    (operation,) = recorded(run, *tensors)
    return operation


def recorded_step(name, precision="float32"):
    model, segments = MODELS[name](), [0]
    skip_what_it_lacks(model, precision)
    with faked(model, model.batch(), CPU) as batch, OperationRecorder(lambda: segments[-1]) as recorder:
        with PRECISIONS[precision]():
            returned = module_step(model, batch)
        segments.append(1)
        (returned["loss"] if isinstance(returned, dict) else returned).backward()
    return recorder.operations


def test_an_operation_is_its_shapes_strides_dtypes_and_options():
    operation = only(lambda x, y: torch.add(x.T, y, alpha=2), torch.ones(2, 3), torch.ones(3, 1, dtype=torch.float64))
    assert operation.function is torch.ops.aten.add.Tensor
    assert operation.arguments == (
        Operand((3, 2), (1, 3), torch.float32, CPU),
        Operand((3, 1), None, torch.float64, CPU),
    )
    assert operation.keywords == (("alpha", 2),)
    assert operation.results == (Operand((3, 2), (1, 3), torch.float64, CPU),)


def test_segments_are_the_callers():
    operations = recorded_step("Double")
    assert operations.keys() == {0, 1}
    forward, backward = (" ".join(str(o.function) for o in operations[segment]) for segment in (0, 1))
    assert "aten.addmm" in forward
    assert "aten.tanh_backward" not in forward
    assert "aten.tanh_backward" in backward


def test_equal_calls_are_counted_not_repeated():
    operations = recorded(lambda x: [x + 1, x + 1, x.clone() + 1, x + 2], torch.ones(3))
    assert len(operations) == 5
    assert len(set(operations)) == 3


@pytest.mark.parametrize(
    "run",
    [
        lambda x: x.view(-1),
        lambda x: x.T[1:].expand(4, 2, 2).unsqueeze(0),
        lambda x: x.detach(),
        lambda x: x.contiguous(),
        lambda x: x.to(torch.float32),
        lambda x: torch.ops.aten._unsafe_view(x, [6]),
        lambda x: x.t_(),
        torch.empty_like,
        lambda x: x.new_empty(100),
        lambda x: x.is_floating_point() and x.size(0),
    ],
)
def test_views_and_allocations_cost_nothing(run):
    assert recorded(run, torch.ones(2, 3)) == []


@pytest.mark.parametrize(
    ("run", "expected_bytes"),
    [
        (lambda x, y, i: x + x, 24 + 24 + 24),
        (lambda x, y, i: x.add_(1), 24 + 24),
        (lambda x, y, i: x @ y, 24 + 48 + 32),
        (lambda x, y, i: x.zero_(), 24),
        (lambda x, y, i: x.copy_(x[:1]), 12 + 24),
        (lambda x, y, i: x[:1].expand(1000, 3) * 2, 12 + 12000),
        (lambda x, y, i: y[:, :1].exp(), 12 + 12),
        (lambda x, y, i: torch.ones(5), 20),
        (lambda x, y, i: F.embedding(i, y), 40 + 48 + 80),
        (lambda x, y, i: F.embedding(i[:2], y), 16 + 32 + 32),
        (lambda x, y, i: torch.cat([x, x]), 48 + 48),
    ],
)
def test_bytes_that_an_operation_moves(run, expected_bytes):
    tensors = torch.ones(2, 3), torch.ones(3, 4), torch.zeros(5, dtype=torch.long)
    assert only(run, *tensors).moved_bytes == expected_bytes


def test_flops_of_products_convolutions_and_attention():
    assert only(lambda x, y: x @ y, torch.ones(2, 3), torch.ones(3, 4)).flops == 2 * 2 * 3 * 4
    image, kernel = torch.ones(1, 2, 5, 5), torch.ones(3, 2, 3, 3)
    assert only(F.conv2d, image, kernel).flops == 2 * (3 * 3 * 3) * (2 * 3 * 3)
    query = torch.ones(1, 2, 5, 8)
    assert only(lambda q: F.scaled_dot_product_attention(q, q, q), query).flops == 2 * (2 * 2 * 5 * 5 * 8)
    assert only(torch.exp, query).flops == 0


def test_roofline_takes_the_slower_of_computing_and_moving():
    product = only(lambda x, y: x @ y, torch.ones(2, 3), torch.ones(3, 4))
    assert roofline_s(product, DeviceRates(flops_per_s={"float32": 1.0}, bytes_per_s=1e9)) == 48
    assert roofline_s(product, DeviceRates(flops_per_s={"float32": 1e9}, bytes_per_s=1.0)) == 104
    assert roofline_s(only(torch.exp, torch.ones(5)), DeviceRates(flops_per_s={}, bytes_per_s=10.0)) == 4


def test_roofline_needs_a_rate_for_every_dtype():
    product = only(lambda x: x @ x, torch.ones(2, 2, dtype=torch.bfloat16))
    with pytest.raises(
        ConfigurationError, match=r"rate of torch.bfloat16, in which aten.mm.default computes, got rates"
    ):
        roofline_s(product, DeviceRates(flops_per_s={"float32": 1.0}, bytes_per_s=1.0))


def attention(num_tokens, *, is_causal, sizes=(1, 2), size=8, dtype=torch.float32):
    """Operations of attention in forward and in backward."""
    query = torch.empty(*sizes, num_tokens, size, dtype=dtype, requires_grad=True)
    run = partial(F.scaled_dot_product_attention, is_causal=is_causal)
    return [each for each in recorded(lambda q: run(q, q, q).sum().backward(), query) if each.flops]


def test_kernels_of_attention_leave_out_tiles_that_a_mask_leaves_out():
    stated = {"flops_per_s": {"float32": 1.0}, "bytes_per_s": 1e30}
    whole = DeviceRates(**stated)
    kernel = DeviceRates(**stated, is_cuda=True, attention_forward=0.5, attention_backward=0.25)
    for is_causal, keys in ((False, 512), (True, (512 + 128) / 2)):
        forward, backward = attention(512, is_causal=is_causal)
        assert (forward.flops, backward.flops) == (4 * 2 * 512 * 512 * 8, 10 * 2 * 512 * 512 * 8)
        assert roofline_s(forward, whole) == forward.flops
        assert roofline_s(forward, kernel) == pytest.approx(forward.flops * (keys + 100) / 512 / 0.5)
        assert roofline_s(backward, kernel) == pytest.approx(backward.flops * (keys + 300) / 512 / 0.25)
    (product, *_) = recorded(lambda x: x @ x, torch.ones(2, 2))
    assert roofline_s(product, kernel) == product.flops


MEASURED_ON_H200 = {1024: (468, 330), 4096: (597, 497), 16384: (648, 559)}
"""Tokens -> TFLOP/s of causal attention in forward and backward, half of the operations counted
(``docs/research/gpus/measured.md``)."""


@pytest.mark.parametrize("num_tokens", MEASURED_ON_H200)
def test_attention_takes_about_what_it_took_on_an_h200(num_tokens):
    rates = Machine.parse("1 h200").rates
    operations = attention(num_tokens, is_causal=True, size=128, dtype=torch.bfloat16)
    for operation, measured in zip(operations, MEASURED_ON_H200[num_tokens], strict=True):
        predicted = operation.flops / 2 / roofline_s(operation, rates) / 1e12
        assert measured < predicted < measured * 1.13


def test_each_distinct_operation_is_asked_for_once():
    asked, segments = [], [0]
    with FakeTensorMode(), OperationRecorder(lambda: segments[-1]) as recorder:
        x = torch.ones(3)
        segments.append(5)
        x = x + 1 + 1
        segments.append(7)
        x = x + 1

    def seconds_of(operation):
        asked.append(operation)
        return 1.0 if "add" in str(operation.function) else 10.0

    assert segment_seconds(recorder.operations, seconds_of) == {0: 10.0, 5: 2.0, 7: 1.0}
    assert len(asked) == len(set(asked)) == 2


@pytest.mark.parametrize(("name", "precision"), in_turn(sorted(MODELS.keys() - {"SkipsLayers"}), PRECISIONS))
def test_every_operation_of_a_step_can_be_replayed(name, precision):
    operations = recorded_step(name, precision)
    before = torch.get_rng_state()
    replayed = segment_seconds(operations, partial(replayed_s, device=CPU))
    assert torch.equal(torch.get_rng_state(), before)
    rates = DeviceRates(flops_per_s=dict.fromkeys(DTYPES, 1e12), bytes_per_s=1e9)
    bounds = segment_seconds(operations, partial(roofline_s, rates=rates))
    for seconds in (replayed, bounds):
        assert seconds.keys() == {0, 1}
        assert min(seconds.values()) > 0


def test_replaying_allocates_operands_and_results_only():
    product = only(lambda x, y: x @ y.T, torch.ones(200, 300), torch.ones(400, 300))
    with LiveBytes("cpu") as live:
        replayed_s(product, CPU)
    rng_state_bytes = torch.get_rng_state().nbytes
    assert live.current_bytes <= rng_state_bytes
    assert product.moved_bytes <= live.peak_bytes <= product.moved_bytes + 2 * rng_state_bytes


def test_strides_and_values_are_as_the_step_has_them():
    seen = []
    operation = only(lambda x, i: x.expand(3, 2) * i.T, torch.ones(2), torch.ones(2, 3, dtype=torch.bool))

    class Watched(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is operation.function:
                seen.append(args)
            return func(*args, **(kwargs or {}))

    with Watched():
        replayed_s(operation, CPU)
    x, mask = seen[0]
    assert (x.stride(), mask.stride()) == ((0, 1), (1, 3))
    assert not mask.any()
    assert ((x >= 0) & (x < 1)).all()
    assert x.unique().numel() > 1


def test_what_cannot_be_replayed_is_said():
    division = only(lambda x: x // x, torch.ones(3, dtype=torch.long))
    with pytest.raises(
        UntraceableError, match=r"Expected aten.floor_divide.default to run on random numbers"
    ) as refused:
        replayed_s(division, CPU)
    assert isinstance(refused.value.__cause__, RuntimeError)


def test_sparse_operations_are_refused():
    layer = nn.Embedding(6, 4, sparse=True)
    with (
        pytest.raises(UntraceableError, match=r"Expected operations on strided tensors.*sparse"),
        faked(layer, torch.zeros(3, dtype=torch.long), CPU) as batch,
        OperationRecorder(),
    ):
        layer(batch).sum().backward()


def test_random_operations_leave_a_modules_own_generator_alone():
    generator = torch.Generator().manual_seed(1)
    operation = only(lambda x: x.bernoulli_(0.5, generator=generator), torch.ones(3))
    before = generator.get_state()
    replayed_s(operation, CPU)
    assert torch.equal(generator.get_state(), before)


INDEXED = {
    "embedding": (lambda x, i: F.embedding(i, x), 500),
    "embedding_backward": (lambda x, i: torch.ops.aten.embedding_dense_backward(x[:40], i, 300, -1, False), 300),
    "nll_loss": (lambda x, i: F.nll_loss(x[:40], i), 8),
    "gather": (lambda x, i: x.gather(1, i.view(5, 8)), 8),
    "index_select": (lambda x, i: x.index_select(0, i), 500),
    "scatter_add": (lambda x, i: x.scatter_add(0, i.view(5, 8), x[:5]), 500),
    "index": (lambda x, i: x[i], 500),
    "index_put": (lambda x, i: x.index_put((i,), x[:40], accumulate=True), 500),
    "index_of_columns": (lambda x, i: x[:, i], 8),
}


def operands_seen(operation):
    """Returns the operands of every call while an operation is replayed."""
    seen = []

    class Watched(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is operation.function:
                seen.append([leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)])
            return func(*args, **(kwargs or {}))

    with Watched():
        replayed_s(operation, CPU)
    return seen


@pytest.mark.parametrize("name", INDEXED)
def test_indices_are_spread_over_all_rows(name):
    run, num_rows = INDEXED[name]
    operations = recorded(run, torch.ones(500, 8), torch.zeros(40, dtype=torch.long))
    operation = next(each for each in operations if any(o.dtype is torch.long for o in each.operands))
    for operands in operands_seen(operation):
        (index,) = (operand for operand in operands if operand.dtype is torch.long)
        assert 0 <= int(index.min()) <= num_rows // 4
        assert num_rows * 3 // 4 - 1 <= int(index.max()) < num_rows
        assert len(index.unique()) >= min(num_rows, 40) // 2


def test_masks_select_nothing():
    operation = only(lambda x, m: x.index_put((m,), x[0, 0]), torch.ones(4, 5), torch.zeros(4, 5, dtype=torch.bool))
    assert not any(operands[1].any() for operands in operands_seen(operation))


@pytest.mark.parametrize(("most_bytes", "num_sets"), [(0, 1), (3 * 24, 3), (2**30, 10)])
def test_calls_in_flight_take_operands_in_turns(most_bytes, num_sets, monkeypatch):
    monkeypatch.setattr(operation_time, "_MOST_ROTATED_BYTES", most_bytes)
    monkeypatch.setattr(operation_time, "_CALLS_IN_FLIGHT", 10)
    operation = only(torch.exp, torch.ones(2, 3))
    seen = []

    def watched(call, device, *, repeats, num_calls, budget_s):
        with Watched():
            for _ in range(num_calls):
                call()
        return 1.0

    class Watched(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(args[0])
            return func(*args, **(kwargs or {}))

    monkeypatch.setattr(operation_time, "fastest_s", watched)
    with FakeCuda().installed():
        assert replayed_s(operation, torch.device("cuda")) == 1.0
    assert len(seen) == 10
    assert len({tensor.data_ptr() for tensor in seen}) == num_sets
    assert all(one.data_ptr() != other.data_ptr() for one, other in pairwise(seen) if num_sets > 1)
