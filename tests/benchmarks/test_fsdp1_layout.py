"""What each rank holds of a unit under FSDP1, against FSDP1 itself."""

import random
import warnings
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
from torch.optim import SGD
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.fsdp1.layout import flat_elements, layout, pieces
from lightning_osdp.core.profile import ModelProfile, OperatorProfile, OptimizerProfile, ParameterProfile
from lightning_osdp.core.units import partition
from lightning_osdp.profiler.optimizer import profile_optimizers

CPU = torch.device("cpu")


class Held(nn.Module):
    """Parameters of these shapes."""

    def __init__(self, shapes, dtype=torch.float32):
        super().__init__()
        self.held = nn.ParameterList(torch.zeros(shape, dtype=dtype) for shape in shapes)


def random_shapes(draw, num):
    return [[draw.randint(1, 40) for _ in range(draw.randint(1, 2))] for _ in range(num)]


def profiles(module, gathered=None, optimized=None):
    return [
        ParameterProfile(
            position=position,
            num_elements=p.numel(),
            itemsize=p.element_size(),
            gathered_itemsize=(gathered or p.dtype).itemsize,
            is_trainable=p.requires_grad,
            state_bytes_per_element=optimized[p].state_bytes / p.numel() if optimized else 0.0,
            group=optimized[p].group if optimized else 0,
            place=optimized[p].place if optimized else 0,
        )
        for position, p in enumerate(module.parameters())
    ]


def unit_of(name, parameters):
    num_bytes = sum(p.num_elements * p.itemsize for p in parameters)
    trainable = sum(p.num_elements * p.itemsize for p in parameters if p.is_trainable)
    gathered = sum(p.num_elements * p.gathered_itemsize for p in parameters)
    return OperatorProfile(
        name=name,
        kind="Held",
        enclosing=(name, ""),
        parameter_bytes=num_bytes,
        num_trainable=sum(p.num_elements for p in parameters if p.is_trainable),
        gathered_bytes=gathered,
        trainable_bytes=trainable,
        gradient_bytes=sum(p.num_elements * p.gathered_itemsize for p in parameters if p.is_trainable),
        optimizer_bytes=0,
        parameters=tuple(parameters),
    )


def units_of(*parameters):
    """The root, and a unit for each list of parameters."""
    profile = ModelProfile.in_turn([unit_of(f"m{index}", each) for index, each in enumerate(parameters)])
    return partition(profile, min_unit_bytes=0)


@contextmanager
def fake_group(world_size, rank):
    """A process group of one process that takes itself for one of many."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def wrapped(module, gathered=None):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # on one rank FSDP says that it does not shard
        return FullyShardedDataParallel(
            module, use_orig_params=True, device_id=CPU, mixed_precision=MixedPrecision(param_dtype=gathered)
        )


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("world_size", [1, 2, 3, 7, 64])
def test_ranks_hold_what_fsdp_gives_them(world_size, seed):
    draw = random.Random(100 * world_size + seed)
    shapes = random_shapes(draw, draw.randint(1, 8))
    dtype = draw.choice([torch.float32, torch.float64, torch.bfloat16])
    gathered = draw.choice([None, torch.bfloat16, torch.float32])
    parameters = profiles(Held(shapes, dtype), gathered)
    for rank in sorted({0, world_size // 2, world_size - 1}):
        with fake_group(world_size, rank):
            module = wrapped(Held(shapes, dtype), gathered)
            assert module._handle.flat_param.numel() * world_size == flat_elements(parameters, world_size)
            assert [p.numel() for p in module.parameters()] == pieces(parameters, world_size, rank)


@pytest.mark.parametrize("world_size", [1, 2, 3, 7, 64])
def test_every_element_is_on_one_rank(world_size):
    parameters = profiles(Held(random_shapes(random.Random(world_size), 9)))
    held = [pieces(parameters, world_size, rank) for rank in range(world_size)]
    assert [sum(column) for column in zip(*held, strict=True)] == [p.num_elements for p in parameters]


def test_parameters_begin_at_multiples_of_16_bytes_and_the_end_is_padded_to_the_ranks():
    parameters = profiles(Held([[5], [3], [2]]))  # at 0, 8 and 12 of 14 elements
    assert flat_elements(parameters, 1) == 14
    assert flat_elements(parameters, 4) == 16
    assert [pieces(parameters, 4, rank) for rank in range(4)] == [[4, 0, 0], [1, 0, 0], [0, 3, 0], [0, 0, 2]]
    half = profiles(Held([[5], [3], [2]]), torch.bfloat16)  # at 0, 8 and 16
    assert flat_elements(half, 1) == 18
    assert flat_elements([], 4) == 0


def test_bytes_of_a_unit_count_its_paddings():
    (_, unit) = layout(units_of(profiles(Held([[5], [3], [2]]))), OptimizerProfile(), 4).units
    assert (unit.shard, unit.gathered, unit.flat_gradient, unit.reduced) == (16, 64, 64, 16)
    assert unit.gradients == 4 * 10


def test_bytes_of_a_unit_in_mixed_precision():
    (_, unit) = layout(units_of(profiles(Held([[8], [8]]), torch.bfloat16)), OptimizerProfile(), 4).units
    assert (unit.shard, unit.gathered, unit.cast_shard) == (16, 32, 8)
    assert (unit.flat_gradient, unit.scattered, unit.reduced) == (32, 8, 16)


def test_one_rank_gathers_nothing():
    (_, unit) = layout(units_of(profiles(Held([[5], [3]]))), OptimizerProfile(), 1).units
    assert (unit.shard, unit.gathered, unit.cast_shard) == (4 * 11, 0, 0)


def test_state_is_that_of_the_rank_that_has_most_of_it():
    module = Held([[30], [10]])
    _, optimized = profile_optimizers(module, lambda m: [SGD([m.held[0]], lr=0.1, momentum=0.9), SGD([m.held[1]])], CPU)
    units = units_of(profiles(module, optimized=optimized))
    # 42 elements on three ranks: 14 of the first parameter, 14, 2 of it and all of the second one
    assert [layout(units, OptimizerProfile(), 3, rank).optimizer_state for rank in range(3)] == [56, 56, 8]
    assert layout(units, OptimizerProfile(), 3).optimizer_state == 56
